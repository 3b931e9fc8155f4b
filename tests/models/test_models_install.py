"""Import and remove: what comes into our folder, and what goes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path

import pytest

from edge.errors import BadDataError, BadModelError, ModelMissingError, UnavailableError, UsageError
from edge.linux.files import sha256_file
from edge.models import receipt
from edge.models.install import Removed, _take, import_model, removable, remove_entry
from edge.models.progress import TransferMeter
from edge.models.pull import pull
from edge.models.receipt import InstalledFile, Receipt, read, read_of
from edge.models.store import Store
from tests.fakes.gguf_writer import Gguf, save_set


def remove(store: Store, ref: str) -> Removed:
    return remove_entry(store, removable(store, ref))


def test_import_copies_shards_and_projector(tmp_path: Path) -> None:
    first = save_set(tmp_path / "in", "Big-Q5_K_M", 3)[0]
    Gguf("clip").projector().save(tmp_path / "in" / "mmproj-F16.gguf")
    model = import_model(first, tmp_path / "models")
    assert len(model.shards) == 3 and model.mmproj is not None
    assert model.path.startswith(str(tmp_path / "models"))
    for shard in [*model.shards, model.mmproj]:
        assert Path(shard).read_bytes() == (tmp_path / "in" / Path(shard).name).read_bytes()
    assert first.exists()
    note = read(Path(model.path).parent)
    assert note is not None and len(note.files) == 4
    assert import_model(first, tmp_path / "models") == model


def test_import_under_another_name(tmp_path: Path) -> None:
    path = Gguf("llama").model().save(tmp_path / "ggml-model-Q5_K_M.gguf")
    assert import_model(path, tmp_path / "models", name="mine").name == "mine"
    assert Store(tmp_path / "models").resolve("mine:q5_k_m").name == "mine"


def test_import_refuses_before_it_copies(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"<html>")
    with pytest.raises(BadModelError, match="web page"):
        import_model(bad, tmp_path / "models")
    with pytest.raises(ModelMissingError):
        import_model(tmp_path / "none.gguf", tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_file_source_is_an_import(tmp_path: Path) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    assert pull(f"file://{path}", tmp_path / "models").name == "m"


def test_remove_takes_the_folder_of_what_was_imported(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for kind, number in (("Q5_K", 17), ("Q8_0", 7)):
        path = Gguf("llama").model(type=kind, file_type=number).save(tmp_path / f"m-{kind}.gguf")
        import_model(path, models)
    store = Store(models)
    with pytest.raises(UsageError, match="2 models") as caught:
        remove(store, "m")
    assert caught.value.table is not None
    gone = remove(store, "m:Q8_0")
    assert gone.bytes > 0 and not Path(gone.paths[0]).exists()
    assert [entry.name for entry in store.list()] == ["m"]
    assert list((models / ".partial").iterdir()) == []


def test_remove_takes_all_shards_of_loose_files_and_broken_ones_too(tmp_path: Path) -> None:
    models = tmp_path / "models"
    save_set(models, "Big-Q5_K_M", 3, skip=(2,))
    Gguf("llama").model().save(models / "other-Q5_K_M.gguf")
    remove(Store(models), "Big")
    assert [path.name for path in models.glob("*.gguf")] == ["other-Q5_K_M.gguf"]


def test_remove_leaves_other_peoples_folders_alone(tmp_path: Path) -> None:
    Gguf("llama").model().save(tmp_path / "extra" / "m-Q5_K_M.gguf")
    store = Store(tmp_path / "models", [tmp_path / "extra"])
    with pytest.raises(UsageError, match="not ours"):
        remove(store, "m")
    with pytest.raises(ModelMissingError):
        remove(store, "nothing")


@pytest.mark.parametrize("name", ["../../escape", "/abs", "a\nb", "", ".", "--help", ".hidden", "a:b", "x" * 300])
def test_a_name_for_an_import_cannot_leave_the_store(tmp_path: Path, name: str) -> None:
    path = Gguf("llama").model().save(tmp_path / "in/m-Q5_K_M.gguf")
    with pytest.raises(UsageError) as error:
        import_model(path, tmp_path / "data/models", name=name)
    assert str(error.value).isprintable()
    assert not (tmp_path / "data").exists()


def test_the_longest_file_names_are_imported(tmp_path: Path) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / ("é" * 120 + ".gguf"))
    assert Path(import_model(path, tmp_path / "models").path).is_file()


def test_what_changed_since_it_was_fetched_is_not_imported(tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    source.write_bytes(b"changed")
    row = {"path": "a.gguf", "bytes": 7, "sha256": "0" * 64}
    (tmp_path / "source.json").write_text(json.dumps({"schema": 1, "source": "x", "files": [row]}))
    for link in (True, False):
        with pytest.raises(BadDataError):
            _take(source, tmp_path / f"b{link}", TransferMeter("copy", "a", 7, None), link, ())
        assert not (tmp_path / f"b{link}").exists()


def damage(path: Path | str) -> None:
    """Change one byte and keep size and mtime, as rsync or a bad copy may leave a file."""
    state, data = Path(path).stat(), bytearray(Path(path).read_bytes())
    data[-1] ^= 1
    Path(path).write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    while Path(path).stat().st_ctime_ns == state.st_ctime_ns:  # it counts in ticks of up to 10 ms before Linux 6.13
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_an_import_replaces_what_was_damaged_in_the_store(tmp_path: Path) -> None:
    first = save_set(tmp_path / "in", "Big-Q5_K_M", 3)[0]
    model = import_model(first, tmp_path / "models")
    damage(model.shards[2])
    assert import_model(first, tmp_path / "models").shards == model.shards
    assert Path(model.shards[2]).read_bytes() == (tmp_path / "in" / Path(model.shards[2]).name).read_bytes()
    Gguf("clip").projector().save(tmp_path / "in" / "mmproj-F16.gguf")
    assert import_model(first, tmp_path / "models").mmproj, "the projector came later"
    assert [path.name for path in (tmp_path / "models").iterdir() if path.name != ".partial"] == [
        Path(model.path).parent.name
    ]


def test_a_receipt_speaks_of_its_files_only(tmp_path: Path) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    model = import_model(path, tmp_path / "models", name="mine")
    other = Path(model.path).with_name("other-Q5_K_M.gguf")
    other.write_bytes(path.read_bytes())
    assert read_of(Path(model.path)) and read_of(other) is None
    store = Store(tmp_path / "models")
    assert {entry.name: entry.source is not None for entry in store.list()} == {"mine": True, "other": False}


def test_a_hash_of_arrival_counts_until_its_file_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    model = import_model(path, tmp_path / "models")
    digest = sha256_file(path)
    monkeypatch.setattr(receipt, "sha256_file", lambda path: pytest.fail("a model of gigabytes is not read again"))
    assert receipt.sha256_of(Path(model.path)) == digest
    monkeypatch.undo()
    damage(model.path)
    assert receipt.sha256_of(Path(model.path)) == sha256_file(Path(model.path)) != digest
    note = read(Path(model.path).parent)
    assert note and note.files[0].changed(Path(model.path))


def test_what_was_linked_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`service install` links a model, which changes its ctime."""
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    model = import_model(path, tmp_path / "models")
    os.link(model.path, tmp_path / "m.gguf")
    os.utime(tmp_path / "m.gguf")
    assert import_model(path, tmp_path / "models").path == model.path
    monkeypatch.setattr(receipt, "sha256_file", lambda path: pytest.fail("it was found whole"))
    assert import_model(path, tmp_path / "models").path == model.path


