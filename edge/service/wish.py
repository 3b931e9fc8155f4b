"""What a service installation was asked for; kept beside the data, so that `diff` and a second install know it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from edge.linux.files import write_atomic

SCHEMA = 1
USER = "edgellm"
GROUP = "edgellm"
PREFIX = Path("/opt/edgellm")
PYTHON = str(PREFIX / "bin/python")
LISTEN = ("127.0.0.1:8080",)


@dataclass(frozen=True, slots=True)
class Wish:
    """Everything that the unit files are made of."""

    python: str = PYTHON
    run_as: str = USER
    listen: tuple[str, ...] = LISTEN
    model_dirs: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # of video and render, those that exist
    jtop: bool = False
    power_mode: str = ""


def read(path: Path) -> Wish | None:
    """None when there is none, or it cannot be understood."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            return None
        kept = document["wish"]
        known: dict[str, Any] = {}
        for name in {field.name for field in fields(Wish)} & set(kept):
            known[name] = tuple(kept[name]) if isinstance(kept[name], list) else kept[name]
        return replace(Wish(), **known)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def render(wish: Wish) -> str:
    return json.dumps({"schema": SCHEMA, "wish": asdict(wish)}, indent=2) + "\n"


def write(path: Path, wish: Wish) -> None:
    write_atomic(path, render(wish), 0o644)
