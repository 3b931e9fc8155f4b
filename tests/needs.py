"""What a test needs of the machine: where it is missing the test is skipped, and fails under CI, which has it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import NoReturn

import pytest


def lacks(reason: str) -> NoReturn:
    """Fail under CI (the variable CI is set), which has all that is asked for through this; elsewhere skip.

    What CI need not have (a memory cgroup, gdb, another Python) is a plain `pytest.skip`: the end of a run lists it.
    """
    if os.environ.get("CI"):
        pytest.fail(f"CI lacks what it needs: {reason}")
    pytest.skip(reason)


def compiler(purpose: str) -> str:
    """Return the C compiler; `purpose`: what cannot be made without one."""
    found = shutil.which("cc") or shutil.which("gcc")
    return found or lacks(f"no C compiler: {purpose}")


def list_skipped(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason why tests did not run, with their number: `-q` shows an s and no reason."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        if isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("not run on this machine")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count:4d} × {reason}")
