"""The remedies that models needed at their last start, remedies.json in the state folder; the next start has them.

Without the file each start of the process would crash twice before it finds them again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from edge.linux.files import read_json, write_atomic
from edge.linux.ordered_writer import Put, at_once
from edge.linux.slow_reads import ReadHangs, answer_of
from edge.paths import Folders

SCHEMA = 1
READ_S = 1.0  # without the file on a disk that hangs: serving goes first
MOST_REMEDIES = 16  # a damaged or foreign file must not make a start of any length


class KeptRemedies:
    """Ids of remedies, each with the kind of the failure it cured, by model id; valid for one file, engine and rung.

    `put` runs the writes.
    """

    def __init__(self, folders: Folders, put: Put = at_once) -> None:
        self._put = put
        self._path = remedies_path(folders)
        self._models = self._read()

    def of(self, model_id: str, key: str) -> tuple[tuple[str, str], ...]:
        """Return (id, kind) pairs in the order to apply them; empty for another file, engine or rung."""
        kept = self._models.get(model_id)
        pairs = kept.get("remedies") if isinstance(kept, dict) and kept.get("key") == key else None
        return tuple((str(pair[0]), str(pair[1])) for pair in (pairs or ())[:MOST_REMEDIES] if len(pair) == 2)

    def keep(self, model_id: str, key: str, remedies: Sequence[tuple[str, str]]) -> None:
        """Write what a start that served needed, if it differs and the disk allows."""
        if tuple(remedies) == self.of(model_id, key):
            return
        self._models.pop(model_id, None)
        if remedies:
            self._models[model_id] = {"key": key, "remedies": [list(pair) for pair in remedies]}
        self._put(partial(_write, self._path, json.dumps({"schema": SCHEMA, "models": self._models}) + "\n"))

    def _read(self) -> dict[str, Any]:
        try:
            document = answer_of(partial(read_json, self._path), READ_S, READ_S)
        except (OSError, ValueError, ReadHangs):
            return {}
        models = document.get("models") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
        return {
            name: kept
            for name, kept in (models if isinstance(models, dict) else {}).items()
            if isinstance(kept, dict)
            and isinstance(kept.get("remedies"), list)
            and all(isinstance(pair, list) for pair in kept["remedies"])
        }


def _write(path: Path, text: str) -> None:
    # A full or read-only disk costs two crashes at the next start, and nothing now.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, text)


def remedies_path(folders: Folders) -> Path:
    return folders.instance_state / "remedies.json"


def key(fingerprint: str, engine: str, rung: int) -> str:
    """Return the identity for which a record of a model's start is valid."""
    return f"{fingerprint}/{engine}/{rung}"
