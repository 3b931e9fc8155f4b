"""Import a model file of this machine: copy it (or clone it where the file system can), then verify it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge.errors import BadDataError, ModelMissingError, UsageError
from edge.linux.files import open_followed, sha256_file
from edge.models import receipt
from edge.models.disk import copy, need_space
from edge.models.header import open_by_name, read_header
from edge.models.job import job
from edge.models.open import ModelFile, open_model
from edge.models.progress import Report, TransferMeter
from edge.models.receipt import InstalledFile, Receipt, now_utc
from edge.models.source import is_plain
from edge.models.store import Store, StoreEntry
from edge.models.verdict import HEALTHY_KINDS
from edge.paths import our_users
from edge.units import printable

_FICLONE = 0x40049409  # ioctl: share the blocks of another file (btrfs, xfs)


def import_model(
    path: Path,
    models_dir: Path,
    *,
    name: str | None = None,
    progress: Report | None = None,
    link: Callable[[os.stat_result], bool] = lambda _: False,
    stores: Sequence[Path] = (),
) -> ModelFile:
    """Copy the model at `path`, all shards and its projector, into `models_dir`.

    `stores`: whose receipts have the hashes of the source, which go with the model.
    `link`: which files may be hard-linked instead; the one file then has two names. What is copied or linked is the
    file that was judged, whatever has its name by then. For root a user's link leads to that user's files only.

    Raises BadModelError with the verdict before anything is copied, ModelMissingError, DoesNotFitError.
    """
    if not path.exists() and not path.is_symlink():
        raise ModelMissingError(f"no such file: {path}", "give the path of a .gguf file")
    if name is not None and (not is_plain(name) or name.startswith((".", "-")) or ":" in name):
        raise UsageError(f"{printable(name)} is no name for a model", "letters, digits and . _ + - are fine")
    with _Judged() as judged:
        model = open_model(path.absolute(), opening=judged.open)
        sources = [Path(shard) for shard in model.shards] + ([Path(model.mmproj)] if model.mmproj else [])
        public = name or model.name
        names = [(source, _stored_name(source, public, model.quant)) for source in sources]
        if model.mmproj and not sources[-1].name.lower().endswith(".gguf"):
            names[-1] = (sources[-1], f"mmproj-{public}.gguf")
        with job(models_dir, public, f"{model.fingerprint} {public}", "import", str(path)) as work:
            if not work.present(as_ for _, as_ in names):
                work.close()
                total = sum(judged.state(source).st_size for source in sources)
                need_space(work.folder, total)
                meter = TransferMeter("copy", sources[0].name, total, progress)
                files = tuple(_take(judged, source, work.payload / as_, meter, link, stores) for source, as_ in names)
                meter.end()
                for _, as_ in names:
                    read_header(work.payload / as_)
                open_model(work.payload / names[0][1])
                work.install(Receipt(f"file://{path.absolute()}", files, None, now_utc(), name=public))
    return open_model(work.final / names[0][1])


def _stored_name(source: Path, public: str, quant: str) -> str:
    """Return the name in the store, where only *.gguf is looked for: a blob gets the name of its model."""
    return source.name if source.name.lower().endswith(".gguf") else f"{public}-{quant}.gguf"


class _Judged:
    """The files whose headers were read, kept open: what is taken is what was judged, whatever has its name by then."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[int, os.stat_result]] = {}

    def __enter__(self) -> _Judged:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor, _state in self._files.values():
            os.close(descriptor)

    def open(self, path: Path) -> int:
        """Return a new descriptor of a file, the same file for each call. Raises OSError, BadDataError."""
        if path not in self._files:
            try:
                descriptor = open_followed(path, our_users(os.environ)) if os.geteuid() == 0 else open_by_name(path)
            except PermissionError as error:
                if error.errno != errno.EPERM:
                    raise
                hint = "name the file that the link leads to"
                raise BadDataError(f"{printable(str(path))} is not imported: {error.strerror}", hint) from error
            self._files[path] = (descriptor, os.fstat(descriptor))
        return os.dup(self._files[path][0])

    def state(self, path: Path) -> os.stat_result:
        """Return the state of a file as it was judged."""
        return self._files[path][1]

    def check(self, path: Path) -> None:
        """Raise BadDataError for a file that was written to since it was judged. A new link to it changes its ctime."""
        descriptor, before = self._files[path]
        now = os.fstat(descriptor)
        if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise BadDataError(f"{printable(str(path))} changed while it was imported", "import it again")