def test_a_model_with_a_receipt_of_another_version_is_there(tmp_path: Path) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    folder = Path(import_model(path, tmp_path / "models").path).parent
    note = json.loads((folder / receipt.FILE_NAME).read_text())
    for each in note["files"]:
        del each["inode"], each["ctime_ns"]
    for document in (note, {**note, "schema": receipt.SCHEMA + 1}):
        (folder / receipt.FILE_NAME).write_text(json.dumps(document))
        assert receipt.is_whole(folder, [path.name])
    assert not receipt.is_whole(tmp_path, [path.name])


def test_a_receipt_that_came_with_a_file_says_nothing_of_its_source(tmp_path: Path) -> None:
    """A USB stick brings its own source.json, with the hash of its own file as that of the source."""
    stick, models = tmp_path / "stick", tmp_path / "models"
    path = Gguf("llama").model().save(stick / "m-Q5_K_M.gguf")
    digest = sha256_file(path)
    file = InstalledFile(path.name, path.stat().st_size, digest, expected=digest)
    (stick / receipt.FILE_NAME).write_text(json.dumps(Receipt("hf://acme/M", (file.arrived(path),)).to_json()))
    note = receipt.as_trusted(read_of(path), stick, (models,))
    assert note and note.files[0].expected is None and "beside the file" in note.notes[-1]
    made = read_of(Path(import_model(path, models).path))
    assert made and (made.files[0].sha256, made.files[0].expected) == (digest, None)
    # From the store of the one who installs a service it is what the source gave.
    made = read_of(Path(import_model(path, tmp_path / "service", stores=(tmp_path,)).path))
    assert made and made.files[0].expected == digest


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    path = Gguf("llama").model().save(tmp_path / "m-Q5_K_M.gguf")
    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):  # the second one finds the folder of the first
        with pytest.raises(UnavailableError, match="cannot be locked: No locks"):
            import_model(path, tmp_path / "models")


@pytest.mark.skipif(os.geteuid() != 0, reason="only what root fetches is for the service's user")
def test_the_service_reads_what_a_root_with_a_closed_umask_imports(tmp_path: Path) -> None:
    Gguf("llama").model().save(tmp_path / "m.gguf")
    former = os.umask(0o077)
    try:
        made = import_model(tmp_path / "m.gguf", tmp_path / "models")
    finally:
        os.umask(former)
    folder = Path(made.path).parent
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {folder.name: 0o755, "m.gguf": 0o644, "source.json": 0o644}
