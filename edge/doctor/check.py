"""One result of `edgellm doctor`. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """A verdict: `bad` breaks serving, `warn` costs speed or memory, `unknown` cannot be read on this machine."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


ORDER = (Verdict.BAD, Verdict.WARN, Verdict.UNKNOWN, Verdict.OK)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: a stable name `area.subject`, one sentence, and what to do about it.

    `command` is only printed: the doctor runs nothing on the machine but `--fix`.
    """

    name: str
    verdict: Verdict
    says: str
    next_step: str | None = None
    command: str | None = None


def ok(name: str, says: str) -> Check:
    return Check(name, Verdict.OK, says)


def warn(name: str, says: str, next_step: str, command: str | None = None) -> Check:
    return Check(name, Verdict.WARN, says, next_step, command)


def bad(name: str, says: str, next_step: str, command: str | None = None) -> Check:
    return Check(name, Verdict.BAD, says, next_step, command)


def unknown(name: str, says: str, next_step: str | None = None) -> Check:
    return Check(name, Verdict.UNKNOWN, says, next_step)


def worst(checks: tuple[Check, ...]) -> Verdict:
    """Return the most serious verdict; OK without checks."""
    found = {check.verdict for check in checks}
    return next((verdict for verdict in ORDER if verdict in found), Verdict.OK)
