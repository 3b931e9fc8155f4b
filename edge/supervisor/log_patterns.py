"""Match an engine's log lines against the patterns of build/llama-server.toml. Pure once loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct, convert

# "0.00.285.018 I cmn  common_param: ..." (--log-prefix --log-timestamps): minutes.seconds.ms.us since the first line.
_PREFIX = re.compile(r"(\d+)\.(\d\d)\.(\d\d\d)\.(\d\d\d) ([DIWEF]) ")


class LogLine(Struct, frozen=True):
    """A log line without its prefix. `engine_s`: its timestamp on the engine's clock; None without one."""

    text: str
    engine_s: float | None
    level: str | None


def parse_line(raw: str) -> LogLine:
    """Split the prefix of --log-prefix --log-timestamps from a line."""
    match = _PREFIX.match(raw)
    if match is None:
        return LogLine(raw, None, None)
    minutes, seconds, millis, micros = (int(match[n]) for n in range(1, 5))
    return LogLine(raw[match.end() :], minutes * 60 + seconds + millis / 1e3 + micros / 1e6, match[5])


class PatternMatch(Struct, frozen=True):
    """A match: `name` of the pattern, `groups` its named values."""

    name: str
    groups: dict[str, str]


class Signature(Struct, frozen=True):
    """A known cause of failure. `serves`: the engine goes on; `device`: the planned GPU is not used.

    `template`: it counts also while the engine prints the model's chat template.
    """

    id: str
    pattern: re.Pattern[str]
    kind: str
    hint: str
    permanent: bool
    oom: bool
    serves: bool = False
    device: bool = False
    template: bool = False


class Patterns:
    """The patterns: gates that a line opens, marks (instants), facts (values) and signatures (causes of failure)."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._gates = {name: _compiled(table["gates"][name]) for name in ("weights", "kv_cache")}
        self._marks = {name: _compiled(patterns) for name, patterns in table["marks"].items()}
        self._facts = {name: _compiled(patterns) for name, patterns in table["facts"].items()}
        self._noise = _compiled(table.get("noise", {}).get("requests", []))
        # Lines that print a part of the model, such as its chat template: an error text in it is no error.
        self._quotes = _compiled(table.get("noise", {}).get("quotes", []))
        self._template_begins = _compiled(table.get("noise", {}).get("template_begins", []))
        self._template_ends = _compiled(table.get("noise", {}).get("template_ends", []))
        # What stands between this and the last quote, or behind this, is a name that a model's author chose.
        self._quoted_names = _compiled(table.get("noise", {}).get("quoted_names", []))
        self._last_names = _compiled(table.get("noise", {}).get("last_names", []))
        self._rows = table["signatures"]
        self._of_template = [re.compile(row["pattern"]) for row in self._rows if row.get("template", False)]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """The causes of failure, compiled once a log has trouble: 66 patterns take 10 ms."""
        return convert(self._rows, tuple[Signature, ...], dec_hook=lambda _, text: re.compile(text))

    def gates(self, text: str) -> Iterator[PatternMatch]:
        """Yield matches of weights and kv_cache. The other gates depend on facts and on the plan."""
        return _matches(self._gates, text)

    def marks(self, text: str) -> Iterator[PatternMatch]:
        return _matches(self._marks, text)

    def facts(self, text: str) -> Iterator[PatternMatch]:
        return _matches(self._facts, text)

    def noise(self, text: str) -> bool:
        """Return whether the line, without its prefix, is the echo of a probe, which is no progress."""
        return any(pattern.search(text) for pattern in self._noise)

    def quotes(self, text: str) -> bool:
        """Return whether a line, without its prefix, quotes the model: its text is no evidence."""
        return any(pattern.search(text) for pattern in self._quotes)

    def template_begins(self, text: str) -> bool:
        """Return whether a line, without its prefix, is the first that may hold text of the chat template."""
        return any(pattern.search(text) for pattern in self._template_begins)

    def template_ends(self, text: str) -> bool:
        """Return whether a line, without its prefix, comes after the engine has read the chat template."""
        return any(pattern.search(text) for pattern in self._template_ends)

    def without_names(self, text: str) -> str:
        """Return a line without names of files, tensors, keys and types: a name is no cause, whatever it says."""
        ends = [found.end() for pattern in self._last_names if (found := pattern.search(text)) is not None]
        text = text[: min(ends, default=None)]
        begin, end = text.find("/"), text.rfind(".gguf")
        if 0 <= begin < end:
            text = text[: begin + 1] + text[end:]
        for pattern in self._quoted_names:
            found, last = pattern.search(text), text.rfind("'")
            if found is not None and last > found.end():
                text = text[: found.end()] + text[last:]
        return text

    def cause(self, text: str) -> Signature | None:
        text = self.without_names(text)
        return next((signature for signature in self.signatures if signature.pattern.search(text)), None)

    def is_template_error(self, text: str) -> bool:
        """Return whether the cause in a line, without its prefix, counts while the engine prints the chat template."""
        if not any(pattern.search(text) for pattern in self._of_template):
            return False
        cause = self.cause(text)  # an earlier signature may take precedence
        return cause is not None and cause.template


def _compiled(patterns: str | list[str]) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns)]


def _matches(table: Mapping[str, list[re.Pattern[str]]], text: str) -> Iterator[PatternMatch]:
    for name, patterns in table.items():
        for pattern in patterns:
            if match := pattern.search(text):
                yield PatternMatch(name, {key: value for key, value in match.groupdict().items() if value is not None})
                # The first pattern of a name is enough: later ones are the spellings of other versions.
                break
