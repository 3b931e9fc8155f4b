"""One finding of the doctor. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """`bad` breaks serving, `warn` costs speed, memory or nerves, `unknown` could not be seen from here."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


ORDER = (Verdict.BAD, Verdict.WARN, Verdict.UNKNOWN, Verdict.OK)


@dataclass(frozen=True, slots=True)
class Check:
    """`name` is `area.subject` and stable. `says` is one sentence, `next_step` and `command` what to do about it."""

    name: str
    verdict: Verdict
    says: str
    next_step: str | None = None
    command: str | None = None  # never run by us

    @property
    def area(self) -> str:
        return self.name.partition(".")[0]


def ok(name: str, says: str) -> Check:
    return Check(name, Verdict.OK, says)


def warn(name: str, says: str, next_step: str, command: str | None = None) -> Check:
    return Check(name, Verdict.WARN, says, next_step, command)


def bad(name: str, says: str, next_step: str, command: str | None = None) -> Check:
    return Check(name, Verdict.BAD, says, next_step, command)


def unknown(name: str, says: str, next_step: str | None = None) -> Check:
    return Check(name, Verdict.UNKNOWN, says, next_step)


def worst(checks: tuple[Check, ...]) -> Verdict:
    """OK when nothing was checked."""
    found = {check.verdict for check in checks}
    return next((verdict for verdict in ORDER if verdict in found), Verdict.OK)
