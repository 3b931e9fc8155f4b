"""Keep the winners that `edgellm bench` measured, a JSON file for each kind: rows of one board and engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import convert, to_builtins

from edge.linux.files import read_json, write_json

SCHEMA = 1


class MeasuredChoice(Protocol):
    """The winner of one measurement, a msgspec Struct. `key`: what another measurement of replaces it."""

    @property
    def board(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def key(self) -> tuple[Any, ...]: ...


C = TypeVar("C", bound=MeasuredChoice)


def read_choices(path: Path, kind: type[C], board: str, engine: str) -> tuple[C, ...]:
    """Return the choices for this board and engine; none from a missing, damaged or newer file."""
    return tuple(row for row in read_all(path, kind) if (row.board, row.engine) == (board, engine))


def read_all(path: Path, kind: type[C]) -> list[C]:
    """Return the choices for every board and engine; none from a missing, damaged or newer file."""
    try:
        document = read_json(path)
        return convert(document["choices"], list[kind]) if document["schema"] == SCHEMA else []  # type: ignore[valid-type]
    except (OSError, ValueError, KeyError, TypeError):  # msgspec's ValidationError is a ValueError
        return []


def write_choice(path: Path, choice: MeasuredChoice) -> None:
    """Add or replace one choice. Raises OSError."""
    rows = [*(row for row in read_all(path, type(choice)) if row.key != choice.key), choice]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema": SCHEMA, "choices": to_builtins(rows)})
