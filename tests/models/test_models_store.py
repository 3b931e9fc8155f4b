"""The store: what is listed, and what a reference means."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edge.errors import ModelMissingError, UsageError
from edge.models import scan as scan_module
from edge.models import source
from edge.models import store as store_module
from edge.models.open import fingerprint, open_model
from edge.models.store import Store, standard
from edge.models.survey import survey
from edge.models.verdict import VerdictError
from edge.paths import folders, system_folders, user_folders
from tests.fakes.gguf_writer import Gguf, save_set

REV = "22c9fc8a8c7700b76a1789366280a6a5a1ad1120"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    Gguf("llama").model().save(folder / "Alpha-Q5_K_M.gguf")
    Gguf("llama").model(type="Q8_0", file_type=7).save(folder / "Alpha-Q8_0.gguf")
    Gguf("llama").model(type="Q4_K", file_type=15).save(folder / "beta" / "Beta.Q4_K_M.gguf")
    (folder / ".partial" / "x").mkdir(parents=True)
    Gguf("llama").model().save(folder / ".partial" / "x" / "Hidden-Q5_K_M.gguf")
    return folder


def hub_cache(base: Path, revisions: tuple[str, ...] = (REV,)) -> Path:
    """A cache as the hub's own tools lay it out."""
    repo = base / "models--Acme--Gamma-GGUF"
    blob = Gguf("llama").model().save(repo / "blobs" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revisions[0])
    for revision in revisions:
        link = repo / "snapshots" / revision / "Gamma-Q5_K_M.gguf"
        link.parent.mkdir(parents=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return base


def test_lists_models_but_not_what_is_in_the_making(models: Path) -> None:
    ids = [entry.id for entry in Store(models).list()]
    assert ids == ["Alpha:Q5_K_M", "Alpha:Q8_0", "Beta:Q4_K_M"]


def test_a_missing_folder_is_an_empty_store_and_is_not_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "none", [tmp_path / "gone"])
    assert store.list() == []
    with pytest.raises(ModelMissingError, match="none here yet") as caught:
        store.resolve("Alpha")
    assert caught.value.hint == "edgellm model pull Alpha"
    with pytest.raises(ModelMissingError) as caught:
        store.resolve("a; rm -r b")
    assert caught.value.hint == "edgellm model pull 'a; rm -r b'"
    assert list(tmp_path.iterdir()) == []


def test_resolves_names_in_any_case(models: Path) -> None:
    store = Store(models)
    assert store.resolve("alpha:q8_0").path.endswith("Alpha-Q8_0.gguf")
    assert store.resolve("BETA").quant == "Q4_K_M"


def test_a_bare_name_takes_the_preferred_quant(models: Path) -> None:
    assert Store(models).resolve("Alpha").quant == "Q5_K_M"


def test_a_bare_name_skips_a_broken_file(models: Path) -> None:
    (models / "Alpha-Q5_K_M.gguf").write_bytes(b"<html>")
    assert Store(models).resolve("Alpha").quant == "Q8_0"
    with pytest.raises(VerdictError, match="web page"):
        Store(models).resolve("Alpha:Q5_K_M")


def test_fc58_a_missing_quant_lists_what_there_is(models: Path) -> None:
    """FC-58: asking for one that is not there."""
    with pytest.raises(ModelMissingError) as caught:
        Store(models).resolve("Alpha:Q3_K_M")
    assert caught.value.table is not None
    assert "Alpha:Q5_K_M" in caught.value.table and "Alpha:Q8_0" in caught.value.table
    assert "Beta" not in caught.value.table
    assert caught.value.exit_code == 69


def test_a_misspelt_name_shows_the_nearest_first(models: Path) -> None:
    with pytest.raises(ModelMissingError) as caught:
        Store(models).resolve("Betta")
    assert (caught.value.table or "").split()[0] == "Beta:Q4_K_M"


def test_resolves_paths_folders_and_links(models: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "empty")
    path = models / "Alpha-Q8_0.gguf"
    assert store.resolve(str(path)).name == "Alpha"
    assert store.resolve(str(models / "beta")).name == "Beta"
    assert store.resolve(f"file://{path}").quant == "Q8_0"
    link = tmp_path / "served.gguf"
    link.symlink_to(path)
    assert store.resolve(str(link)).bytes == path.stat().st_size
    with pytest.raises(UsageError, match="3 models"):
        store.resolve(str(models))
    with pytest.raises(ModelMissingError, match="no such file"):
        store.resolve(str(models / "nope.gguf"))


