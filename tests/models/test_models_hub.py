"""What is taken from a repository: never a drafter, never another model, never a file outside the store."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.errors import DoesNotFitError, EdgeError, UnavailableError, UsageError
from edge.models.open import open_model
from edge.models.pull import check, pull
from edge.models.receipt import read
from edge.models.source import is_source, parse
from edge.models.store import Store
from edge.models.transfer import PullOptions
from edge.models.verdict import VerdictError
from tests.fakes.gguf_writer import Gguf
from tests.fakes.hub import Fault, Hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def _model(path: Path, arch: str = "qwen35", kind: str = "Q4_K", number: int = 15, layers: int = 8) -> None:
    Gguf(arch).model(type=kind, file_type=number, n_layer=layers).save(path)


def fetch(hub: Hub, models: Path, ref: str) -> str:
    return Path(pull(ref, models, PullOptions(endpoint=hub.url, sleep=lambda seconds: None)).path).name


def test_case_05_a_drafter_is_never_taken_for_the_model(hub: Hub, models: Path) -> None:
    """ggml-org/llama.cpp#24495: drafters with every quantization beside one model with a single one."""
    repo = hub.root / "unsloth/gemma-4-E4B-it-qat-GGUF"
    _model(repo / "gemma-4-E4B-it-qat-UD-Q4_K_XL.gguf", "gemma4")
    for quant, kind, number in (("Q8_0", "Q8_0", 7), ("F16", "F16", 1)):
        _model(repo / f"MTP/gemma-4-E4B-it-qat-{quant}-MTP.gguf", "gemma4-assistant", kind, number, 1)
    assert fetch(hub, models, "hf://unsloth/gemma-4-E4B-it-qat-GGUF") == "gemma-4-E4B-it-qat-UD-Q4_K_XL.gguf"
    with pytest.raises(UnavailableError, match="has no F16"):
        fetch(hub, models, "hf://unsloth/gemma-4-E4B-it-qat-GGUF:F16")


def test_a_drafter_is_fetched_where_its_file_is_named_and_drafts_by_that_name(hub: Hub, models: Path) -> None:
    """The key `draft` takes what the operator pulled: the source, or its name."""
    repo = hub.root / "unsloth/gemma-4-E4B-it-qat-GGUF"
    _model(repo / "gemma-4-E4B-it-qat-UD-Q4_K_XL.gguf", "gemma4")
    _model(repo / "MTP/gemma-4-E4B-it-qat-Q8_0-MTP.gguf", "gemma4-assistant", "Q8_0", 7, 1)
    ref = "hf://unsloth/gemma-4-E4B-it-qat-GGUF/MTP/gemma-4-E4B-it-qat-Q8_0-MTP.gguf"
    assert fetch(hub, models, ref) == "gemma-4-E4B-it-qat-Q8_0-MTP.gguf"
    for name in (ref, Store(models).list()[0].name):
        found = Store(models).resolve(name, drafter=True)
        assert found.meta.kind == "drafter" and Path(found.path).name == "gemma-4-E4B-it-qat-Q8_0-MTP.gguf"
        with pytest.raises(VerdictError, match="drafter for speculative decoding"):
            Store(models).resolve(name)


def test_case_05_a_drafter_of_the_models_own_architecture_is_told_by_its_layers(hub: Hub, models: Path) -> None:
    repo = hub.root / "huihui-ai/Ornith-1.0-9B-abliterated-MTP-GGUF"
    _model(repo / "ornith-9b-mtp-kl-Q4_K_M.gguf")
    _model(repo / "mtp-ornith-9b-mtp-kl-Q8_0.gguf", kind="Q8_0", number=7, layers=1)
    assert fetch(hub, models, "hf://huihui-ai/Ornith-1.0-9B-abliterated-MTP-GGUF") == "ornith-9b-mtp-kl-Q4_K_M.gguf"


