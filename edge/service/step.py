"""One thing that an installation does. Values, and the order in which they are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """`what` says it in the imperative; `done`: it is so already, nothing will be touched."""

    what: str
    apply: Callable[[], object]
    done: bool = False
    note: str = ""


def nothing() -> None:
    """It is so already."""


def apply_all(steps: Iterable[Step], tell: Callable[[Step], None] = lambda _: None) -> int:
    """Does what is not done, in order. → how many. A step that raises ends it; the next run goes on from there."""
    count = 0
    for step in steps:
        if not step.done:
            tell(step)
            step.apply()
            count += 1
    return count
