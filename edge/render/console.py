"""Where tables go. Colours and wrapping are for terminals: a pipe gets whole lines."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    return Console(highlight=False)
