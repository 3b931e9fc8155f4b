"""`edgellm timeline`: how long each stage of a start took."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Json, StateDir, print_json
from edge.errors import UnavailableError, UsageError


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm timeline --compare 1 2")(timeline)


def timeline(
    state_dir: StateDir = None,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="the last N starts")] = 1,
    compare: Annotated[
        tuple[int, int] | None, typer.Option("--compare", metavar="A B", help="two starts, side by side; 1 is the last")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="write Chrome's trace format")] = None,
    as_json: Json = False,
) -> None:
    """Show the last start as a waterfall: how long each stage took, and how many bytes it read."""
    from edge.client import find
    from edge.coldstart.journal import read
    from edge.render import timeline as drawing

    records = read(find(os.environ, state_dir).starts)
    if not records:
        raise UnavailableError("no start is recorded yet", "start one: `edgellm up`")
    if compare is not None:
        if max(compare) > len(records) or min(compare) < 1:
            raise UsageError(f"{len(records)} starts are recorded", "1 is the last, 2 the one before")
        typer.echo("\n".join(drawing.comparison(records[-compare[0]], records[-compare[1]])))
        return
    if trace is not None:
        trace.write_text(json.dumps(drawing.trace(records[-1])), encoding="utf-8")
        typer.echo(f"wrote {trace}: open it in https://ui.perfetto.dev or chrome://tracing")
        return
    chosen = records[-last:]
    if as_json:
        print_json({"schema": 1, "starts": chosen})
        return
    typer.echo("\n\n".join("\n".join(drawing.waterfall(record)) for record in chosen))
