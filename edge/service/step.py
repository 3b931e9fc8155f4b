"""The steps of an installation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One repeatable step, described by `what` in the imperative. A step with a `note` needs the user's consent."""

    what: str
    apply: Callable[[], object]
    done: bool = False
    note: str = ""


def nothing() -> None:
    """Do nothing, for a step that is done already."""


def apply_all(steps: Iterable[Step], report: Callable[[Step], None] = lambda _: None) -> int:
    """Apply the steps that are not done and return their number. After an error the next run continues there."""
    count = 0
    for step in steps:
        if not step.done:
            report(step)
            step.apply()
            count += 1
    return count
