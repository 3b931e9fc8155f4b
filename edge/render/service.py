"""Tables of `edgellm service`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from edge.service.differ import Difference
from edge.service.step import Step

KINDS = {
    "missing": "is not there",
    "changed": "was changed",
    "stale": "is no longer part of it",
    "yours": "is yours and stays",
}


def show_steps(steps: Sequence[Step]) -> None:
    console = Console()
    for step in steps:
        line = Text("✓ " if step.done else "+ ", style="dim" if step.done else "bold green")
        line.append(step.what, style="" if step.done else "not bold default")
        line.append(f"  ({step.note})" if step.note else "", style="yellow")
        console.print(line, soft_wrap=True)


def show_steps_json(steps: Sequence[Step]) -> None:
    rows = [{"step": step.what, "done": step.done, "note": step.note} for step in steps]
    print(json.dumps({"schema": 1, "steps": rows}, indent=2))


def show_doing(step: Step) -> None:
    Console(stderr=True).print(Text(f"  {step.what} ...", style="dim"), soft_wrap=True)


def show_differences(differences: Iterable[Difference]) -> None:
    console = Console()
    for one in differences:
        head = Text(f"{one.path} {KINDS[one.kind]}", style="bold" if one.kind != "yours" else "")
        console.print(head, soft_wrap=True)
        for line in one.lines:
            style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
            console.print(Text(f"  {line}", style=style), soft_wrap=True)
        for warning in one.warnings:
            console.print(Text(f"  warning: {warning}", style="yellow"), soft_wrap=True)


def show_differences_json(differences: Iterable[Difference]) -> None:
    rows = [
        {"path": str(one.path), "kind": one.kind, "diff": list(one.lines), "warnings": list(one.warnings)}
        for one in differences
    ]
    print(json.dumps({"schema": 1, "differences": rows}, indent=2))
