"""`edgellm top`: temperatures, power, load and tokens of a running edgellm, live."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from edge.cli.options import Json, StateDir, print_json

# The default of telemetry.interval_s: a faster screen would draw the same samples again.
REFRESH_S = 1.0
# Columns of a serial console, and of the screen that goes into a pipe.
_NARROWEST = 80


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm top")(top)


def top(
    state_dir: StateDir = None,
    once: Annotated[bool, typer.Option("--once", help="print one screen, as into a pipe, and exit")] = False,
    as_json: Json = False,
) -> None:
    """Watch temperatures, power, load and tokens of a running edgellm until q or Ctrl-C."""
    from edge.cli.client import Client, find

    client = Client(find(os.environ, state_dir))
    if as_json:
        print_json(client.telemetry())
    elif once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _print(client)
    else:
        _watch(client)


def _print(client: Any) -> None:
    from edge.cli.top_screen import Past, plain, screen

    past, telemetry = Past(), client.telemetry()
    past.add(telemetry)
    for line in plain(screen(client.status(), telemetry, past, _NARROWEST), _NARROWEST):
        typer.echo(line.rstrip())


def _watch(client: Any) -> None:
    """Draw each frame over the last one in the alternate screen: nothing is cleared, so nothing flickers."""
    from rich.live import Live

    from edge.cli.output import console
    from edge.cli.top_screen import Past, screen

    past = Past()
    with _keys() as pressed, Live(console=console(), screen=True, auto_refresh=False, transient=True) as live:
        while True:
            telemetry = client.telemetry()
            past.add(telemetry)
            width, height = live.console.size
            live.update(screen(client.status(), telemetry, past, width, height), refresh=True)
            if pressed(REFRESH_S) == "q":
                return


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits for a key without echo; the terminal is restored afterwards.

    The function raises OSError when the terminal went away.
    """
    import select
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)  # not raw: Ctrl-C stays a signal

    def pressed(within_s: float) -> str | None:
        ready, _, _ = select.select([stdin], [], [], within_s)
        key = os.read(stdin, 1) if ready else None
        if key == b"":
            # A hung-up terminal reads as ended at once, each time, and rich draws on no terminal: a busy loop.
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return key.decode(errors="replace") if key else None

    try:
        yield pressed
    finally:
        # EIO once the terminal is gone (its window closed, ssh ended); termios.error is no OSError.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
