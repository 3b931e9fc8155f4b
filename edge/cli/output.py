"""The consoles of tables on stdout and stderr, short numbers, blocks of notes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from edge.models.progress import Report
from edge.models.progress import TransferProgress as Step
from edge.units import format_bytes, printable

# A pipe has no width: wide enough that names are not cut.
_PIPE_COLUMNS = 200


class SafeConsole(Console):
    """A console that shows control characters of names and messages, and does not send them to the terminal."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        # rich's last step before the file: what is no control code of rich's own came in as text.
        safe = (each if each.control else Segment(printable(each.text, newlines=True), each.style) for each in buffer)
        return super()._render_buffer(safe)

    def on_broken_pipe(self) -> None:
        """Leave the exit code to `main`. rich would send stdout to /dev/null and exit with 1."""
        raise BrokenPipeError


class _Messages:
    """stderr whose loss ends no work: a terminal that is gone (EIO), a full disk. A closed pipe does, as in sh."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, step: Callable[[], object]) -> None:
        try:
            step()
        except BrokenPipeError:
            raise
        except OSError:
            return  # `main` flushes the stream at the end, and the exit code is 74 then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console() -> Console:
    """Return the console of stdout: colours and the width of a terminal; plain and wide in a pipe."""
    return SafeConsole(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def error_console() -> Console:
    """Return the console of stderr."""
    width = None if sys.stderr.isatty() else _PIPE_COLUMNS
    return SafeConsole(file=cast("TextIO", _Messages(sys.stderr)), highlight=False, markup=False, width=width)


def draw(
    out: Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    right: Container[str] = (),
    drop: Sequence[str] = (),
    **options: Any,
) -> None:
    """Print a table. On a narrow terminal the columns of `drop` go, first to last, until no name has to be cut."""
    kept = list(headers)
    # The last round, without a header to drop, lets long cells wrap: then nothing else is left.
    for name in [*drop, None]:
        table = Table(box=None, pad_edge=False, header_style="dim", **options)
        for header in kept:
            table.add_column(header, justify="right" if header in right else "left", no_wrap=name is not None)
        for row in rows:
            cells = [cell for cell, header in zip(row, headers, strict=True) if header in kept]
            table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in cells))
        wanted = out.measure(table, options=out.options.update(max_width=10_000)).maximum
        if name is None or wanted <= out.width:
            break
        kept.remove(name)
    for column in table.columns:
        column.overflow = "fold"
    out.print(table)


def warn(text: str) -> None:
    """Print a warning on stderr, which a pipe does not see."""
    error_console().print(Text.assemble(("warning: ", "yellow"), printable(text)))


def model_id(name: str, quant: str) -> Text:
    return Text.assemble((printable(name), "bold"), ":", (printable(quant), "green"))


def short(count: int) -> str:
    """Return 134515008 as `135 M`."""
    if count >= 10**9:
        return f"{count / 1e9:.3g} B"
    return f"{count / 1e6:.3g} M" if count >= 10**6 else f"{count:,}"


def context(count: int | None) -> str:
    """Return 8192 as `8k`."""
    if not count:
        return "?"
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def block(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a titled list of names and texts; nothing without rows."""
    if not rows:
        return
    out.print(f"\n{title}", style="dim")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(printable(name)), Text(printable(text)))
    out.print(table)


# Progress of transfers on stderr: bars on a terminal, a line each tenth in a pipe.


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
    # Without markup, as everywhere: the name of a file may be "a[link=https://…]b".
    name = TextColumn("{task.description}", markup=False)
    with Progress(name, BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn(), console=out) as bars:
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
