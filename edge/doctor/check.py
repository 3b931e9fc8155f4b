"""One result of `edgellm doctor`. Values only."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class CheckResult(str, Enum):
    """A verdict: `bad` breaks serving, `warn` costs speed or memory, `unknown` cannot be read on this machine."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


# `unknown` stands behind `warn`: a value that cannot be read is no fault of the machine.
ORDER = (CheckResult.BAD, CheckResult.WARN, CheckResult.UNKNOWN, CheckResult.OK)


class Check(Struct, frozen=True):
    """The result of one check: a stable name `area.subject`, one sentence, and what to do about it.

    `command` is only printed: the doctor runs nothing on the machine but `--fix`.
    """

    name: str
    verdict: CheckResult
    says: str
    next_step: str | None = None
    command: str | None = None


# One constructor a verdict: `warn` and `bad` cannot be made without a next step.
def ok(name: str, says: str) -> Check:
    return Check(name, CheckResult.OK, says)


def warn(name: str, says: str, next_step: str, command: str | None = None) -> Check:
    return Check(name, CheckResult.WARN, says, next_step, command)


def bad(name: str, says: str, next_step: str, command: str | None = None) -> Check:
    return Check(name, CheckResult.BAD, says, next_step, command)


def unknown(name: str, says: str, next_step: str | None = None) -> Check:
    return Check(name, CheckResult.UNKNOWN, says, next_step)


def worst(checks: tuple[Check, ...]) -> CheckResult:
    """Return the most serious verdict; OK without checks."""
    found = {check.verdict for check in checks}
    return next((verdict for verdict in ORDER if verdict in found), CheckResult.OK)