def _take(
    judged: _Judged,
    source: Path,
    target: Path,
    meter: TransferMeter,
    link: Callable[[os.stat_result], bool],
    stores: Sequence[Path],
) -> InstalledFile:
    """Link or copy one file, and compare it with the hash that its store gives: a receipt, or the name of a blob.

    Raises BadDataError.
    """
    meter.what = source.name
    with FileIO(judged.open(source), "rb") as reader:
        digest = _taken(reader, target, meter, link(judged.state(source)))
    judged.check(source)
    taken = InstalledFile(target.name, target.stat().st_size, digest)
    note = receipt.read(source.parent)
    known = note.file(source.name) if note else None
    if taken.sha256 != ((known.expected or known.sha256) if known else receipt.address(source) or taken.sha256):
        target.unlink()
        hint = "`edgellm model check --deep` shows it; pull it again"
        raise BadDataError(f"{source} is not what was fetched: its hash differs", hint)
    trusted = receipt.as_trusted(note, source.parent, stores)
    given = trusted.file(source.name) if trusted else None
    return replace(taken, expected=given.expected if given else None)


def _taken(reader: FileIO, target: Path, meter: TransferMeter, link: bool) -> str:
    """Link or copy an open file and return its hash."""
    if link:
        try:
            # linkat(2) with AT_SYMLINK_FOLLOW: the open file itself, not what has its name now. os.link() calls link(2)
            # where it gets no folder.
            os.link(f"/proc/self/fd/{reader.fileno()}", target, src_dir_fd=reader.fileno(), follow_symlinks=True)
        except OSError:  # another disk, or the file has no name any more
            pass
        else:
            return sha256_file(target, meter.add)
    with target.open("wb") as writer:
        with contextlib.suppress(OSError):
            # A clone shares the blocks: importing 20 GB takes milliseconds and no space. ext4 and most SD cards cannot.
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return sha256_file(target, meter.add)
        reader.seek(0)
        return copy(reader, writer, meter)


# Remove a model from our own folder, by one rename before the deletion.


class Removed(Struct, frozen=True):
    """What was removed."""

    id: str
    paths: tuple[str, ...]
    bytes: int


def removable(store: Store, ref: str) -> StoreEntry:
    """Return the model of our own folder that `NAME[:QUANT]` means. Raises UsageError for several, or none of ours."""
    found = store.named(ref)
    # A file behind a linked folder is another program's and stays; of a link to a file only the link is removed.
    base = store.models_dir.resolve()
    own = [entry for entry in found if entry.writable and base in (entry.path.parent.resolve() / "x").parents]
    # A projector in the model's folder has its name, and goes with it.
    own = [entry for entry in own if not (entry.verdict and entry.verdict.kind in HEALTHY_KINDS)] or own
    if not own:
        where = found[0].path.parent.resolve()
        raise UsageError(f"{ref} lies in {where}, which is not ours", "remove it with the tool that put it there")
    if len(own) > 1:
        table = "\n".join(f"  {entry.id:<40} {entry.path}" for entry in own)
        raise UsageError(f"{ref} means {len(own)} models", "name one with its quant: NAME:QUANT", table=table)
    return own[0]


def remove_entry(store: Store, entry: StoreEntry) -> Removed:
    """Remove the folder of a pulled or imported model, or the loose files alone."""
    folder = entry.path.parent
    whole = folder != store.models_dir and (folder / receipt.FILE_NAME).is_file()
    paths = [folder] if whole else list(entry.shards)
    with job(store.models_dir, entry.name, f"remove {entry.path}", "remove", entry.id) as work:
        for number, path in enumerate(paths):
            path.rename(work.work / str(number))
        shutil.rmtree(work.work)
    return Removed(entry.id, tuple(str(path) for path in paths), entry.bytes)
