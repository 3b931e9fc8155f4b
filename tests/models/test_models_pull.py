"""Pull from a server that behaves like the hub, and from one that does not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from edge.errors import BadDataError, ConfigError, DoesNotFitError, EdgeError, UnavailableError, UsageError
from edge.models import transfer
from edge.models.job import ResumableError, sweep
from edge.models.progress import TransferProgress
from edge.models.pull import check, pull
from edge.models.receipt import read
from edge.models.store import Store
from edge.models.transfer import PullOptions, make_client
from edge.models.verdict import VerdictError
from tests.fakes.gguf_writer import Gguf, save_set
from tests.fakes.hub import COMMIT, Fault, Hub
from tests.models.test_models_install import damage

BIG_LAYERS = 12


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    root = tmp_path / "hub"
    repo = root / "acme" / "Gamma-GGUF"
    Gguf("llama", fill=1).model(n_layer=BIG_LAYERS, type="Q5_K").save(repo / "Gamma-Q5_K_M.gguf")
    Gguf("llama").model(type="Q8_0", file_type=7).save(repo / "Gamma-Q8_0.gguf")
    Gguf("llama").model(type="Q4_K", file_type=15).save(repo / "Gamma-UD-Q4_K_M.gguf")
    Gguf("clip").projector().save(repo / "mmproj-F16.gguf")
    (repo / "README.md").write_text("# hello")
    save_set(root / "acme" / "Big-GGUF" / "Q5_K_M", "Big-Q5_K_M", 3)
    with Hub(root) as running:
        yield running


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


class Pauses(list[float]):
    """A sleep that only remembers."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def fetch(hub: Hub, models: Path, ref: str, **more: Any) -> Any:
    return pull(ref, models, PullOptions(endpoint=hub.url, **{"sleep": Pauses(), **more}))


def leftovers(models: Path) -> list[str]:
    partial = models / ".partial"
    return sorted(str(path.relative_to(partial)) for path in partial.rglob("*")) if partial.exists() else []


def source_bytes(hub: Hub, name: str = "acme/Gamma-GGUF/Gamma-Q5_K_M.gguf") -> bytes:
    return (hub.root / name).read_bytes()


def test_pulls_a_quant_from_the_hub_and_writes_a_receipt(hub: Hub, models: Path) -> None:
    model = fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    assert Path(model.path).read_bytes() == source_bytes(hub)
    assert (model.name, model.quant) == ("Gamma", "Q5_K_M")
    receipt = read(Path(model.path).parent)
    assert receipt is not None
    assert receipt.source == f"hf://acme/Gamma-GGUF/Gamma-Q5_K_M.gguf@{COMMIT}"
    assert receipt.revision == COMMIT
    assert receipt.files[0].sha256 == hashlib.sha256(source_bytes(hub)).hexdigest()
    assert leftovers(models) == []
    store = Store(models)
    for ref in ("Gamma", "hf://acme/Gamma-GGUF:Q5_K_M", f"hf://acme/Gamma-GGUF@{COMMIT}", "hf://acme/Gamma-GGUF"):
        assert store.resolve(ref).path == model.path


def test_the_same_pull_again_fetches_nothing(hub: Hub, models: Path) -> None:
    first = fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    asked = len(hub.files_asked())
    assert fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M") == first
    assert len(hub.files_asked()) == asked


def test_another_commit_is_another_model(hub: Hub, models: Path) -> None:
    """Same name, other bytes: keyed by repo and revision, never by file name."""
    first = fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    hub.commit = "f" * 40
    Gguf("llama").model(n_layer=3).save(hub.root / "acme/Gamma-GGUF/Gamma-Q5_K_M.gguf")
    second = fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    assert second.path != first.path
    assert len(Store(models).list()) == 2


def test_picks_what_fits_and_says_why(hub: Hub, models: Path) -> None:
    told: list[TransferProgress] = []
    size = (hub.root / "acme/Gamma-GGUF/Gamma-UD-Q4_K_M.gguf").stat().st_size
    model = fetch(hub, models, "hf://acme/Gamma-GGUF", room_bytes=size + 10, progress=told.append)
    assert model.quant == "UD-Q4_K_M"
    assert any(step.phase == "choose" and "fits" in (step.note or "") for step in told)
    with pytest.raises(DoesNotFitError) as caught:
        fetch(hub, models, "hf://acme/Gamma-GGUF", room_bytes=1000)
    assert "Gamma-Q8_0.gguf" in (caught.value.table or "")


