"""Models of other programs' stores are served in place (Ollama, LM Studio), and an import is found again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from edge.cli import main
from edge.errors import ModelMissingError, UsageError
from edge.models.check import check_deep
from edge.models.install import import_model
from edge.models.job import jobs
from edge.models.open import open_model
from edge.models.store import Store, standard
from edge.models.survey import survey
from edge.paths import folders, user_folders
from tests.fakes.gguf_writer import Gguf
from tests.models.test_models_install import remove
from tests.plan.random_gguf import Shape, write
from tests.serving import Up


def ollama(
    root: Path,
    name: str,
    tag: str = "latest",
    *,
    projector: bool = False,
    namespace: str = "library",
    model: bytes | None = None,
) -> Path:
    """A model as `ollama pull` leaves it; returns its blob. `model`: another file than one with only a header."""
    layers = []
    files = {"model": model or Gguf("llama").model().set("general.name", name).bytes()}
    if projector:
        files["projector"] = Gguf("clip").projector(256).bytes()
    for kind, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        blob = root / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        media = f"application/vnd.ollama.image.{kind}"
        layers.append({"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)})
    manifest = root / "manifests/registry.ollama.ai" / namespace / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return root / "blobs" / f"sha256-{layers[0]['digest'][7:]}"  # type: ignore[index]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Store:
    env = {"HOME": str(home)}
    return standard(user_folders(env), [], env)


def test_ollamas_models_have_their_names_and_are_served_in_place(home: Path, store: Store) -> None:
    blob = ollama(home / ".ollama/models", "qwen3", "8b", projector=True)
    ollama(home / ".ollama/models", "phi", namespace="me")
    assert [entry.name for entry in store.list()] == ["me-phi", "qwen3-8b"]
    model = store.resolve("qwen3-8b")
    assert (model.path, model.name, model.quant) == (str(blob), "qwen3-8b", "Q5_K_M")
    assert model.mmproj is not None and model.mmproj_bytes > 0
    assert open_model(blob).name == "qwen3-8b"
    assert {store.resolve(name).path for name in ("qwen3:8b", "Qwen3:8B", "qwen3-8b:Q5_K_M")} == {str(blob)}
    assert store.resolve("me-phi:latest").name == "me-phi"
    with pytest.raises(ModelMissingError):
        store.resolve("qwen3:4b")
    assert {line.id for line in survey(store) if line.usable} == {"me-phi:Q5_K_M", "qwen3-8b:Q5_K_M"}
    with pytest.raises(UsageError, match="not ours"):
        remove(store, "qwen3-8b")


def test_lm_studios_folders_are_looked_through(home: Path, store: Store) -> None:
    Gguf("llama").model().save(home / ".lmstudio/models/acme/Gamma-GGUF/Gamma-Q5_K_M.gguf")
    assert store.resolve("Gamma:Q5_K_M").name == "Gamma"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"layers": 5}', '{"layers": [5]}', '{"layers": [{"mediaType": 1, "digest": "sha256:../x"}]}'],
)
def test_a_bad_manifest_costs_its_own_model_only(home: Path, store: Store, text: str) -> None:
    ollama(home / ".ollama/models", "good")
    bad = home / ".ollama/models/manifests/registry.ollama.ai/library/bad/latest"
    bad.parent.mkdir()
    bad.write_text(text)
    assert [entry.name for entry in store.list()] == ["good"]


def test_an_instance_of_its_own_sees_another_store_only_by_name(home: Path, tmp_path: Path) -> None:
    ollama(home / ".ollama/models", "good")
    own = folders({}, tmp_path / "state")
    assert standard(own, [], {"HOME": str(home)}).list() == []
    named = {"HOME": str(home), "OLLAMA_MODELS": str(home / ".ollama/models")}
    assert [entry.name for entry in standard(own, [], named).list()] == ["good"]


@pytest.mark.parametrize("source", ["blob", "model.bin"])
def test_what_an_import_serves_is_found_again_and_removed(home: Path, tmp_path: Path, source: str) -> None:
    """A file without .gguf was imported and then in no list."""
    path = ollama(home / ".ollama/models", "qwen3", projector=True)
    if source == "model.bin":
        path = path.rename(tmp_path / "model.bin")
    models = tmp_path / "models"
    imported = import_model(path, models)
    store = Store(models)
    assert [entry.verdict for entry in store.list() if entry.path == Path(imported.path)] == [None]
    assert store.resolve(imported.name).path == imported.path
    assert (imported.mmproj is not None) == (source == "blob")
    remove(store, imported.name)
    with pytest.raises(ModelMissingError):
        store.resolve(imported.name)


def test_of_a_linked_model_only_the_link_is_removed(home: Path, tmp_path: Path) -> None:
    """A folder of another program that is linked into the store is not ours: its files would go."""
    theirs = home / ".lmstudio/models/acme"
    file = Gguf("llama").model().save(theirs / "Gamma-GGUF" / "Gamma-Q5_K_M.gguf")
    models = tmp_path / "models"
    models.mkdir()
    (models / "Linked-Q5_K_M.gguf").symlink_to(file)
    (models / "acme").symlink_to(theirs)
    (tmp_path / "alias").symlink_to(models)
    store = Store(tmp_path / "alias")
    assert {entry.name for entry in store.list()} == {"Linked"}, "one file, found once"
    remove(store, "Linked")
    assert file.exists() and not (models / "Linked-Q5_K_M.gguf").is_symlink()
    assert [entry.name for entry in store.list()] == ["Gamma"]
    with pytest.raises(UsageError, match="which is not ours") as caught:
        remove(store, "Gamma")
    assert str(file.parent) in str(caught.value) and file.exists()


@pytest.mark.e2e
def test_an_imported_blob_is_served_by_its_name(
    home: Path, tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` and `up` find it by the name that its manifest gives it."""
    tiny = write(tmp_path / "Tiny-F16.gguf", Shape(layers=2, embd=128, heads=2, kv_heads=2, ff=128), smollm2)
    blob = ollama(home / ".ollama/models", "tiny", "2l", model=tiny.read_bytes())
    state = tmp_path / "s"
    place = ("--state-dir", str(state))
    assert main(["model", "import", str(blob), *place]) == 0
    capsys.readouterr()
    for file in (tiny, blob):
        file.unlink()
    assert main(["plan", "-p", "cpu", "-m", "tiny-2l", "--json", "--set", "n_ctx=512", *place]) == 0
    ((name, model),) = json.loads(capsys.readouterr().out)["models"].items()
    assert name == "tiny-2l" and folders({}, state).models in Path(model["model"]["path"]).parents
    with Up(state, "-p", "cpu", "-m", "tiny-2l", "--set", "n_ctx=512") as up:
        up.wait_for("ok")
        assert up.chat().json()["model"] == "tiny-2l"