def test_case_05_a_projector_under_another_name_is_no_candidate(hub: Hub, models: Path) -> None:
    repo = hub.root / "google/gemma-4-26B-A4B-it-qat-q4_0-gguf"
    _model(repo / "gemma-4-26B_q4_0-it.gguf", "gemma4", "Q4_0", 2)
    Gguf("clip").projector(256).save(repo / "gemma-4-26B-it-vision-tower-f16.gguf")
    assert fetch(hub, models, "hf://google/gemma-4-26B-A4B-it-qat-q4_0-gguf") == "gemma-4-26B_q4_0-it.gguf"


def test_case_24_two_models_are_the_users_choice(hub: Hub, models: Path) -> None:
    for name in ("alpha", "beta"):
        _model(hub.root / f"c/two-models/{name}-Q5_K_M.gguf", kind="Q5_K", number=17)
    for ref in ("hf://c/two-models", "hf://c/two-models:Q5_K_M"):
        with pytest.raises(UsageError, match="holds 2 models") as error:
            fetch(hub, models, ref)
        assert "alpha-Q5_K_M.gguf" in str(error.value.table) and "beta-Q5_K_M.gguf" in str(error.value.table)
    assert fetch(hub, models, "hf://c/two-models/beta-Q5_K_M.gguf") == "beta-Q5_K_M.gguf"


def test_a_publishers_variants_are_one_model(hub: Hub, models: Path) -> None:
    for name in ("Some.Model.v1.2.i1", "Some.Model.v1.2"):
        _model(hub.root / f"a/gguf-dots/{name}-Q4_K_M.gguf")
    assert fetch(hub, models, "hf://a/gguf-dots:Q4_K_M") == "Some.Model.v1.2-Q4_K_M.gguf"


def test_a_repository_of_that_name_holds_the_model_of_that_name(hub: Hub, models: Path) -> None:
    for name in ("Alpha-7B", "Other-Thing"):
        _model(hub.root / f"o/Alpha-7B-GGUF/{name}-Q4_K_M.gguf")
    assert fetch(hub, models, "hf://o/Alpha-7B-GGUF") == "Alpha-7B-Q4_K_M.gguf"


def test_a_drafter_alone_is_recognized(tmp_path: Path) -> None:
    _model(tmp_path / "draft-Q8_0.gguf", "eagle3", "Q8_0", 7, 1)
    with pytest.raises(VerdictError, match="drafter for speculative decoding"):
        open_model(tmp_path / "draft-Q8_0.gguf")


def test_modelscope_is_a_source_with_the_same_checks(hub: Hub, models: Path) -> None:
    _model(hub.root / "Qwen/Alpha-GGUF/Alpha-Q4_K_M.gguf")
    ref = "modelscope://Qwen/Alpha-GGUF:Q4_K_M"
    assert str(parse(ref)) == ref
    found = pull(ref, models, PullOptions(endpoint=hub.url, sleep=lambda seconds: None))
    assert Path(found.path).name == "Alpha-Q4_K_M.gguf"
    assert [seen.path.partition("?")[0] for seen in hub.requests if "/api/" in seen.path] == [
        "/api/v1/models/Qwen/Alpha-GGUF/repo/files"
    ]
    hub.faults.append(Fault("corrupt"))
    with pytest.raises(EdgeError, match="SHA-256"):
        pull(ref, models.with_name("other"), PullOptions(endpoint=hub.url, sleep=lambda seconds: None))


MODELSCOPE = "modelscope://Qwen/Alpha-GGUF:Q4_K_M"


@pytest.fixture
def modelscope(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub as MODELSCOPE_ENDPOINT names it; Hugging Face's own variable leads nowhere."""
    _model(hub.root / "Qwen/Alpha-GGUF/Alpha-Q4_K_M.gguf")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"{hub.url}/")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return hub


def fetch_there(models: Path) -> str:
    return pull(MODELSCOPE, models, PullOptions(sleep=lambda seconds: None)).path