def test_without_a_board_the_preferred_quant_is_taken(hub: Hub, models: Path) -> None:
    assert fetch(hub, models, "hf://acme/Gamma-GGUF").quant == "Q5_K_M"


def test_fc58_a_missing_quant_lists_what_exists(hub: Hub, models: Path) -> None:
    """FC-58: no silent stand-in for the quant that was asked for."""
    with pytest.raises(UnavailableError) as caught:
        fetch(hub, models, "hf://acme/Gamma-GGUF:Q3_K_M")
    table = caught.value.table or ""
    assert all(name in table for name in ("Q5_K_M", "Q8_0", "UD-Q4_K_M"))
    assert "mmproj" not in table


def test_q4_k_m_may_be_the_ud_one(hub: Hub, models: Path) -> None:
    assert fetch(hub, models, "hf://acme/Gamma-GGUF", quant="q4_k_m").quant == "UD-Q4_K_M"


def test_the_projector_comes_along_when_asked(hub: Hub, models: Path) -> None:
    assert fetch(hub, models, "hf://acme/Gamma-GGUF:Q8_0").mmproj is None
    model = fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M", with_projector=True)
    assert Path(model.mmproj or "").name == "mmproj-F16.gguf"


def test_fc50_a_set_comes_whole_or_not_at_all(hub: Hub, models: Path) -> None:
    """FC-50: all shards or none."""
    hub.faults += [Fault("none"), Fault("404")]
    with pytest.raises(UnavailableError):
        fetch(hub, models, "hf://acme/Big-GGUF")
    assert Store(models).list() == []
    model = fetch(hub, models, "hf://acme/Big-GGUF")
    assert len(model.shards) == 3
    # The first shard was there and was not fetched again.
    firsts = [seen for seen in hub.files_asked() if "00001-of-00003" in seen.path]
    assert len(firsts) == 1


def test_fc50_a_set_by_url(hub: Hub, models: Path) -> None:
    model = fetch(hub, models, f"{hub.url}/files/acme/Big-GGUF/Q5_K_M/Big-Q5_K_M-00002-of-00003.gguf")
    assert len(model.shards) == 3


def test_resumes_where_the_connection_broke(hub: Hub, models: Path) -> None:
    pauses = Pauses()
    hub.faults += [Fault("cut", 100_000), Fault("cut", 50_000)]
    model = fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M", sleep=pauses)
    assert Path(model.path).read_bytes() == source_bytes(hub)
    ranges = [seen.headers.get("range") for seen in hub.files_asked()]
    assert ranges[0] is None and len(ranges) == 3
    starts = [int(str(asked).removeprefix("bytes=").rstrip("-")) for asked in ranges[1:]]
    assert starts == [100_000, 150_000]
    assert pauses == [1, 1]