@pytest.mark.parametrize("text", ["[" * 50_000, "{", "5", '{"schema": 1, "files": 5}', '{"schema": 1, "files": [5]}'])
def test_damaged_files_of_ours_stop_no_list(tmp_path: Path, text: str) -> None:
    """Receipts, jobs and the header cache: the model is listed without them."""
    models, cache = tmp_path / "models", tmp_path / "cache"
    Gguf("llama").model().save(models / "m/m-Q5_K_M.gguf")
    (models / ".partial/x").mkdir(parents=True)
    cache.mkdir()
    for path in (models / "m/source.json", models / ".partial/x/job.json", cache / "headers.json"):
        path.write_text(text)
    assert [line.usable for line in survey(Store(models), cache)] == [True]
    assert jobs(models) == []
    assert open_model(models / "m/m-Q5_K_M.gguf").name == "m"


def test_the_name_of_a_blob_is_a_hash_to_compare_with(home: Path, store: Store) -> None:
    blob = ollama(home / ".ollama/models", "qwen3")
    report = check_deep(store.resolve("qwen3"))
    assert report.healthy and report.files[0].expected == blob.name.removeprefix("sha256-")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(bytes(data))
    assert not check_deep(store.resolve("qwen3")).healthy


def test_stores_in_a_closed_home_are_none(short_dir: Path) -> None:
    """A service with `User=` has its user's HOME, which ProtectHome= closes: the model of its own folder is served."""
    home, models = short_dir / "home", short_dir / "models"
    ollama(home / ".ollama/models", "gemma3")
    Gguf("llama").model().save(models / "Own-Q5_K_M.gguf")
    short_dir.chmod(0o755)
    home.chmod(0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            found = Store(models, [home / ".cache/huggingface/hub", home / ".ollama/models"]).list()
            status = int([entry.name for entry in found] != ["Own"])
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    home.chmod(0o700)