def test_a_gguf_under_any_name_opens_by_its_path(models: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-00aa"
    shutil.copy(models / "Alpha-Q8_0.gguf", blob)
    assert Store(models).resolve(str(blob)).quant == "Q8_0"


def test_relative_paths_become_absolute(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    assert Store(models).resolve("Alpha-Q8_0.gguf").path == str(models / "Alpha-Q8_0.gguf")


def test_a_quant_that_only_the_header_knows(tmp_path: Path) -> None:
    """What the list calls a model must be what resolves."""
    Gguf("llama").model(type="Q4_K", file_type=15).save(tmp_path / "plain.gguf")
    Gguf("llama").model(type="Q8_0", file_type=7).save(tmp_path / "liar-Q4_K_M.gguf")
    store = Store(tmp_path)
    for line in survey(store):
        assert f"{store.resolve(line.id).name}:{store.resolve(line.id).quant}" == line.id
    assert {line.id for line in survey(store)} == {"plain:Q4_K_M", "liar:Q8_0"}


def test_two_files_of_one_id_are_told_apart(models: Path, tmp_path: Path) -> None:
    other = Gguf("llama").model(n_layer=1).save(tmp_path / "other" / "Alpha-Q5_K_M.gguf")
    store = Store(models, [tmp_path / "other"])
    lines = [line for line in survey(store) if line.id == "Alpha:Q5_K_M"]
    (shadowed,) = [line for line in lines if line.notes]
    assert shadowed.entry.path == other and str(models) in shadowed.notes[0]
    assert store.resolve("Alpha:Q5_K_M").path == str(models / "Alpha-Q5_K_M.gguf")


def test_own_folder_wins_over_extra_ones(models: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Gguf("llama").model(n_layer=1).save(other / "Alpha-Q5_K_M.gguf")
    store = Store(models, [other])
    assert store.resolve("Alpha:Q5_K_M").path == str(models / "Alpha-Q5_K_M.gguf")
    entries = [entry for entry in store.list() if entry.id == "Alpha:Q5_K_M"]
    assert {entry.writable for entry in entries} == {True, False}


def test_hub_cache_is_read_with_its_provenance(tmp_path: Path) -> None:
    """One file under two revisions is one model; hf:// finds it without a network."""
    cache = hub_cache(tmp_path / "hub", (REV, "f" * 40))
    store = standard(folders({}, tmp_path / "state"), [], {"HF_HUB_CACHE": str(cache)})
    entries = store.list()
    assert [entry.id for entry in entries] == ["Gamma:Q5_K_M"]
    assert entries[0].source == "hf://Acme/Gamma-GGUF/Gamma-Q5_K_M.gguf"
    for ref in ("hf://acme/gamma-gguf", "hf://Acme/Gamma-GGUF:Q5_K_M", f"hf://Acme/Gamma-GGUF@{entries[0].revision}"):
        assert store.resolve(ref).name == "Gamma"
    with pytest.raises(ModelMissingError, match="not here yet") as caught:
        store.resolve("hf://Acme/Gamma-GGUF:Q8_0")
    assert "edgellm model pull hf://Acme/Gamma-GGUF:Q8_0" in str(caught.value.hint)


@pytest.fixture
def three_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A user's models, the system service's and the user's hub cache, one model in each; the user's environment."""
    system = system_folders()._replace(data=tmp_path / "system")
    monkeypatch.setattr("edge.models.store.system_folders", lambda: system)
    env = {"HOME": str(tmp_path / "home")}
    Gguf("llama").model().save(user_folders(env).models / "Mine-Q5_K_M.gguf")
    Gguf("llama").model().save(system.models / "System-Q5_K_M.gguf")
    hub_cache(tmp_path / "home/.cache/huggingface/hub", (REV,))
    return env


def test_a_user_sees_the_services_models_and_the_hub_cache(three_stores: dict[str, str]) -> None:
    store = standard(user_folders(three_stores), [], three_stores)
    assert [entry.name for entry in store.list()] == ["Gamma", "Mine", "System"]


def test_a_state_dir_is_the_only_store_unless_others_are_named(three_stores: dict[str, str], tmp_path: Path) -> None:
    """`make test` beside an installed service: what the machine holds is not in a test's own instance."""
    own = folders(three_stores, tmp_path / "state")
    assert standard(own, [], three_stores).list() == []
    Gguf("llama").model().save(tmp_path / "more" / "Named-Q5_K_M.gguf")
    assert [entry.name for entry in standard(own, [str(tmp_path / "more")], three_stores).list()] == ["Named"]


def test_where_the_hub_cache_is() -> None:
    assert store_module.hub_cache({"HF_HOME": "/h"}) == Path("/h/hub")
    assert store_module.hub_cache({"HOME": "/root"}) == Path("/root/.cache/huggingface/hub")
    assert store_module.hub_cache({"XDG_CACHE_HOME": "/c", "HOME": "/root"}) == Path("/c/huggingface/hub")
    assert store_module.hub_cache({}) is None


def test_links_in_circles_end(models: Path) -> None:
    (models / "again").symlink_to(models)
    (models / "beta" / "up").symlink_to(models)
    assert len(Store(models).list()) == 3


def test_a_link_to_a_folder_above_the_scanned_one_is_not_followed(models: Path, tmp_path: Path) -> None:
    """`up -> ..` had `model list` walk all of /tmp."""
    Gguf("llama").model().save(tmp_path / "Other-Q5_K_M.gguf")
    before = [entry.path for entry in Store(models).list()]
    (models / "up").symlink_to("..")
    (models / "beta" / "root").symlink_to("/")
    assert [entry.path for entry in Store(models).list()] == before


def test_a_users_own_links_to_another_disk_are_followed(models: Path, tmp_path: Path) -> None:
    """A file in the folder itself keeps its id, whatever the size of the one behind the link."""
    disk = tmp_path / "disk"
    Gguf("llama").model().tensor("extra", 4096, 64).save(disk / "sub" / "Alpha-Q5_K_M.gguf")
    Gguf("llama").model().save(disk / "sub" / "Delta-Q5_K_M.gguf")
    Gguf("llama").model().save(disk / "Echo-Q5_K_M.gguf")
    (models / "disk").symlink_to(disk / "sub")
    (models / "Echo-Q5_K_M.gguf").symlink_to(disk / "Echo-Q5_K_M.gguf")
    store = Store(models)
    assert [entry.id for entry in store.list()] == [
        "Alpha:Q5_K_M",
        "Alpha:Q8_0",
        "Beta:Q4_K_M",
        "Delta:Q5_K_M",
        "Echo:Q5_K_M",
    ]
    assert store.resolve("alpha:q5_k_m").path == str(models / "Alpha-Q5_K_M.gguf")
    assert [line.id for line in survey(store)] == [entry.id for entry in store.list()]
    (models / "Alpha-Q5_K_M.gguf").unlink()
    assert store.resolve("Alpha:Q5_K_M").path == str(models / "disk" / "Alpha-Q5_K_M.gguf")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_no_link_leads_to_what_another_user_made_where_every_user_may(
    models: Path, short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link on a USB stick made a file of user `nobody` in /tmp the meaning of `-m good`."""
    open_to_all = short_dir / "tmp"
    theirs = Gguf("llama").model().save(open_to_all / "x" / "Good-Q5_K_M.gguf")
    for path in (open_to_all / "x", theirs):
        os.chown(path, 12345, 12345)
    open_to_all.chmod(0o1777)
    Gguf("llama").model().save(open_to_all / "own" / "Fine-Q5_K_M.gguf")
    (open_to_all / "own" / "more").symlink_to(open_to_all / "x")
    for name, target in (("folder", "x"), ("Good-Q5_K_M.gguf", "x/Good-Q5_K_M.gguf"), ("all", "")):
        (models / name).symlink_to(open_to_all / target)
    store = Store(models)
    assert {entry.name for entry in store.list()} == {"Alpha", "Beta", "Fine"}
    said = f"{open_to_all} can be written to by every user, so models that others (user 12345) put there are not listed"
    assert [said in record.getMessage() for record in caplog.records] == [True], (
        "a NAS says it once for all of its files"
    )
    with pytest.raises(ModelMissingError):
        store.resolve("Good")


def test_a_scan_is_bounded_and_names_the_folder(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for number in range(9):
        (disk / str(number)).mkdir()
    (models / "disk").symlink_to(disk)
    monkeypatch.setattr(scan_module, "_LINKED_MAX", 8)
    assert len(Store(models).list()) == 3
    assert [str(models / "disk") in record.getMessage() for record in caplog.records] == [True]
    monkeypatch.setattr(scan_module, "_LINKED_MAX", 9)
    caplog.clear()
    assert len(Store(models).list()) == 3 and caplog.records == []
    monkeypatch.setattr(scan_module, "_ENTRIES_MAX", 1)
    assert len(Store(models).list()) <= 1 and str(models) in caplog.records[0].getMessage()


def test_fc58_a_label_that_lies_is_shown(tmp_path: Path) -> None:
    """FC-58: memory from tensors, never from the label; the disagreement is a note."""
    path = Gguf("llama").model(type="Q8_0", file_type=7).save(tmp_path / "m-Q4_K_M.gguf")
    model = open_model(path)
    assert model.quant == "Q8_0"
    assert any("Q4_K_M" in note and "Q8_0" in note for note in model.notes)
    path = Gguf("llama").model(type="Q4_K", file_type=15).save(tmp_path / "m-UD-Q4_K_XL.gguf")
    assert (open_model(path).quant, open_model(path).notes) == ("UD-Q4_K_XL", ())


def test_file_type_that_lies_gives_way_to_the_tensors(tmp_path: Path) -> None:
    path = Gguf("llama").model(type="Q8_0", file_type=15).save(tmp_path / "m.gguf")
    assert open_model(path).quant == "Q8_0"
    path = Gguf("llama").model(type="Q8_0", file_type=None).save(tmp_path / "n.gguf")
    assert open_model(path).quant == "Q8_0"


def test_fingerprint_follows_the_file(models: Path) -> None:
    path = models / "Alpha-Q8_0.gguf"
    before = open_model(path).fingerprint
    assert open_model(path).fingerprint == before
    os.utime(path, ns=(1, 1))
    assert fingerprint([path]) != before


def test_receipts_answer_for_sources(models: Path) -> None:
    text = "pypi://dist==1.0/pkg/Beta.Q4_K_M.gguf"
    (models / "beta" / "source.json").write_text(json.dumps({"schema": 1, "source": text, "files": []}))
    assert Store(models).resolve(text).name == "Beta"
    (models / "beta" / "source.json").write_text("{torn")
    with pytest.raises(ModelMissingError):
        Store(models).resolve(text)
    assert Store(models).resolve("Beta").name == "Beta"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hf://Qwen/Qwen3-4B-GGUF", "hf://Qwen/Qwen3-4B-GGUF"),
        ("hf://Qwen/Qwen3-4B-GGUF:q5_k_m@main", "hf://Qwen/Qwen3-4B-GGUF:Q5_K_M@main"),
        ("hf://a/b/sub/m-Q4_0.gguf@abc", "hf://a/b/sub/m-Q4_0.gguf@abc"),
        ("https://u:p@host:81/x/m.gguf?token=s#f", "https://host:81/x/m.gguf"),
        ("https://huggingface.co/a/b/blob/main/m.gguf", "https://huggingface.co/a/b/resolve/main/m.gguf"),
        ("pypi://a-b==1.2/p/m.gguf", "pypi://a-b==1.2/p/m.gguf"),
        ("file:///x/m%20n.gguf", "file:///x/m n.gguf"),
    ],
)
def test_sources_without_their_secrets(text: str, shown: str) -> None:
    """FC-46 (a page about a file becomes the file); no password or query is ever shown."""
    assert str(source.parse(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://only",
        "hf://a/b:",
        "pypi://a/m.gguf",
        "pypi://a==1/../../x",
        "https://",
        "https://h/",
        "file://x",
        "ftp://h/m.gguf",
    ],
)
def test_sources_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        source.parse(text)


def test_survey_caches_headers_and_notices_changes(models: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = survey(Store(models), cache)
    assert (cache / "headers.json").is_file()
    assert survey(Store(models), cache) == first
    path = models / "Alpha-Q8_0.gguf"
    path.write_bytes(b"<html>")
    changed = {line.entry.path: line for line in survey(Store(models), cache)}
    assert changed[path].verdict is not None and changed[path].verdict.kind == "web_page"
    (cache / "headers.json").write_text('{"schema": 1, "files": {"x": 3}}')
    assert len(survey(Store(models), cache)) == 3
    (cache / "headers.json").write_text("not json")
    assert len(survey(Store(models), cache)) == 3


def test_survey_does_not_read_headers_twice(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey(Store(models), tmp_path)

    def forbidden(path: Path) -> None:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr("edge.models.header.read_header", forbidden)
    assert [line.id for line in survey(Store(models), tmp_path)] == ["Alpha:Q5_K_M", "Alpha:Q8_0", "Beta:Q4_K_M"]


def test_a_set_is_one_line(tmp_path: Path) -> None:
    save_set(tmp_path, "big-Q5_K_M", 3)
    lines = survey(Store(tmp_path))
    assert [(line.id, len(line.entry.shards)) for line in lines] == [("big:Q5_K_M", 3)]


def test_the_path_of_up_imports_the_standard_library_only() -> None:
    """Before the child is spawned nothing heavy may be loaded."""
    program = (
        "import sys; from edge.models.store import Store; from edge.models.header import read_header;"
        "import edge.models.catalogue;"
        "heavy = {'httpx', 'rich', 'typer', 'aiohttp', 'numpy', 'psutil', 'gguf', 'huggingface_hub', 'asyncio', 'ssl'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_link_of_our_own_folder_yields_to_no_file_of_another_store(tmp_path: Path) -> None:
    """The model that `-m Echo` names, and that `model remove` removes, stays the same beside LM Studio's copy."""
    own, other, disk = (tmp_path / name for name in ("own", "other", "disk"))
    for folder in (other, disk):
        Gguf("llama").model().save(folder / "Echo-Q5_K_M.gguf")
    own.mkdir()
    (own / "Echo-Q5_K_M.gguf").symlink_to(disk / "Echo-Q5_K_M.gguf")
    assert Store(own, [other]).resolve("Echo").path == str(own / "Echo-Q5_K_M.gguf")
