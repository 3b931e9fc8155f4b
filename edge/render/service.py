"""Text of `edgellm service`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.text import Text

from edge.render.common import console, error_console
from edge.service.differ import Difference
from edge.service.step import Step

KINDS = {
    "missing": "is missing",
    "changed": "was changed",
    "stale": "is no longer part of the service",
    "yours": "is the administrator's and stays",
}


def show_steps(steps: Sequence[Step]) -> None:
    out = console()
    for step in steps:
        line = Text("✓ " if step.done else "+ ", style="dim" if step.done else "bold green")
        line.append(step.what, style="" if step.done else "not bold default")
        line.append(f"  ({step.note})" if step.note else "", style="yellow")
        out.print(line, soft_wrap=True)


def show_steps_json(steps: Sequence[Step]) -> None:
    rows = [{"step": step.what, "done": step.done, "note": step.note} for step in steps]
    print(json.dumps({"schema": 1, "steps": rows}, indent=2))


def show_doing(step: Step) -> None:
    error_console().print(Text(f"  {step.what} ...", style="dim"), soft_wrap=True)


def show_differences(differences: Iterable[Difference]) -> None:
    out = console()
    for one in differences:
        head = Text(f"{one.path} {KINDS[one.kind]}", style="bold" if one.kind != "yours" else "")
        out.print(head, soft_wrap=True)
        for line in one.lines:
            style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
            out.print(Text(f"  {line}", style=style), soft_wrap=True)
        for warning in one.warnings:
            out.print(Text(f"  warning: {warning}", style="yellow"), soft_wrap=True)


def show_differences_json(differences: Iterable[Difference]) -> None:
    rows = [
        {"path": str(one.path), "kind": one.kind, "diff": list(one.lines), "warnings": list(one.warnings)}
        for one in differences
    ]
    print(json.dumps({"schema": 1, "differences": rows}, indent=2))
