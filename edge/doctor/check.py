"""The results of `edgellm doctor`. Values only."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from msgspec import Struct


class CheckResult(str, Enum):
    """A verdict: `bad` breaks serving, `warn` costs speed or memory, `unknown` cannot be read on this machine."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


# `unknown` comes after `warn`: a value that cannot be read is no fault of the machine.
ORDER = (CheckResult.BAD, CheckResult.WARN, CheckResult.UNKNOWN, CheckResult.OK)


class Finding(NamedTuple):
    """What a check found: one sentence, and what to do about it.

    `command` is only printed: the doctor runs nothing on the machine but `--fix`.
    """

    verdict: CheckResult
    says: str
    next_step: str | None = None
    command: str | None = None


class Check(Struct, frozen=True):
    """A finding under the stable name of its check, `area.subject`."""

    name: str
    verdict: CheckResult
    says: str
    next_step: str | None = None
    command: str | None = None


# One constructor a verdict: `warn` and `bad` cannot be made without a next step.
def ok(says: str) -> Finding:
    return Finding(CheckResult.OK, says)


def warn(says: str, next_step: str, command: str | None = None) -> Finding:
    return Finding(CheckResult.WARN, says, next_step, command)


def bad(says: str, next_step: str, command: str | None = None) -> Finding:
    return Finding(CheckResult.BAD, says, next_step, command)


def unknown(says: str, next_step: str | None = None) -> Finding:
    return Finding(CheckResult.UNKNOWN, says, next_step)


def worst(checks: tuple[Check, ...]) -> CheckResult:
    """Return the most serious verdict; OK without checks."""
    found = {check.verdict for check in checks}
    return next((verdict for verdict in ORDER if verdict in found), CheckResult.OK)
