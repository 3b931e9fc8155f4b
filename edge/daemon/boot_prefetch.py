"""Read the model of the next start into the page cache early in boot, before its engine is started.

edgellm-prefetch.service runs this as soon as the model's file system is mounted, in the idle I/O class. What is read,
and whether at all, is in the remembered launch: files in the order of their reading where `edgellm bench load` found
that reading ahead helps. It never runs for dio, which ignores the page cache, and ends once the engine has overtaken
it, at the memory reserve, or with the last file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from edge.daemon.remembered_launch import RememberedLaunch, identity, read_record, record_path
from edge.linux.prefetch import Prefetch
from edge.paths import Folders, system_folders


class FilesToRead(NamedTuple):
    """Files of one model. `least_bytes` of memory stay available."""

    files: tuple[str, ...]
    least_bytes: int


def files_to_read(record: RememberedLaunch | None) -> Iterator[FilesToRead]:
    """Yield what to read for each model that gains by it, as far as its files are those that were measured. Pure."""
    if record is None:
        return
    for model in record.models.values():
        if model.prefetch_least_bytes is not None and not _is_direct(model.argv):
            yield FilesToRead(tuple(model.files), model.prefetch_least_bytes)


def _is_direct(argv: list[str]) -> bool:
    """Return whether an engine reads past the page cache, in any spelling and as a field of CommonParams."""
    # --direct-io was the option before --load-mode (FC-28); the embedded engine gets its fields as JSON.
    spelled = ("--load-mode", "dio") in pairwise(argv) or "--direct-io" in argv or "-dio" in argv
    return spelled or any('"load_mode":"dio"' in word for word in argv)


def is_as_planned(path: str, record: RememberedLaunch) -> bool:
    """Return whether a file is the one of the remembered launch. One that its plan did not open must only be there."""
    known = record.files.get(path)
    found = identity(path)
    return found is not None and known in (None, found)


def read_ahead(places: Folders) -> int:
    """Read the files of the remembered launch; return the bytes that were read."""
    record = read_record(record_path(places))
    total = 0
    for wanted in files_to_read(record):
        for path in wanted.files:
            # A replaced file may not be the one that the next start opens: leave it to the engine.
            if record is None or not is_as_planned(path, record):
                break
            reader = Prefetch(path, os.getpid(), wanted.least_bytes, ends_when_overtaken=True)
            reader.run()
            total += reader.read_bytes
            print(f"{path}: {reader.read_bytes >> 20} MiB read ahead{', stopped' if reader.stopped else ''}")
            if reader.stopped:
                return total
    return total


def main() -> int:
    read_ahead(system_folders())
    return 0


if __name__ == "__main__":
    sys.exit(main())