def test_a_connection_that_is_reset(hub: Hub, models: Path) -> None:
    hub.faults += [Fault("reset", 100_000), Fault("reset", 0)]
    assert Path(fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M").path).read_bytes() == source_bytes(hub)


def test_a_later_process_resumes(hub: Hub, models: Path) -> None:
    """Six tries without a byte end the command; the bytes stay, and the next command goes on from them."""
    pauses = Pauses()
    hub.faults += [Fault("cut", 200_000)] + [Fault("503")] * 6
    with pytest.raises(ResumableError) as caught:
        fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M", sleep=pauses)
    assert "same command again" in (caught.value.hint or "")
    assert pauses == [1, 2, 4, 8, 16]
    assert Store(models).list() == []
    hub.faults.clear()
    before = len(hub.files_asked())
    fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    (last,) = hub.files_asked()[before:]
    assert last.headers["range"].startswith("bytes=")
    assert leftovers(models) == []


def interrupted(hub: Hub, models: Path, ref: str, after: int = 200_000) -> None:
    """A first try that leaves some bytes."""
    hub.faults += [Fault("cut", after)] + [Fault("503")] * 6
    with pytest.raises(ResumableError):
        fetch(hub, models, ref)
    hub.faults.clear()


def url_of(hub: Hub) -> str:
    return f"{hub.url}/files/acme/Gamma-GGUF/Gamma-Q5_K_M.gguf"


def test_a_server_that_ignores_ranges_starts_anew(hub: Hub, models: Path) -> None:
    interrupted(hub, models, url_of(hub))
    hub.faults.append(Fault("ignore_range"))
    assert Path(fetch(hub, models, url_of(hub)).path).read_bytes() == source_bytes(hub)


def test_a_206_for_another_range_is_not_believed(hub: Hub, models: Path) -> None:
    interrupted(hub, models, url_of(hub))
    hub.faults.append(Fault("wrong_206"))
    assert Path(fetch(hub, models, url_of(hub)).path).read_bytes() == source_bytes(hub)


def test_a_206_with_another_total_is_not_believed(hub: Hub, models: Path) -> None:
    interrupted(hub, models, url_of(hub))
    hub.faults.append(Fault("wrong_total"))
    assert Path(fetch(hub, models, url_of(hub)).path).read_bytes() == source_bytes(hub)


@pytest.mark.parametrize("validator", ["ETag", "Last-Modified"])
def test_a_file_that_changed_meanwhile_starts_anew(hub: Hub, models: Path, validator: str) -> None:
    """The validator: old and new bytes are never mixed, by a server that ignores If-Range neither."""
    hub.etags, hub.dates = validator == "ETag", validator == "Last-Modified"
    interrupted(hub, models, url_of(hub))
    changed = Gguf("llama", fill=2).model(n_layer=BIG_LAYERS, type="Q5_K")
    path = changed.save(hub.root / "acme/Gamma-GGUF/Gamma-Q5_K_M.gguf")
    os.utime(path, (path.stat().st_mtime + 60,) * 2)
    assert Path(fetch(hub, models, url_of(hub)).path).read_bytes() == changed.bytes()


def test_without_a_validator_and_a_hash_nothing_is_resumed(hub: Hub, models: Path) -> None:
    hub.etags = False
    interrupted(hub, models, url_of(hub))
    before = len(hub.files_asked())
    fetch(hub, models, url_of(hub))
    assert "range" not in hub.files_asked()[before].headers


def test_after_a_power_cut_only_a_hash_vouches(hub: Hub, models: Path) -> None:
    """Bytes of before the reboot may be zeros: without a hash they are not used."""
    interrupted(hub, models, url_of(hub))
    (state,) = models.glob(".partial/*/work/0.json")
    state.write_text(json.dumps({**json.loads(state.read_text()), "boot": "another"}))
    before = len(hub.files_asked())
    fetch(hub, models, url_of(hub))
    assert "range" not in hub.files_asked()[before].headers


def test_a_part_longer_than_the_file_starts_anew(hub: Hub, models: Path) -> None:
    interrupted(hub, models, url_of(hub))
    (part,) = models.glob(".partial/*/work/0.part")
    part.write_bytes(b"GGUF" * 500_000)
    assert Path(fetch(hub, models, url_of(hub)).path).read_bytes() == source_bytes(hub)


def test_a_complete_part_is_verified_without_a_request(hub: Hub, models: Path) -> None:
    ref = "hf://acme/Gamma-GGUF:Q5_K_M"
    interrupted(hub, models, ref)
    (part,) = models.glob(".partial/*/work/0.part")
    part.write_bytes(source_bytes(hub))
    before = len(hub.files_asked())
    fetch(hub, models, ref)
    assert len(hub.files_asked()) == before


def test_corrupt_bytes_are_set_aside_and_never_installed(hub: Hub, models: Path) -> None:
    hub.faults.append(Fault("corrupt"))
    with pytest.raises(BadDataError, match="SHA-256"):
        fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    assert Store(models).list() == []
    assert [path for path in leftovers(models) if path.endswith("rejected/Gamma-Q5_K_M.gguf")]
    fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    assert leftovers(models) == []


def test_a_corrupt_part_is_found_out_by_the_hash(hub: Hub, models: Path) -> None:
    interrupted(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    (part,) = models.glob(".partial/*/work/0.part")
    data = bytearray(part.read_bytes())
    data[50_000] ^= 1
    part.write_bytes(data)
    with pytest.raises(BadDataError, match="not installed"):
        fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    assert Store(models).list() == []


def test_a_url_may_carry_its_hash(hub: Hub, models: Path) -> None:
    digest = hashlib.sha256(source_bytes(hub)).hexdigest()
    assert fetch(hub, models, f"{url_of(hub)}#sha256={digest}").name == "Gamma"
    with pytest.raises(BadDataError, match="SHA-256"):
        fetch(hub, models, f"{url_of(hub)}#sha256={'0' * 64}")


@pytest.mark.parametrize("pin", ["sha256=abc", "SHA256=" + "0" * 64, "sha256:" + "0" * 64, "md5=" + "0" * 32])
def test_a_hash_that_pins_nothing_is_refused(hub: Hub, models: Path, pin: str) -> None:
    with pytest.raises(UsageError, match="pins nothing"):
        fetch(hub, models, f"{url_of(hub)}#{pin}")
    assert not hub.files_asked()


def test_a_hash_pins_its_file_of_a_set(hub: Hub, models: Path) -> None:
    url = f"{hub.url}/files/acme/Big-GGUF/Q5_K_M/Big-Q5_K_M-00002-of-00003.gguf"
    with pytest.raises(BadDataError, match="SHA-256"):
        fetch(hub, models, f"{url}#sha256={'0' * 64}")
    digest = hashlib.sha256(source_bytes(hub, "acme/Big-GGUF/Q5_K_M/Big-Q5_K_M-00002-of-00003.gguf")).hexdigest()
    assert len(fetch(hub, models, f"{url}#sha256={digest}").shards) == 3


def test_what_was_fetched_before_a_power_cut_is_read_again(hub: Hub, models: Path) -> None:
    """The record of a shard is on disk, its last blocks are zeros."""
    hub.faults += [Fault("none"), Fault("404")]
    with pytest.raises(UnavailableError):
        fetch(hub, models, "hf://acme/Big-GGUF")
    (shard,) = models.glob(".partial/*/payload/*.gguf")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-64] + bytes(64))
    model = fetch(hub, models, "hf://acme/Big-GGUF")
    assert Path(model.shards[0]).read_bytes() == whole


