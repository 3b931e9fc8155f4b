"""The speed baseline of each model, last_good.json in the state folder: tokens per second when it ran as planned."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from edge.folders import Folders
from edge.linux.files import write_atomic

SCHEMA = 1


class LastGood:
    """Tokens per second by model id, each valid for one file, engine and rung."""

    def __init__(self, folders: Folders) -> None:
        self._path = folders.instance_state / "last_good.json"
        self._models = self._read()

    def tokens_s(self, model_id: str, key: str) -> float | None:
        """Return the baseline, or None for another file, engine or rung."""
        kept = self._models.get(model_id, {})
        value = kept.get("tokens_s")
        return float(value) if kept.get("key") == key and isinstance(value, (int, float)) and value > 0 else None

    def keep(self, model_id: str, key: str, tokens_s: float) -> None:
        """Keep the highest speed, and write it if the disk allows.

        With the last speed as the baseline, a slow decline would lower its own bar at every start.
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
    """Return the identity for which a baseline is valid."""
    return f"{fingerprint}/{engine}/{rung}"
