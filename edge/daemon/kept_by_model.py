"""What a good start of each model leaves in the state folder for the next one: the remedies it needed, and its speed.

Without the remedies each start of the process would crash twice before it finds them again.
"""

from __future__ import annotations

import json
import time
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


class _KeptByModel:
    """A JSON file of values by model id, each valid for one file, engine and rung: its `key`. `put` runs the writes."""

    def __init__(self, path: Path, put: Put) -> None:
        self._path = path
        self._put = put
        document = None
        with suppress(OSError, ValueError, ReadHangs):
            document = answer_of(partial(read_json, path), READ_S, READ_S)
        models = document.get("models") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
        self._models: dict[str, Any] = models if isinstance(models, dict) else {}

    def _values(self, model_id: str, key: str) -> dict[str, Any]:
        """Return what is kept; empty for another file, engine or rung."""
        kept = self._models.get(model_id)
        return kept if isinstance(kept, dict) and kept.get("key") == key else {}

    def _replace(self, model_id: str, key: str, values: dict[str, Any]) -> None:
        """Keep `values`, or nothing if they are empty, and write the file if the disk allows."""
        self._models.pop(model_id, None)
        if values:
            self._models[model_id] = {"key": key, **values}
        self._put(partial(_write, self._path, json.dumps({"schema": SCHEMA, "models": self._models}) + "\n"))


class KeptRemedies(_KeptByModel):
    """Ids of remedies, each with the kind of the failure it cured, by model id (remedies.json)."""

    def __init__(self, folders: Folders, put: Put = at_once) -> None:
        super().__init__(remedies_path(folders), put)

    def of(self, model_id: str, key: str) -> tuple[tuple[str, str], ...]:
        """Return (id, kind) pairs in the order to apply them; empty for another file, engine or rung."""
        pairs = self._values(model_id, key).get("remedies")
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return ()
        return tuple((str(pair[0]), str(pair[1])) for pair in pairs[:MOST_REMEDIES])

    def keep(self, model_id: str, key: str, remedies: Sequence[tuple[str, str]]) -> None:
        """Write what a start that served needed, if it differs."""
        if tuple(remedies) != self.of(model_id, key):
            self._replace(model_id, key, {"remedies": [list(pair) for pair in remedies]} if remedies else {})


class SpeedBaseline(_KeptByModel):
    """Tokens per second by model id, of when it ran as planned (last_good.json)."""

    def __init__(self, folders: Folders, put: Put = at_once) -> None:
        super().__init__(folders.instance_state / "last_good.json", put)

    def tokens_s(self, model_id: str, key: str) -> float | None:
        """Return the baseline, or None for another file, engine or rung."""
        value = self._values(model_id, key).get("tokens_s")
        return float(value) if isinstance(value, (int, float)) and value > 0 else None

    def keep(self, model_id: str, key: str, tokens_s: float) -> None:
        """Keep the highest speed.

        With the last speed as the baseline, a slow decline would lower its own bar at every start.
        """
        if tokens_s > (self.tokens_s(model_id, key) or 0.0):
            self._replace(model_id, key, {"tokens_s": round(tokens_s, 2), "at": round(time.time())})


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
