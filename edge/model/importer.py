"""Import a model file of this machine: copy it (or clone it where the file system can), then verify it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable
from pathlib import Path

from edge.errors import ModelMissingError
from edge.linux.files import sha256_file
from edge.model.disk import copy, need_space
from edge.model.file import ModelFile
from edge.model.meter import Meter
from edge.model.open import open_model
from edge.model.partial import job
from edge.model.progress import Report
from edge.model.receipt import InstalledFile, Receipt, now_utc

_FICLONE = 0x40049409  # ioctl: share the blocks of another file (btrfs, xfs)


def import_model(
    path: Path,
    models_dir: Path,
    *,
    name: str | None = None,
    progress: Report | None = None,
    link: Callable[[Path], bool] = lambda _: False,
) -> ModelFile:
    """Copy the model at `path`, all shards and its projector, into `models_dir`.

    `link`: which files may be hard-linked instead; the one file then has two names.

    Raises BadModelError with the verdict before anything is copied, ModelMissingError, DoesNotFitError.
    """
    if not path.exists() and not path.is_symlink():
        raise ModelMissingError(f"no such file: {path}", "give the path of a .gguf file")
    model = open_model(path.absolute())
    sources = [Path(shard) for shard in model.shards] + ([Path(model.mmproj)] if model.mmproj else [])
    public = name or model.name
    with job(models_dir, public, f"{model.fingerprint} {public}", "import", str(path)) as work:
        if not work.final.is_dir():
            total = sum(source.stat().st_size for source in sources)
            need_space(work.folder, total)
            meter = Meter("copy", sources[0].name, total, progress)
            files = tuple(_take(source, work.payload / source.name, meter, link(source)) for source in sources)
            meter.end()
            open_model(work.payload / sources[0].name)
            work.install(Receipt(f"file://{path.absolute()}", files, None, now_utc(), name=public))
    return open_model(work.final / sources[0].name)


def _take(source: Path, target: Path, meter: Meter, link: bool) -> InstalledFile:
    meter.what = source.name
    if link:
        with contextlib.suppress(OSError):  # another disk
            target.hardlink_to(source.resolve())
            return InstalledFile(source.name, target.stat().st_size, sha256_file(target, meter.add))
    with source.open("rb") as reader, target.open("wb") as writer:
        with contextlib.suppress(OSError):
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return InstalledFile(source.name, target.stat().st_size, sha256_file(target, meter.add))
        digest = copy(reader, writer, meter)
    return InstalledFile(source.name, target.stat().st_size, digest)