def test_a_pull_replaces_what_was_damaged_in_the_store(hub: Hub, models: Path) -> None:
    ref = "hf://acme/Gamma-GGUF:Q5_K_M"
    model = fetch(hub, models, ref)
    damage(model.path)
    assert fetch(hub, models, ref).path == model.path and Path(model.path).read_bytes() == source_bytes(hub)
    assert fetch(hub, models, ref, with_projector=True).mmproj, "without it the model was there"


def test_the_hubs_hash_is_taken_from_its_redirect(hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    hub.faults.append(Fault("corrupt"))
    with pytest.raises(BadDataError, match="SHA-256"):
        fetch(hub, models, f"{hub.url}/acme/Gamma-GGUF/resolve/main/Gamma-Q5_K_M.gguf")


def test_no_other_server_states_the_hash_of_what_it_sends(hub: Hub, models: Path) -> None:
    model = fetch(hub, models, f"{hub.url}/acme/Gamma-GGUF/resolve/main/Gamma-Q5_K_M.gguf")
    note = read(Path(model.path).parent)
    assert note and note.files[0].expected is None


@pytest.mark.parametrize("kind", ["html", "login"])
def test_fc46_a_page_instead_of_the_file_leaves_nothing(hub: Hub, models: Path, kind: str) -> None:
    """FC-46: 200 text/html, and a redirect to a login page."""
    hub.faults.append(Fault(kind))
    with pytest.raises(VerdictError, match="web page"):
        fetch(hub, models, url_of(hub))
    assert leftovers(models) == []
    assert Store(models).list() == []


def test_fc46_a_page_under_another_content_type(hub: Hub, models: Path) -> None:
    """FC-46: the first bytes are looked at before anything else is fetched."""
    page = hub.root / "acme/Gamma-GGUF/Page-Q5_K_M.gguf"
    page.write_bytes(b"<!DOCTYPE html>" + b"x" * 5_000_000)
    with pytest.raises(VerdictError, match="web page"):
        fetch(hub, models, f"{hub.url}/files/acme/Gamma-GGUF/{page.name}")
    assert leftovers(models) == []


def test_fc46_a_blob_link_is_rewritten(hub: Hub, models: Path) -> None:
    """FC-46: the address of the page about a file becomes that of the file."""
    assert fetch(hub, models, f"{hub.url}/acme/Gamma-GGUF/blob/main/Gamma-Q8_0.gguf").quant == "Q8_0"


def test_fc49_what_is_torn_at_its_source_is_not_installed(hub: Hub, models: Path) -> None:
    """FC-49: the header is read before the file becomes a model."""
    path = hub.root / "acme/Gamma-GGUF/Gamma-Q8_0.gguf"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(VerdictError, match="truncated"):
        fetch(hub, models, "hf://acme/Gamma-GGUF:Q8_0")
    assert leftovers(models) == []


def test_fc52_a_projector_alone_is_not_installed(hub: Hub, models: Path) -> None:
    """FC-52: pulled by its URL it is recognized."""
    with pytest.raises(VerdictError, match="projector"):
        fetch(hub, models, f"{hub.url}/files/acme/Gamma-GGUF/mmproj-F16.gguf")
    assert Store(models).list() == []


def test_busy_servers_are_asked_again_when_they_say(hub: Hub, models: Path) -> None:
    pauses = Pauses()
    hub.faults += [Fault("429", retry_after=7), Fault("500")]
    fetch(hub, models, url_of(hub), sleep=pauses)
    assert pauses == [7.0, 2.0]


def test_a_hub_that_stumbles_is_asked_again(hub: Hub, models: Path) -> None:
    pauses = Pauses()
    hub.api_faults += [Fault("502"), Fault("503")]
    fetch(hub, models, "hf://acme/Gamma-GGUF:Q8_0", sleep=pauses)
    assert len(pauses) == 2


def test_a_response_without_a_length(hub: Hub, models: Path) -> None:
    hub.faults.append(Fault("no_length"))
    assert Path(fetch(hub, models, url_of(hub)).path).read_bytes() == source_bytes(hub)


def test_large_files_come_in_pieces(hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delivery network gives 50 GB at most in one answer."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 300_000)
    pauses = Pauses()
    model = fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M", sleep=pauses)
    assert Path(model.path).read_bytes() == source_bytes(hub)
    asked = [seen.headers.get("range") for seen in hub.files_asked()]
    assert asked[0] == "bytes=0-299999"
    assert len(asked) == -(-len(source_bytes(hub)) // 300_000)
    assert not any(pauses)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("404", "does not exist"), ("401", "not public"), ("gzip", "compressed"), ("400", "answers 400")],
)
def test_refusals_are_final_and_leave_nothing(hub: Hub, models: Path, kind: str, words: str) -> None:
    pauses = Pauses()
    hub.faults.append(Fault(kind))
    with pytest.raises(UnavailableError, match=words):
        fetch(hub, models, url_of(hub), sleep=pauses)
    assert pauses == []
    assert leftovers(models) == []


def test_repositories_that_are_not_there(hub: Hub, models: Path) -> None:
    for ref, words in (
        ("hf://acme/Nothing", "no repository"),
        ("hf://acme/Gamma-GGUF@nope", "no revision"),
        ("hf://acme/Gamma-GGUF/none.gguf", "no model none.gguf"),
    ):
        with pytest.raises(UnavailableError, match=words):
            fetch(hub, models, ref)


def test_gated_repositories_say_so(hub: Hub, models: Path) -> None:
    hub.gated = True
    with pytest.raises(UnavailableError, match="gated") as caught:
        fetch(hub, models, "hf://acme/Gamma-GGUF")
    assert "licence" in (caught.value.hint or "")


def test_the_token_is_sent_but_never_shown_or_kept(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "hf_TopSecretTokenOfSomebody"
    hub.token = secret
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UnavailableError) as caught:
        fetch(hub, models, "hf://acme/Gamma-GGUF:Q8_0")
    monkeypatch.setenv("HF_TOKEN", secret)
    told: list[TransferProgress] = []
    hub.faults += [Fault("cut", 1000)]
    fetch(hub, models, "hf://acme/Gamma-GGUF:Q8_0", progress=told.append)
    asked = [seen for seen in hub.requests if "/resolve/" in seen.path]
    assert asked and all(seen.headers.get("authorization") == f"Bearer {secret}" for seen in asked)
    kept = b"".join(path.read_bytes() for path in models.rglob("*.json"))
    shown = "".join(capfd.readouterr()) + repr(told) + str(caught.value)
    assert secret not in shown and secret.encode() not in kept
    assert "hf_wrong" not in shown


def test_the_token_does_not_follow_to_another_host(hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    other = hub.url.replace("127.0.0.1", "localhost")
    monkeypatch.setattr("tests.fakes.hub._Handler.resolve", _redirect_to(other))
    fetch(hub, models, "hf://acme/Gamma-GGUF:Q8_0")
    (seen,) = hub.files_asked()
    assert "authorization" not in seen.headers


def _redirect_to(host: str) -> Any:
    def resolve(self: Any, parts: list[str]) -> None:
        self.reply(302, b"", headers={"Location": f"{host}/cdn/{'/'.join(parts[:2] + parts[4:])}"})

    return resolve


def test_secrets_of_a_url_are_not_kept(hub: Hub, models: Path) -> None:
    ref = url_of(hub).replace("http://", "http://user:passw0rd@") + "?token=s3cret"
    interrupted(hub, models, ref)
    kept = b"".join(path.read_bytes() for path in models.rglob("*.json"))
    fetch(hub, models, ref)
    kept += b"".join(path.read_bytes() for path in models.rglob("*.json"))
    assert kept and b"s3cret" not in kept and b"passw0rd" not in kept
    assert "s3cret" not in "".join(str(path) for path in models.rglob("*"))


def test_no_server_at_all(models: Path) -> None:
    with pytest.raises(ResumableError, match="could not be fetched: "):
        pull("http://127.0.0.1:9/m.gguf", models, PullOptions(sleep=Pauses()))
    assert leftovers(models) == []


@pytest.mark.parametrize("host", ["..", "xn--", "a" * 300 + ".x", "127.0.0.1:99999999", "127.0.0.1:1\n", "127.0.0.1:x"])
def test_an_address_of_no_host_is_an_answer(models: Path, host: str) -> None:
    for ask in (pull, check):
        with pytest.raises(EdgeError) as raised:
            ask(f"http://{host}/m.gguf", models, PullOptions(sleep=Pauses()))
        assert raised.value.exit_code in (64, 69, 75)
    assert leftovers(models) == []


@pytest.mark.parametrize("where", ["http://../m.gguf", "http://xn--/m.gguf"])
def test_a_redirect_to_no_host_is_one_sentence(hub: Hub, models: Path, where: str) -> None:
    address = f"{hub.url}/to/{quote(where, safe='')}/m.gguf"
    with pytest.raises(UnavailableError, match="leads nowhere"):
        fetch(hub, models, address)
    with pytest.raises(EdgeError, match="cannot be reached"):
        check(address, models)
    assert leftovers(models) == []


@pytest.mark.parametrize("proxy", ["foo://x", "\x1b"])
def test_a_proxy_that_is_none_is_named(models: Path, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    for name, value in {"all_proxy": proxy, "https_proxy": "", "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="proxy"):
        pull("https://127.0.0.1:9/m.gguf", models, PullOptions(sleep=Pauses()))


def test_free_space_is_checked_first(hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(DoesNotFitError, match="are free"):
        fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    assert hub.files_asked() == []
    with pytest.raises(DoesNotFitError):
        fetch(hub, models, url_of(hub))
    assert leftovers(models) == []


def test_progress_has_rate_and_rest(hub: Hub, models: Path) -> None:
    told: list[TransferProgress] = []
    fetch(hub, models, "hf://acme/Big-GGUF", progress=told.append)
    steps = [step for step in told if step.phase == "fetch"]
    total = sum(path.stat().st_size for path in (hub.root / "acme/Big-GGUF").rglob("*.gguf"))
    assert steps[0].done_bytes == 0 and steps[-1].done_bytes == total == steps[-1].total_bytes


def test_two_pulls_of_one_model_do_not_mix(hub: Hub, models: Path) -> None:
    """The second names the running process; the first is not disturbed."""
    event = threading.Event()
    hub.faults.append(Fault("slow", event=event))
    outcome: list[object] = []
    started = threading.Event()

    def first() -> None:
        outcome.append(fetch(hub, models, url_of(hub), progress=lambda step: started.set()))

    worker = threading.Thread(target=first)
    worker.start()
    try:
        assert started.wait(30)
        with pytest.raises(EdgeError, match="another process works"):
            fetch(hub, models, url_of(hub))
        assert sweep(models) == []
    finally:
        event.set()
        worker.join()
    assert len(outcome) == 1
    assert len(Store(models).list()) == 1


def test_the_catalogue_knows_when_a_file_was_replaced(
    hub: Hub, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are re-uploaded under their old names: the catalogue's hash is held against the hub's."""
    monkeypatch.setattr("edge.models.catalogue.data_dir", lambda name: tmp_path)

    def write(sha256: str) -> None:
        from edge.models import catalogue

        catalogue._load.cache_clear()
        (tmp_path / "models.toml").write_text(
            'schema = 1\n[[model]]\nname = "Gamma-Nice"\nfamily = "g"\nlicence = "MIT"\nchecked = "never"\n'
            '[[model.quant]]\nquant = "Q8_0"\nsource = "hf://acme/Gamma-GGUF/Gamma-Q8_0.gguf"\nlooked_up = "here"\n'
            f'files = [{{ path = "Gamma-Q8_0.gguf", sha256 = "{sha256}" }}]\napprox_bytes = 1000\n'
        )

    write("0" * 64)
    for ref in ("Gamma-Nice", "hf://acme/Gamma-GGUF/Gamma-Q8_0.gguf"):
        with pytest.raises(BadDataError, match="replaced") as caught:
            fetch(hub, models, ref)
        assert "hf://acme/Gamma-GGUF:Q8_0" in (caught.value.hint or "")
    assert fetch(hub, models, "hf://acme/Gamma-GGUF:Q8_0").name == "Gamma"
    write(hashlib.sha256(source_bytes(hub, "acme/Gamma-GGUF/Gamma-Q8_0.gguf")).hexdigest())
    shutil.rmtree(models)
    assert fetch(hub, models, "gamma-nice:q8_0").name == "Gamma-Nice"
    assert fetch(hub, models, "hf://acme/Gamma-GGUF/Gamma-Q8_0.gguf").name == "Gamma-Nice"
    assert Store(models).resolve("Gamma-Nice").quant == "Q8_0"


def test_a_redirect_that_leads_round_is_one_sentence(hub: Hub, models: Path) -> None:
    for path in ("loop/a.gguf", "nowhere/a.gguf"):
        with pytest.raises(UnavailableError, match="leads nowhere"):
            fetch(hub, models, f"{hub.url}/{path}")
    assert leftovers(models) == []


class _RawServer:
    """Answers each connection with the same bytes, the last ones without an end where `endless`."""

    def __init__(self, answer: bytes, endless: bytes = b"") -> None:
        self._answer, self._endless = answer, endless
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                with client, suppress(OSError):
                    client.recv(65536)
                    client.sendall(self._answer)
                    while self._endless:
                        client.sendall(self._endless)
                        self.sent += len(self._endless)

    def close(self) -> None:
        # close(2) alone does not wake the accept(2) of the thread.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_the_body_of_a_redirect_is_not_read(models: Path) -> None:
    """httpx reads it whole before it follows: one without an end took 4 GB."""
    with closing(_RawServer(b"HTTP/1.1 301 Moved\r\nLocation: /b.gguf\r\n\r\n", b"x" * 65536)) as server:
        with pytest.raises(UnavailableError, match="leads nowhere"):
            pull(f"{server.url}/a.gguf", models, PullOptions(sleep=Pauses()))
        assert server.sent < 1 << 30, "21 connections, each with the buffers of its sockets: up to 36 MiB"


@pytest.mark.parametrize(
    "said",
    [
        b"206 Partial\r\nContent-Range: bytes 0-3/" + b"1" * 5000,
        b"200 OK\r\nContent-Length: " + b"1" * 5000,
        b"503 Busy\r\nRetry-After: \xb2",
        b"503 Busy\r\nRetry-After: " + b"9" * 5000,
    ],
)
def test_numbers_of_a_server_that_are_none_end_no_pull_with_a_traceback(models: Path, said: bytes) -> None:
    with closing(_RawServer(b"HTTP/1.1 " + said + b"\r\nConnection: close\r\n\r\nGGUF")) as server:
        with pytest.raises(EdgeError) as raised:
            pull(f"{server.url}/a.gguf", models, PullOptions(sleep=Pauses()))
        assert raised.value.exit_code in (69, 75)


def test_a_pull_without_a_length_stops_at_the_free_space_reserve(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that never ends must not fill the disk."""
    monkeypatch.setattr(transfer, "_SPACE_EVERY_BYTES", 1 << 16)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 16))  # type: ignore[attr-defined]
    hub.faults.append(Fault("no_length"))
    with pytest.raises(DoesNotFitError):
        fetch(hub, models, f"{hub.url}/files/acme/Gamma-GGUF/Gamma-Q5_K_M.gguf")
    assert not list(models.glob("Gamma*"))


def test_a_transfer_under_the_floor_is_broken_off(hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FLOOR_S", 1e-9)
    monkeypatch.setattr(transfer, "_FLOOR_BYTES_S", 10**18)
    with pytest.raises(ResumableError, match="bytes/s"):
        fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")


def test_verified_means_compared_with_the_word_of_another(hub: Hub, models: Path) -> None:
    known = fetch(hub, models, "hf://acme/Gamma-GGUF:Q5_K_M")
    hub.linked = False
    unknown = fetch(hub, models, f"{hub.url}/files/acme/Gamma-GGUF/Gamma-Q8_0.gguf")
    receipts = [read(Path(model.path).parent) for model in (known, unknown)]
    assert receipts[0] and receipts[0].files[0].expected == receipts[0].files[0].sha256
    assert receipts[1] and receipts[1].files[0].expected is None and len(receipts[1].files[0].sha256) == 64


@pytest.mark.parametrize("kind", ["absent", "fifo", "folder", "/dev/zero", "text"])
def test_certificates_that_cannot_be_read_are_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "bundle.pem"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", kind if kind.startswith("/") else str(path))
    with pytest.raises(ConfigError, match="the certificates of /") as error:
        make_client()
    assert error.value.hint == "look at SSL_CERT_FILE"


@pytest.mark.parametrize(
    "answer",
    [
        b"206 X\r\nContent-Range: bytes 0-9/" + b"9" * 5000,
        b"206 X\r\nContent-Range: bytes 0-\xd9\xa3/\xd9\xa4",
        b"200 OK\r\nContent-Length: " + b"9" * 5000,
        b"503 X\r\nRetry-After: \xb2",
        b"503 X\r\nRetry-After: " + b"9" * 5000,
        b"302 X\r\nLocation: http://127.0.0.1:" + b"9" * 5000,
        b"302 X\r\nLocation: \xff\xfe",
        b"200 OK\r\nETag: \xff\r\nContent-Type: \xff\r\nContent-Encoding: \xff",
    ],
)
@pytest.mark.parametrize("fetches", [pull, check])
def test_no_header_of_a_server_is_a_traceback(models: Path, answer: bytes, fetches: Callable[..., object]) -> None:
    """int() takes no 4300 digits, and `isdigit` takes digits that int() does not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        served = threading.Thread(target=_answer_all, args=(server, b"HTTP/1.1 " + answer + b"\r\n\r\n"), daemon=True)
        served.start()
        try:
            with suppress(EdgeError):
                fetches(f"http://127.0.0.1:{server.getsockname()[1]}/x.gguf", models, PullOptions(sleep=lambda _: None))
        finally:
            server.shutdown(socket.SHUT_RDWR)
            served.join()


def _answer_all(server: socket.socket, answer: bytes) -> None:
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            with client, suppress(OSError):
                client.recv(65536)
                client.sendall(answer)
