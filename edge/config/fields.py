"""Keys of edgellm.toml and of profiles, derived from annotated classes: type, limits and help of each. Pure.

A key is a class attribute `name: Annotated[type, key(help, limits)] = default`; an attribute without help is no key.
msgspec converts, `Field` explains what was wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct, ValidationError, convert

from edge.board.memory import check_reserve
from edge.errors import ConfigError, UsageError
from edge.units import parse_size

# Where a key that is unknown in one section belongs; None for a key that no section has.
Place = Callable[[str], str | None]
_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def key(
    help: str, kind: Literal["size", "reserve", "words"] | None = None, *, one_model: bool = False, **limits: Any
) -> Meta:
    """Return the metadata of a key: help, limits (ge, le), and `kind` of a value that TOML has no type for.

    `words` is a list of texts, of which each may be written as a number: gpus = [0], args = ["--keep", 4].

    `one_model`: the key names files of one model, so a profile may not hold it, and [[model]] may hold it directly.
    """
    return Meta(description=help, extra={"kind": kind, "one_model": one_model}, **limits)


class Field(Struct, frozen=True):
    """One key. `type` is what msgspec converts to, limits included; `help` is published."""

    type: Any
    default: Any = None

    @property
    def meta(self) -> Meta:
        meta: Meta = self.type.__metadata__[0]
        return meta

    @property
    def help(self) -> str:
        return self.meta.description or ""

    @property
    def kind(self) -> str:
        """Return `size`, `reserve`, `words`, or an empty string for a plain TOML value."""
        return str((self.meta.extra or {}).get("kind") or "")

    @property
    def one_model(self) -> bool:
        return bool((self.meta.extra or {}).get("one_model"))

    @property
    def is_table(self) -> bool:
        return get_origin(self.type.__origin__) is dict

    @property
    def is_list(self) -> bool:
        return get_origin(self.type.__origin__) is tuple

    def read(self, value: object) -> Any:
        """Convert a TOML value. Raises ValueError that states what is wanted."""
        return self._convert(value, strict=True)

    def parse(self, text: str) -> Any:
        """Convert text of --set or of an environment variable. Raises ValueError.

        A list is `a,b`, or as in TOML `["a", "b"]`; a table is JSON: `{"enable_thinking": false}`.
        """
        if not self.is_list and not self.is_table:
            return self._convert(text, strict=False)
        try:
            parts = json.loads(text) if text.lstrip().startswith(("[", "{")) else None
        except (ValueError, RecursionError):  # [::1]:8080 begins with a bracket too
            parts = None
        if self.is_table:
            return self._convert(text if parts is None else parts, strict=True)
        if not isinstance(parts, list):
            parts = [part.strip() for part in text.split(",") if part.strip()]
        return self._convert(parts, strict=False)

    def _convert(self, value: object, *, strict: bool) -> Any:
        given = value
        if _has_zero_byte(value):
            raise ValueError("wants text without a zero byte, which no path and no argument can hold")
        if self.kind == "size" and isinstance(value, str):
            try:
                value = parse_size(value)
            except UsageError as error:
                raise ValueError(f"{error}: {error.hint}") from None
        # TOML distinguishes 8192.0 from 8192; a program that writes the file may not.
        if isinstance(value, float) and value.is_integer() and self.type.__origin__ is int:
            value = int(value)
        if not strict and isinstance(value, str) and self.type.__origin__ is bool:
            value = _WORDS.get(value.strip().lower(), value.strip())
        if self.kind == "words" and isinstance(value, list):
            value = [str(one) if isinstance(one, (int, float)) and not isinstance(one, bool) else one for one in value]
        try:
            found = convert(value, self.type, strict=strict)
        except ValidationError:  # msgspec names types of Python; an operator writes TOML
            raise ValueError(_wants(self.type, given, self.kind)) from None
        if any(isinstance(one, float) and not math.isfinite(one) for one in (found if self.is_list else (found,))):
            raise ValueError(_wants(self.type, given, self.kind))
        if self.kind == "reserve":
            check_reserve(found)
        return found


def _has_zero_byte(value: object) -> bool:
    waiting = [value]  # no recursion: JSON of a command line or the environment may be nested deeply
    while waiting:
        each = waiting.pop()
        if isinstance(each, str) and "\0" in each:
            return True
        waiting += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return False


def fields_of(section: type, prefix: str = "") -> dict[str, Field]:
    """Return the keys of a class and of the sections in it, dotted, in the order they are written."""
    values = section()
    found: dict[str, Field] = {}
    for name, hint in get_type_hints(section, include_extras=True).items():
        default = getattr(values, name)
        if get_origin(hint) is Annotated and hint.__metadata__[0].description:
            found[prefix + (hint.__metadata__[0].title or name)] = Field(hint, default)
        elif isinstance(hint, type) and hint.__module__.startswith("edge."):
            found |= fields_of(hint, f"{prefix}{name}.")
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing where no known word is close."""
    from difflib import get_close_matches  # only needed when something is wrong

    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def read_field(fields: Mapping[str, Field], key: str, value: object, source: str, place: Place | None = None) -> Any:
    """Convert one key of a TOML file. Raises ConfigError naming file and key."""
    return _converted(_known(fields, key, source, place), key, value, source, Field.read)


