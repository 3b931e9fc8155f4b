"""`edgellm ps`, `load` and `unload`: which models hold memory, and changing that by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from edge.cli.complete import served_models
from edge.cli.options import Json, StateDir, client_of, print_lines, print_result
from edge.units import format_bytes, format_seconds

ModelId = Annotated[str, typer.Argument(metavar="ID", help="id or alias of a model", autocompletion=served_models)]
_FIELDS = (
    *("state", "memory_bytes", "open_requests", "tokens_per_s"),
    *("idle_s", "ttl_left_s", "priority", "pin", "last_load_s"),
)
# States in which a child exists or is about to: the others hold no memory, except SLEEPING with a process.
_RESIDENT = ("STARTING", "LOADING", "WARMING", "READY", "DRAINING", "STOPPING", "BACKOFF")


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm ps --json")(ps)
    root.command(epilog="Example: edgellm load embed")(load)
    root.command(epilog="Example: edgellm unload chat")(unload)


def ps(state_dir: StateDir = None, as_json: Json = False) -> None:
    """List the models of a running edgellm: state, memory, open requests, speed, and when each goes to sleep."""
    models: dict[str, dict[str, Any]] = client_of(state_dir).status()["models"]
    rows = {name: {field: model.get(field) for field in _FIELDS} for name, model in models.items()}
    print_result(as_json, {"schema": 1, "models": rows}, ps_lines(models))


def load(model: ModelId, state_dir: StateDir = None) -> None:
    """Start a model as its first request would, and wait until it serves. Idle models may go to sleep for it."""
    print_lines([f"{client_of(state_dir).load(model)} is READY"])


def unload(model: ModelId, state_dir: StateDir = None) -> None:
    """Put a model to sleep after its open requests, which frees its memory. Its next request starts it again."""
    client_of(state_dir).unload(model)
    typer.echo(f"{model} goes to sleep after its open requests")


def ps_lines(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table as lines of at most 80 columns for ids of up to 20 characters. Unknown values are shown as -."""
    width = max([5, *map(len, models)])
    lines = [
        f"{'MODEL':<{width}}  {'STATE':<9}  {'MEMORY':>9}  {'OPEN':>4}  {'TOK/S':>6}  {'IDLE':>9}  {'SLEEPS IN':>9}"
    ]
    for name, model in models.items():
        # An engine that sleeps by itself keeps some memory.
        resident = model["state"] in _RESIDENT or (model["state"] == "SLEEPING" and model.get("pid") is not None)
        memory = sum((model.get("memory_bytes") or {}).values())
        held = format_bytes(memory) if resident and memory else "-"
        opened, speed = model.get("open_requests"), model.get("tokens_per_s")
        sleeps = "pinned" if model.get("pin") else _span(model.get("ttl_left_s"))
        lines.append(
            f"{name:<{width}}  {model['state']:<9}  {held:>9}  {'-' if opened is None else opened:>4}"
            f"  {'-' if speed is None else f'{speed:.1f}':>6}  {_span(model.get('idle_s')):>9}  {sleeps:>9}"
        )
    return lines


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
