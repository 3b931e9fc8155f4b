"""A running edgellm as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.units import format_seconds


def status_lines(document: Mapping[str, Any]) -> list[str]:
    """The document of the control socket: one block a model."""
    urls = ", ".join(f"{url}/v1" for url in document["urls"])
    lines = [
        f"edgellm {document['version']}: {document['status']}, up {format_seconds(document['uptime_s'])}",
        f"  {urls} · profile {document['profile']} · engine {document['engine']}",
    ]
    for model_id, model in document["models"].items():
        lines += ["", *_model(model_id, model)]
    return lines


def _model(model_id: str, model: Mapping[str, Any]) -> list[str]:
    pid = f" · pid {model['pid']}" if model.get("pid") else ""
    restarts = f" · {model['restarts']} restarts" if model.get("restarts") else ""
    lines = [f"{model_id}: {model['state']} on rung {model['rung']}{pid}{restarts}"]
    progress = model.get("progress")
    if model["state"] == "LOADING" and progress is not None:
        lines.append(f"  weights {progress:.0%}")
    for item in model["degraded"]:
        lines.append(f"  degraded: {item['subject']}: wanted {item['wanted']}, got {item['got']} ({item['because']})")
    for name, gate in model["gates"].items():
        lines.append(f"  {_gate(name, gate)}")
    failure = model.get("failure")
    if failure:
        lines.append(f"  last failure: {failure['kind']}")
        lines += [f"    | {line}" for line in failure.get("evidence", "").splitlines()]
        lines.append(f"    hint: {failure['hint']}")
    return lines


def _gate(name: str, gate: Mapping[str, Any]) -> str:
    took = format_seconds(gate["took_s"]) if gate.get("took_s") is not None else ""
    why = gate.get("evidence") or (f"waits for {gate['blocked_by']}" if gate.get("blocked_by") else "")
    return f"{'✓' if gate['ready'] else '·'} {name:<9} {took:>8}  {why}".rstrip()
