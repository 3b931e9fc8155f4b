"""The settings of an installation; recorded beside the data for `diff` and the next `install`."""

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
class UnitSettings:
    """Everything that varies in the unit files."""

    python: str = PYTHON
    run_as: str = USER
    listen: tuple[str, ...] = LISTEN
    model_dirs: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # those of video and render that exist: an unknown one is 216/GROUP
    jtop: bool = False
    power_mode: str = ""


def read_record(path: Path) -> UnitSettings | None:
    """Read the record of an installation; None where there is none or its schema is unknown."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            return None
        kept = next(value for value in document.values() if isinstance(value, dict))
        known: dict[str, Any] = {}
        for name in {field.name for field in fields(UnitSettings)} & set(kept):
            known[name] = tuple(kept[name]) if isinstance(kept[name], list) else kept[name]
        return replace(UnitSettings(), **known)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None


def record_text(settings: UnitSettings) -> str:
    """Return the text of the record."""
    return json.dumps({"schema": SCHEMA, "units": asdict(settings)}, indent=2) + "\n"


def write_record(path: Path, settings: UnitSettings) -> None:
    """Write the record; readable by all users, for `edgellm service diff`."""
    write_atomic(path, record_text(settings), 0o644)