def test_modelscope_has_its_own_mirror_and_gets_no_token_of_hugging_face(modelscope: Hub, models: Path) -> None:
    path = Path(fetch_there(models))
    assert path.read_bytes() == (modelscope.root / "Qwen/Alpha-GGUF/Alpha-Q4_K_M.gguf").read_bytes()
    assert [seen.path for seen in modelscope.requests if "resolve" in seen.path] == [
        "/models/Qwen/Alpha-GGUF/resolve/master/Alpha-Q4_K_M.gguf"
    ]
    assert not any("authorization" in seen.headers for seen in modelscope.requests)
    receipt = read(path.parent)
    assert receipt is not None and receipt.source.startswith("modelscope://Qwen/Alpha-GGUF/Alpha-Q4_K_M.gguf")


def test_a_cut_transfer_of_modelscope_goes_on_where_it_ended(modelscope: Hub, models: Path) -> None:
    modelscope.faults.append(Fault("cut", after=5000))
    path = Path(fetch_there(models))
    assert path.read_bytes() == (modelscope.root / "Qwen/Alpha-GGUF/Alpha-Q4_K_M.gguf").read_bytes()
    first, second = modelscope.files_asked()
    assert "range" not in first.headers and second.headers["range"] == "bytes=5000-"


def test_what_modelscope_gave_is_there_without_a_network(
    modelscope: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_there(models)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:1")
    assert Store(models).resolve(MODELSCOPE).path == path
    with pytest.raises(EdgeError) as error:
        fetch_there(models.with_name("other"))
    assert "MODELSCOPE_ENDPOINT" in (error.value.hint or "") and "HF_" not in (error.value.hint or "")


def test_hints_about_modelscope_name_modelscope(modelscope: Hub, models: Path) -> None:
    _model(modelscope.root / "Qwen/Two-GGUF/alpha-Q5_K_M.gguf", kind="Q5_K", number=17)
    _model(modelscope.root / "Qwen/Two-GGUF/beta-Q5_K_M.gguf", kind="Q5_K", number=17)
    for ref, hint in (("Qwen/Two-GGUF", "modelscope://Qwen/Two-GGUF/"), ("Qwen/None-GGUF", "of ModelScope")):
        with pytest.raises(EdgeError) as error:
            pull(f"modelscope://{ref}", models, PullOptions(sleep=lambda seconds: None))
        assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    "row",
    [
        {"rfilename": "../../../escape-Q4_K_M.gguf", "size": 5},
        {"rfilename": "/abs-Q4_K_M.gguf", "size": 5},
        {"rfilename": "a\x1b]52;c;aGk=\x07-Q4_K_M.gguf", "size": 5},
        {"rfilename": "x" * 300 + "-Q4_K_M.gguf", "size": 5},
        {"rfilename": 7},
        {"rfilename": "Alpha-Q8_0.gguf", "size": "many", "lfs": ["x"]},
        "text",
        None,
    ],
)
def test_a_hostile_listing_costs_its_own_row_only(hub: Hub, models: Path, row: object) -> None:
    _model(hub.root / "o/Alpha-GGUF/Alpha-Q4_K_M.gguf")
    hub.listed.append(row)
    assert fetch(hub, models, "hf://o/Alpha-GGUF:Q4_K_M") == "Alpha-Q4_K_M.gguf"
    assert not list(models.parent.glob("escape*"))


