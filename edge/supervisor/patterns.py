"""What lines of an engine's log mean, from build/llama-server.toml. Pure once loaded; compiled on first use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# "0.00.285.018 I cmn  common_param: ..." (--log-prefix --log-timestamps): minutes.seconds.ms.us since the first line.
_PREFIX = re.compile(r"(\d+)\.(\d\d)\.(\d\d\d)\.(\d\d\d) ([DIWEF]) ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """`engine_s` is the engine's own clock; None where the line carries no time."""

    text: str
    engine_s: float | None
    level: str | None


def parse_line(raw: str) -> LogLine:
    match = _PREFIX.match(raw)
    if match is None:
        return LogLine(raw, None, None)
    minutes, seconds, millis, micros = (int(match[n]) for n in range(1, 5))
    return LogLine(raw[match.end() :], minutes * 60 + seconds + millis / 1e3 + micros / 1e6, match[5])


@dataclass(frozen=True, slots=True)
class Mark:
    """A line that says something: `name` of the table it matched, `groups` its named values."""

    name: str
    groups: dict[str, str]


@dataclass(frozen=True, slots=True)
class Signature:
    """A known cause. `serves`: the engine goes on all the same; `device`: without the GPU that was wanted."""

    id: str
    pattern: re.Pattern[str]
    kind: str
    hint: str
    permanent: bool
    oom: bool
    serves: bool = False
    device: bool = False


class Patterns:
    """`gates` open gates, `marks` are instants, `facts` are values stated, `signatures` are causes of death."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._gates = {name: _compiled(table["gates"][name]) for name in ("weights", "kv_cache")}
        self._marks = {name: _compiled(patterns) for name, patterns in table["marks"].items()}
        self._facts = {name: _compiled(patterns) for name, patterns in table["facts"].items()}
        self._noise = _compiled(table.get("noise", {}).get("requests", []))
        self.signatures = tuple(_signature(row) for row in table["signatures"])

    def gates(self, text: str) -> Iterator[Mark]:
        """weights and kv_cache: the other gates are judged by facts, which depend on the plan."""
        return _matches(self._gates, text)

    def marks(self, text: str) -> Iterator[Mark]:
        return _matches(self._marks, text)

    def facts(self, text: str) -> Iterator[Mark]:
        return _matches(self._facts, text)

    def noise(self, text: str) -> bool:
        """A line that our own probes make the engine print."""
        return any(pattern.search(text) for pattern in self._noise)

    def cause(self, text: str) -> Signature | None:
        return next((signature for signature in self.signatures if signature.pattern.search(text)), None)


def _compiled(patterns: str | list[str]) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns)]


def _matches(table: Mapping[str, list[re.Pattern[str]]], text: str) -> Iterator[Mark]:
    for name, patterns in table.items():
        for pattern in patterns:
            if match := pattern.search(text):
                yield Mark(name, {key: value for key, value in match.groupdict().items() if value is not None})
                break


def _signature(row: Mapping[str, Any]) -> Signature:
    return Signature(
        id=row["id"],
        pattern=re.compile(row["pattern"]),
        kind=row["kind"],
        hint=row["hint"],
        permanent=row["permanent"],
        oom=row["oom"],
        serves=row.get("serves", False),
        device=row.get("device", False),
    )
