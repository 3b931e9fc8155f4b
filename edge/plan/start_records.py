"""Append to starts.jsonl and crashes.jsonl: the last 50 records, rewritten atomically."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge.linux.files import parse_json, read_bounded, write_atomic

KEPT_LINES = 50
MOST_BYTES = 16 << 20  # 50 records with the log of a crash each are a few hundred kB


def append(path: Path, record: dict[str, Any]) -> bool:
    """Append one record. Returns False on a full or read-only disk, which must not stop a start."""
    line = json.dumps(record, separators=(",", ":"))
    kept = [json.dumps(old, separators=(",", ":")) for old in read(path)[-(KEPT_LINES - 1) :]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, "\n".join([*kept, line]) + "\n")
    except OSError:
        return False
    return True


def update(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace each record by `change(record)`; an unwritable disk keeps the old ones."""
    before = read(path)
    after = [change(record) for record in before]
    if after != before:
        with contextlib.suppress(OSError):
            write_atomic(path, "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in after))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records, oldest first, without lines that are no JSON objects (a disk that was full)."""
    records: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in read_bounded(path, MOST_BYTES).decode("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):
                record = parse_json(line)
                if isinstance(record, dict):
                    records.append(record)
    return records