@pytest.mark.parametrize(
    "ref",
    [
        "https://host/x/..%2f..%2fescape.gguf",
        "https://host/x/%2fabs.gguf",
        "https://host/x/..%5cwin.gguf",
        "https://host/x/a%00.gguf",
        "https://host/x/%1b%5d52.gguf",
        "https://host/x/a%0ab.gguf",
        "https://host/x/..",
        "https://host/x/" + "n" * 300 + ".gguf",
        "hf://owner/repo/../../x.gguf",
        "hf://owner/repo/a\nb.gguf",
        "pypi://dist==1.0/../x.gguf",
        "pypi://dist==1.0//etc/x.gguf",
    ],
)
def test_a_name_that_leaves_the_store_or_no_terminal_can_carry_is_refused(ref: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(ref)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("body", [b"[" * 100_000, b"no json", b"[]", b'{"siblings": 5}'])
def test_an_answer_that_is_no_list_is_an_error_of_the_hub(hub: Hub, models: Path, body: bytes) -> None:
    hub.api_bodies.extend([body] * 3)
    with pytest.raises(EdgeError):
        fetch(hub, models, "hf://o/Alpha-GGUF")


def test_a_check_fetches_nothing_and_finds_what_would_fail(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model(hub.root / "o/Alpha-GGUF/Alpha-Q4_K_M.gguf")
    size = (hub.root / "o/Alpha-GGUF/Alpha-Q4_K_M.gguf").stat().st_size
    assert check("hf://o/Alpha-GGUF", models, PullOptions(endpoint=hub.url)) == size
    assert check(f"{hub.url}/files/o/Alpha-GGUF/Alpha-Q4_K_M.gguf", models) == size
    with pytest.raises(UnavailableError, match="404"):
        check(f"{hub.url}/files/o/none.gguf", models)
    with pytest.raises(UnavailableError, match="no repository"):
        check("hf://o/Nothing-GGUF", models, PullOptions(endpoint=hub.url))
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1))  # type: ignore[attr-defined]
    with pytest.raises(DoesNotFitError):
        check("hf://o/Alpha-GGUF", models, PullOptions(endpoint=hub.url))
    assert not models.exists()


def test_a_check_asks_a_gated_repository_for_its_first_file(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list is open to everyone: without a licence only the files are refused."""
    _model(hub.root / "o/Alpha-GGUF/Alpha-Q4_K_M.gguf")
    hub.gated_files = True
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(models / "token"))
    with pytest.raises(UnavailableError, match="not public") as caught:
        check("hf://o/Alpha-GGUF", models, PullOptions(endpoint=hub.url))
    assert "accept its licence" in (caught.value.hint or "") and "HF_TOKEN" in (caught.value.hint or "")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert check("hf://o/Alpha-GGUF", models, PullOptions(endpoint=hub.url))
    (asked,) = hub.files_asked()
    assert asked.headers["range"] == "bytes=0-0"
    hub.faults.append(Fault("503"))
    assert check("hf://o/Alpha-GGUF", models, PullOptions(endpoint=hub.url)), "the download repeats these"


def test_a_check_does_not_read_what_a_hub_without_ranges_sends(hub: Hub, models: Path) -> None:
    _model(hub.root / "o/Alpha-GGUF/Alpha-Q4_K_M.gguf")
    hub.ranges = False
    rest = threading.Event()
    hub.faults.append(Fault("slow", event=rest))
    try:
        assert check("hf://o/Alpha-GGUF", models, PullOptions(endpoint=hub.url))
        assert not rest.is_set() and len(hub.files_asked()) == 1
    finally:
        rest.set()


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf.co/acme/Gamma-GGUF:Q4_K_M", "hf://acme/Gamma-GGUF:Q4_K_M"),
        ("huggingface.co/acme/Gamma-GGUF", "hf://acme/Gamma-GGUF"),
        ("https://huggingface.co/acme/Gamma-GGUF", "hf://acme/Gamma-GGUF"),
        ("https://huggingface.co/acme/Gamma-GGUF/", "hf://acme/Gamma-GGUF"),
    ],
)
def test_a_repositorys_address_is_a_source(text: str, source: str) -> None:
    assert is_source(text) and str(parse(text)) == source


def test_names_with_spaces_and_signs_of_an_address_are_fetched(hub: Hub, models: Path) -> None:
    _model(hub.root / "me/My-Model-GGUF/my model (v1.0) #2 ?50%.Q4_K_M.gguf")
    assert fetch(hub, models, "hf://me/My-Model-GGUF") == "my model (v1.0) #2 ?50%.Q4_K_M.gguf"
