"""Progress of transfers on stderr: bars on a terminal, a line each tenth in a pipe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from edge.model.progress import Progress as Step
from edge.model.progress import Report
from edge.render.common import error_console
from edge.units import format_bytes


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Report | None]:
    """Yield the callback for pull, import, quantize and check; None when `quiet`."""
    if quiet:
        yield None
        return
    out = error_console()
    if not out.is_terminal:
        yield _lines(out)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out) as bars:
        yield _bars(bars)


def _bars(bars: Progress) -> Report:
    tasks: dict[tuple[str, int | None], TaskID] = {}

    def report(step: Step) -> None:
        if step.note:
            bars.console.print(step.note, markup=False)
        if step.phase == "choose":
            return
        key = (step.phase, step.total_bytes)
        if key not in tasks:
            tasks[key] = bars.add_task(step.phase, total=step.total_bytes)
        bars.update(tasks[key], completed=step.done_bytes, description=f"{step.phase} {step.what}")

    return report


def _lines(out: Console) -> Report:
    """Return a callback that prints the start of a phase, each further tenth, and notes."""
    shown: dict[str, int] = {}

    def report(step: Step) -> None:
        if step.note:
            out.print(step.note, markup=False)
        if step.phase == "choose":
            return
        tenth = step.done_bytes * 10 // step.total_bytes if step.total_bytes else 0
        if shown.get(step.phase, -1) >= tenth:
            return
        shown[step.phase] = tenth
        of = f" of {format_bytes(step.total_bytes)}" if step.total_bytes else ""
        rate = f", {format_bytes(int(step.rate_bytes_s))}/s" if step.rate_bytes_s else ""
        rest = f", {step.rest_s:.0f} s left" if step.rest_s and step.rest_s >= 1 else ""
        out.print(f"{step.phase} {step.what}: {format_bytes(step.done_bytes)}{of}{rate}{rest}", markup=False)

    return report
