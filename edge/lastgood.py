"""last_good.json in the state folder: how fast each model was when it last served as planned."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from edge.files import write_atomic
from edge.folders import Folders

SCHEMA = 1


class LastGood:
    """By model id; a value counts for the same file, engine and rung only."""

    def __init__(self, folders: Folders) -> None:
        self._path = folders.instance_state / "last_good.json"
        self._models = self._read()

    def tokens_s(self, model_id: str, key: str) -> float | None:
        kept = self._models.get(model_id, {})
        value = kept.get("tokens_s")
        return float(value) if kept.get("key") == key and isinstance(value, (int, float)) and value > 0 else None

    def keep(self, model_id: str, key: str, tokens_s: float) -> None:
        """The fastest counts: from the last one a slow decline would lower its own bar, start by start.

        A disk that is full or read-only costs only the memory of it.
        """
        if tokens_s <= (self.tokens_s(model_id, key) or 0.0):
            return
        self._models[model_id] = {"key": key, "tokens_s": round(tokens_s, 2), "at": round(time.time())}
        document = {"schema": SCHEMA, "models": self._models}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(self._path, json.dumps(document) + "\n")

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            models = document["models"] if document.get("schema") == SCHEMA else {}
            return {name: value for name, value in models.items() if isinstance(value, dict)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def key(fingerprint: str, engine: str, rung: int) -> str:
    return f"{fingerprint}/{engine}/{rung}"
