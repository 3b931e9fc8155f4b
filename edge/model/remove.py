"""Remove a model from our own folder, by one rename before the deletion."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from edge.errors import UsageError
from edge.model import receipt
from edge.model.partial import job
from edge.model.store import Entry, Store


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed."""

    id: str
    paths: tuple[str, ...]
    bytes: int


def remove(store: Store, ref: str) -> Removed:
    """Remove `NAME[:QUANT]`, usable or not. Raises UsageError if that matches several models or none of ours."""
    found = store.named(ref)
    own = [entry for entry in found if entry.writable]
    if not own:
        where = found[0].path.parent
        raise UsageError(f"{ref} lies in {where}, which is not ours", "remove it with the tool that put it there")
    if len(own) > 1:
        table = "\n".join(f"  {entry.id:<40} {entry.path}" for entry in own)
        raise UsageError(f"{ref} means {len(own)} models", "name one with its quant: NAME:QUANT", table=table)
    return _remove(store.models_dir, own[0])


def _remove(models_dir: Path, entry: Entry) -> Removed:
    """Remove the folder of a pulled or imported model, or the loose files alone."""
    folder = entry.path.parent
    whole = folder != models_dir and (folder / receipt.FILE_NAME).is_file()
    paths = [folder] if whole else list(entry.shards)
    with job(models_dir, entry.name, f"remove {entry.path}", "remove", entry.id) as work:
        for number, path in enumerate(paths):
            path.rename(work.work / str(number))
        shutil.rmtree(work.work)
    return Removed(entry.id, tuple(str(path) for path in paths), entry.bytes)