def read_table(fields: Mapping[str, Field], table: Mapping[str, object], source: str, place: Place) -> dict[str, Any]:
    """Convert the keys of a table of a TOML file. Raises ConfigError naming file and key."""
    return {key: read_field(fields, key, value, source, place) for key, value in table.items()}


def parse_field(fields: Mapping[str, Field], key: str, text: str, source: str) -> Any:
    """Convert one key given as text. Raises ConfigError naming source and key."""
    return _converted(_known(fields, key, source), key, text, source, Field.parse)


def tables(rows: object, key: str, source: str) -> list[dict[str, Any]]:
    """Return the tables `[[key]]` of a TOML file. Raises ConfigError."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{source}: {key} wants tables, written [[{key}]]")
    return rows


def _converted(field: Field, key: str, value: Any, source: str, convert: Callable[[Field, Any], Any]) -> Any:
    try:
        return convert(field, value)
    except ValueError as error:
        raise ConfigError(f"{source}: {key} {error}", f"{key}: {field.help}") from None


def _known(fields: Mapping[str, Field], key: str, source: str, place: Place | None = None) -> Field:
    """Return the field of a key. Raises ConfigError with the place of the key, or the nearest known one."""
    field = fields.get(key)
    if field is None:
        # `gateway.listen` is no key, nor a near one's typo: `listen` stands in the wrong section.
        where = (place(key) or place(key.rpartition(".")[2])) if place else None
        if where:
            raise ConfigError(f"{source}: {key} is not a key of this section", f"it belongs into {where}")
        raise ConfigError(
            f"{source}: unknown key {key}{did_you_mean(key, fields)}", "`edgellm config show` lists the keys"
        )
    return field


def flatten(table: Mapping[str, object], fields: Mapping[str, Field], prefix: str = "") -> dict[str, object]:
    """Return nested tables as dotted keys. Lists stay values, and so do the tables that `fields` wants as values."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict) and not (prefix + key in fields and fields[prefix + key].is_table):
            flat |= flatten(value, fields, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def nested(flat: Mapping[str, object]) -> dict[str, Any]:
    """Return dotted keys as nested tables: the opposite of `flatten`."""
    table: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, name = key.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return table


def _wants(hint: Any, value: object, kind: str) -> str:
    """Return `wants a whole number, got text 'x'` for a value that did not convert."""
    meta = Meta()
    if get_origin(hint) is Annotated:
        hint, meta = hint.__origin__, hint.__metadata__[0]
    if get_origin(hint) in (Union, UnionType):
        return _wants(get_args(hint)[0], value, kind)
    if get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            return f"wants a list, got {_name(value)}"
        bad = next((one for one in value if not _converts(one, get_args(hint)[0])), value)
        return _wants(get_args(hint)[0], bad, kind)
    if get_origin(hint) is Literal and isinstance(value, str):
        choices = [str(choice) for choice in get_args(hint)]
        return f"wants one of {', '.join(choices)}, got {value!r}{did_you_mean(value, choices)}"
    number = _number(value)
    if hint in (int, float) and number is not None and (hint is float or number == int(number)):
        if meta.ge is not None and number < meta.ge:
            return f"wants at least {meta.ge:g}, got {value}"
        if meta.le is not None and number > meta.le:
            return f"wants at most {meta.le:g}, got {value}"
        # Within the limits: text such as 00 or 1_0, which Python takes for a number and msgspec does not.
    if get_origin(hint) is dict:
        return f'wants a table, as text {{"a": 1}}, got {_name(value)}'
    names = {bool: "true or false", int: "a whole number", float: "a number"}
    return f"wants {'a size like 512MiB' if kind == 'size' else names.get(hint, 'text')}, got {_name(value)}"


def _converts(value: object, hint: Any) -> bool:
    try:
        return not (isinstance(found := convert(value, hint, strict=False), float) and not math.isfinite(found))
    except ValidationError:
        return False


def _number(value: object) -> float | None:
    """Return the finite number that a value or its text is."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _name(value: object) -> str:
    names = {bool: "a boolean", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}
    shown = f" {value!r}" if isinstance(value, (bool, int, float, str)) else ""
    return names.get(type(value), type(value).__name__) + shown
