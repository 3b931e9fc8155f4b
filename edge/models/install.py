"""Import a model file of this machine: copy it (or clone it where the file system can), then verify it."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge.errors import BadDataError, ModelMissingError, UsageError
from edge.linux.files import sha256_file
from edge.models import receipt
from edge.models.disk import copy, need_space
from edge.models.job import job
from edge.models.open import ModelFile, open_model
from edge.models.progress import Report, TransferMeter
from edge.models.receipt import InstalledFile, Receipt, now_utc
from edge.models.source import is_plain
from edge.models.store import Store, StoreEntry
from edge.models.verdict import HEALTHY_KINDS
from edge.units import printable

_FICLONE = 0x40049409  # ioctl: share the blocks of another file (btrfs, xfs)


def import_model(
    path: Path,
    models_dir: Path,
    *,
    name: str | None = None,
    progress: Report | None = None,
    link: Callable[[Path], bool] = lambda _: False,
    stores: Sequence[Path] = (),
) -> ModelFile:
    """Copy the model at `path`, all shards and its projector, into `models_dir`.

    `stores`: whose receipts have the hashes of the source, which go with the model.
    `link`: which files may be hard-linked instead; the one file then has two names.

    Raises BadModelError with the verdict before anything is copied, ModelMissingError, DoesNotFitError.
    """
    if not path.exists() and not path.is_symlink():
        raise ModelMissingError(f"no such file: {path}", "give the path of a .gguf file")
    if name is not None and (not is_plain(name) or name.startswith((".", "-")) or ":" in name):
        raise UsageError(f"{printable(name)} is no name for a model", "letters, digits and . _ + - are fine")
    model = open_model(path.absolute())
    sources = [Path(shard) for shard in model.shards] + ([Path(model.mmproj)] if model.mmproj else [])
    public = name or model.name
    names = [(source, _stored_name(source, public, model.quant)) for source in sources]
    if model.mmproj and not sources[-1].name.lower().endswith(".gguf"):
        names[-1] = (sources[-1], f"mmproj-{public}.gguf")
    with job(models_dir, public, f"{model.fingerprint} {public}", "import", str(path)) as work:
        if not work.present(as_ for _, as_ in names):
            total = sum(source.stat().st_size for source in sources)
            need_space(work.folder, total)
            meter = TransferMeter("copy", sources[0].name, total, progress)
            files = tuple(_take(source, work.payload / as_, meter, link(source), stores) for source, as_ in names)
            meter.end()
            open_model(work.payload / names[0][1])
            work.install(Receipt(f"file://{path.absolute()}", files, None, now_utc(), name=public))
    return open_model(work.final / names[0][1])


def _stored_name(source: Path, public: str, quant: str) -> str:
    """Return the name in the store, where only *.gguf is looked for: a blob gets the name of its model."""
    return source.name if source.name.lower().endswith(".gguf") else f"{public}-{quant}.gguf"


def _take(source: Path, target: Path, meter: TransferMeter, link: bool, stores: Sequence[Path]) -> InstalledFile:
    """Link or copy one file, and compare it with the hash that a receipt beside it gives. Raises BadDataError."""
    taken = _taken(source, target, meter, link)
    note = receipt.read(source.parent)
    known = note.file(source.name) if note else None
    if known is None:
        return taken
    if taken.sha256 != (known.expected or known.sha256):
        target.unlink()
        hint = "`edgellm model check --deep` shows it; pull it again"
        raise BadDataError(f"{source} is not what was fetched: its hash differs", hint)
    trusted = receipt.as_trusted(note, source.parent, stores)
    given = trusted.file(source.name) if trusted else None
    return replace(taken, expected=given.expected if given else None)


def _taken(source: Path, target: Path, meter: TransferMeter, link: bool) -> InstalledFile:
    meter.what = source.name
    if link:
        with contextlib.suppress(OSError):  # another disk
            target.hardlink_to(source.resolve())
            return InstalledFile(target.name, target.stat().st_size, sha256_file(target, meter.add))
    with source.open("rb") as reader, target.open("wb") as writer:
        with contextlib.suppress(OSError):
            # A clone shares the blocks: importing 20 GB takes milliseconds and no space. ext4 and most SD cards cannot.
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return InstalledFile(target.name, target.stat().st_size, sha256_file(target, meter.add))
        digest = copy(reader, writer, meter)
    return InstalledFile(target.name, target.stat().st_size, digest)


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
