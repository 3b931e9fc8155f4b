"""Import and remove: what comes into our folder, and what goes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge.errors import BadDataError, BadModelError, ModelMissingError, UnavailableError, UsageError
from edge.linux.files import sha256_file
from edge.models import install, receipt
from edge.models.install import Removed, import_model, removable, remove_entry
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


@pytest.mark.parametrize("link", [True, False])
def test_what_changed_since_it_was_fetched_is_not_imported(tmp_path: Path, link: bool) -> None:
    source = Gguf("llama").model().save(tmp_path / "in" / "a.gguf")
    row = {"path": "a.gguf", "bytes": source.stat().st_size, "sha256": "0" * 64}
    (source.parent / "source.json").write_text(json.dumps({"schema": 1, "source": "x", "files": [row]}))
    with pytest.raises(BadDataError, match="not what was fetched"):
        import_model(source, tmp_path / "models", link=lambda _: link)
    assert source.exists() and not list((tmp_path / "models").rglob("*.gguf"))


@pytest.mark.parametrize("damaged", [True, False])
@pytest.mark.parametrize("name", ["blobs/sha256-{}", "blobs/{}"])
def test_a_blob_that_its_name_does_not_hash_is_not_imported(tmp_path: Path, name: str, damaged: bool) -> None:
    """A cache of Ollama or of the hub that came on a USB stick: each file has its SHA-256 as its name."""
    file = Gguf("llama").model().save(tmp_path / "Alpha-Q5_K_M.gguf")
    digest = sha256_file(file)
    if damaged:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    blob = tmp_path / name.format(digest)
    blob.parent.mkdir()
    file.rename(blob)
    file.symlink_to(blob)
    if damaged:
        with pytest.raises(BadDataError, match="not what was fetched"):
            import_model(file, tmp_path / "models")
    else:
        note = read(Path(import_model(file, tmp_path / "models").path).parent)
        assert note and note.files[0].expected is None, "the stick's own word is no comparison"


def exchange_before_the_copy(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Run `change` after everything was judged, when the first file is taken."""
    taken, once = install._taken, [change]

    def take(*arguments: Any) -> str:
        if once:
            once.pop()()
        return taken(*arguments)

    monkeypatch.setattr(install, "_taken", take)


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("what", ["link", "fifo", "gone"])
def test_what_is_taken_is_what_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, link: bool
) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    eyes = Gguf("clip").projector().save(tmp_path / "in" / "mmproj-F16.gguf")
    judged = {each.name: each.read_bytes() for each in (path, eyes)}
    secret = Gguf("clip").projector().save(tmp_path / "secret.gguf")
    secret.write_bytes(secret.read_bytes() + b"secret")

    def exchange() -> None:
        for each in (path, eyes):
            each.unlink()
            if what == "link":
                each.symlink_to(secret)
            elif what == "fifo":
                os.mkfifo(each)

    exchange_before_the_copy(monkeypatch, exchange)
    model = import_model(path, tmp_path / "models", link=lambda _: link)
    assert model.mmproj
    assert {Path(each).name: Path(each).read_bytes() for each in (model.path, model.mmproj)} == judged


def test_a_hard_link_is_one_to_what_was_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    kept = path.with_name("kept")
    os.link(path, kept)

    def exchange() -> None:
        path.unlink()
        path.write_bytes(b"another")

    exchange_before_the_copy(monkeypatch, exchange)
    assert Path(import_model(path, tmp_path / "models", link=lambda _: True).path).samefile(kept)


@pytest.mark.parametrize("link", [True, False])
def test_what_is_written_to_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")

    def write() -> None:
        with path.open("ab") as file:
            file.write(b"more")

    exchange_before_the_copy(monkeypatch, write)
    with pytest.raises(BadDataError, match="changed while it was imported"):
        import_model(path, tmp_path / "models", link=lambda _: link)
    assert not list((tmp_path / "models").rglob("*.gguf"))


def test_a_hub_cache_is_imported_through_its_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, file in (("m-Q5_K_M.gguf", Gguf("llama").model()), ("mmproj-F16.gguf", Gguf("clip").projector())):
        file.save(blobs / f"{name}.gguf").rename(blobs / name[:4])
        (snapshot / name).symlink_to(f"../../blobs/{name[:4]}")
    if os.geteuid() == 0:
        for each in tmp_path.rglob("*"):
            os.chown(each, OTHER, OTHER, follow_symlinks=False)
    model = import_model(snapshot / "m-Q5_K_M.gguf", tmp_path / "models")
    assert model.mmproj and Path(model.path).read_bytes() == (blobs / "m-Q5").read_bytes()


OTHER = 65534  # `nobody`
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads what others may not")


@as_root
@pytest.mark.parametrize("name", ["m-Q5_K_M.gguf", "Big-Q5_K_M-00002-of-00002.gguf", "mmproj-F16.gguf", ""])
def test_root_follows_a_users_link_to_that_users_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    secret, folder = tmp_path / "secret", tmp_path / "in"
    Gguf("llama").model().save(secret / "m-Q5_K_M.gguf")
    Gguf("clip").projector().save(secret / "mmproj-F16.gguf")
    first = save_set(secret, "Big-Q5_K_M", 2)[0] if name.startswith("Big") else secret / "m-Q5_K_M.gguf"
    if name:
        folder.mkdir()
        for path in secret.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        link, target = folder / name, secret / name
        link.unlink()
    else:  # the folder itself is the link
        link, target = folder, secret
    link.symlink_to(target)
    os.lchown(link, OTHER, OTHER)
    with pytest.raises(BadDataError, match=f"a link of user {OTHER} leads to a file of user 0"):
        import_model(folder / first.name, tmp_path / "models")
    assert not list(tmp_path.glob("models/*/*.gguf"))
    monkeypatch.setenv("SUDO_UID", str(OTHER))
    assert import_model(folder / first.name, tmp_path / "models").path


@as_root
def test_a_link_to_no_model_of_roots_says_nothing_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    (tmp_path / "shadow").write_text("<html>")
    (tmp_path / "m.gguf").symlink_to("shadow")
    os.lchown(tmp_path / "m.gguf", OTHER, OTHER)
    with pytest.raises(BadDataError, match="is not imported: a link of user") as refused:
        import_model(tmp_path / "m.gguf", tmp_path / "models")
    assert "web" not in str(refused.value)


@as_root
def test_what_root_copies_is_closed_until_it_was_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    modes, read = [], install.read_header

    def look(path: Path) -> object:
        modes.append(stat.S_IMODE(path.parent.stat().st_mode))
        return read(path)

    monkeypatch.setattr(install, "read_header", look)
    model = import_model(path, tmp_path / "models")
    assert modes == [0o700]
    assert stat.S_IMODE(Path(model.path).parent.stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() == 0, reason="root opens its models for the service's user")
def test_a_users_models_have_the_modes_of_the_umask(tmp_path: Path) -> None:
    path = Gguf("llama").model().save(tmp_path / "in" / "m-Q5_K_M.gguf")
    former = os.umask(0o027)
    try:
        model = Path(import_model(path, tmp_path / "models").path)
    finally:
        os.umask(former)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (model.parent, model)] == [0o750, 0o640]


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
