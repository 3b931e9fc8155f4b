"""Where tables go. Colours and wrapping only on a terminal: a pipe gets whole lines."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPE_COLUMNS = 240


def console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
