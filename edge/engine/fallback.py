"""When a new engine must give way to the former one. Pure: start records in, a decision out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# A start may fail for a reason outside the engine; three in a row without one READY are the engine's.
STARTS_BEFORE_ROLLBACK = 3
# The supervisor's kind for a SIGKILL of unknown origin.
_KILLED = frozenset({"killed"})


@dataclass(frozen=True, slots=True)
class Start:
    """One start as it was recorded. `failed` is the failure's kind when it ended before READY, None when unknown."""

    engine: str
    ready: bool
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """[rollback] of build/llama-server.toml."""

    at_once: frozenset[str]
    innocent: frozenset[str]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Use `engine` instead, degraded, and say `because`."""

    engine: str
    instead_of: str
    because: str


def rules(table: Mapping[str, Any]) -> Rules:
    """From build/llama-server.toml. Whatever its signatures call a lack of memory never speaks against an engine."""
    memory = frozenset(signature["kind"] for signature in table["signatures"] if signature["oom"])
    judged = table["rollback"]
    return Rules(frozenset(judged["at_once"]), frozenset(judged["innocent"]) | memory | _KILLED)


def starts_from_records(records: Iterable[Mapping[str, Any]]) -> list[Start]:
    """starts.jsonl → values: `outcome` is `ready` or `failed: KIND`. What is not understood is left out."""
    found = []
    for record in records:
        engine, outcome = record.get("engine"), record.get("outcome")
        if not isinstance(engine, str) or not isinstance(outcome, str):
            continue
        failed = outcome.removeprefix("failed: ") if outcome.startswith("failed: ") else None
        found.append(Start(engine, outcome == "ready", failed))
    return found


def fallback(current: str, previous: str | None, starts: Iterable[Start], judged_by: Rules) -> Fallback | None:
    """None unless `current` was never READY, and `previous` was once."""
    known = list(starts)
    mine = [start for start in known if start.engine == current]
    if previous is None or previous == current or any(start.ready for start in mine):
        return None
    if not any(start.ready for start in known if start.engine == previous):
        return None
    for start in mine:
        if start.failed in judged_by.at_once:
            return Fallback(previous, current, f"{current} failed permanently ({start.failed})")
    tried = [start for start in mine if start.failed not in judged_by.innocent]
    if len(tried) >= STARTS_BEFORE_ROLLBACK:
        return Fallback(previous, current, f"{current} has not become ready in {len(tried)} starts")
    return None
