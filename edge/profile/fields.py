"""The kinds of value that profiles and edgellm.toml hold: read strictly from TOML, parsed from text elsewhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from edge.errors import ConfigError, UsageError
from edge.profile.reserve import check_reserve
from edge.units import parse_size

Value = bool | int | float | str | tuple[str, ...] | tuple[int, ...] | tuple[float, ...] | None
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Field:
    """One key. `kind`: boolean integer number text size reserve texts integers numbers. `help` is published."""

    kind: str
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def read(self, value: object) -> Value:
        """A TOML value → ours. Raises ValueError that says what is wanted."""
        if self.kind in ("texts", "integers", "numbers"):
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"wants a list, got {_name(value)}")
            return tuple(self._one(self.kind[:-1], item) for item in value)  # type: ignore[return-value]  # one kind
        return self._one(self.kind, value)

    def parse(self, text: str) -> Value:
        """Text of --set or of an environment variable → ours. Lists are separated by commas. Raises ValueError."""
        if self.kind in ("texts", "integers", "numbers"):
            parts = [part.strip() for part in text.split(",") if part.strip()]
            return self.read([_from_text(self.kind[:-1], part) for part in parts])
        return self.read(_from_text(self.kind, text))

    def _one(self, kind: str, value: object) -> bool | int | float | str:
        if kind == "boolean":
            if not isinstance(value, bool):
                raise ValueError(f"wants true or false, got {_name(value)}")
            return value
        if kind in ("integer", "number", "size"):
            return self._number(kind, value)
        if not isinstance(value, str):
            raise ValueError(f"wants text, got {_name(value)}")
        if self.choices and value not in self.choices:
            raise ValueError(
                f"wants one of {', '.join(self.choices)}, got {value!r}{did_you_mean(value, self.choices)}"
            )
        if kind == "reserve":
            check_reserve(value)
        return value

    def _number(self, kind: str, value: object) -> int | float:
        if kind == "size" and isinstance(value, str):
            try:
                value = parse_size(value)
            except UsageError as error:
                raise ValueError(f"{error}: {error.hint}") from None
        wanted = {"integer": "a whole number", "number": "a number", "size": "a size like 512MiB"}[kind]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"wants {wanted}, got {_name(value)}")
        if kind != "number" and value != int(value):
            raise ValueError(f"wants {wanted}, got {_name(value)}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"wants at least {self.minimum:g}, got {value}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"wants at most {self.maximum:g}, got {value}")
        return float(value) if kind == "number" else int(value)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    from difflib import get_close_matches  # only needed when something is wrong

    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def read_field(fields: dict[str, Field], key: str, value: object, source: str) -> Value:
    """One key of a TOML file. Raises ConfigError naming file and key."""
    field = known_field(fields, key, source)
    try:
        return field.read(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {key} {error}", f"{key}: {field.help}") from None


def parse_field(fields: dict[str, Field], key: str, text: str, source: str) -> Value:
    """One key given as text. Raises ConfigError naming source and key."""
    field = known_field(fields, key, source)
    try:
        return field.parse(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {key} {error}", f"{key}: {field.help}") from None


def known_field(fields: dict[str, Field], key: str, source: str) -> Field:
    field = fields.get(key)
    if field is None:
        raise ConfigError(
            f"{source}: unknown key {key}{did_you_mean(key, fields)}", "`edgellm config show` lists the keys"
        )
    return field


def flatten(table: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested tables → dotted keys. Lists stay values."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _from_text(kind: str, text: str) -> object:
    if kind == "boolean":
        lower = text.strip().lower()
        return True if lower in _TRUE else False if lower in _FALSE else text
    if kind in ("integer", "number"):
        for convert in (int, float):
            try:
                return convert(text)
            except ValueError:
                continue
    return text


def _name(value: object) -> str:
    names = {bool: "a boolean", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}
    shown = f" {value!r}" if isinstance(value, (bool, int, float, str)) else ""
    return names.get(type(value), type(value).__name__) + shown
