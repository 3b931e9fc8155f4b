"""Text of `edgellm status` and `edgellm reload`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from edge.units import format_seconds


def status_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the status document as lines: one block a model."""
    urls = ", ".join(f"{url}/v1" for url in document["urls"])
    lines = [
        f"edgellm {document['version']}: {document['status']}, up {format_seconds(document['uptime_s'])}",
        f"  {urls} · profile {document['profile']} · engine {document['engine']}",
    ]
    lines += [f"  warning: {warning}" for warning in (document.get("service") or {}).get("warnings", ())]
    heat = _heat(document.get("telemetry"))
    if heat:
        lines.append(f"  {heat}")
    for model_id, model in document["models"].items():
        lines += ["", *_model(model_id, model)]
    crashes = document.get("crashes") or []
    if crashes:
        lines += ["", "last crashes:", *(f"  {_crash(crash)}" for crash in crashes)]
    return lines


def _crash(crash: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(crash["at"] or 0).isoformat(sep=" ", timespec="seconds")
    return f"{at}  {crash['model']} in {crash['state']} on rung {crash['rung']}: {crash['kind']}"


def reload_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the result of a reload for each model."""
    outcome = {
        "kept": "unchanged",
        "added": "starting",
        "removed": "removed",
        "beside": "changed, without a pause",
        "after": "changed; requests waited meanwhile",
        "asleep": "changed; still asleep",
        "back": "could not be changed; the old engine continues",
    }
    lines = []
    for model_id, how in document["models"].items():
        lines.append(f"{model_id}: {outcome.get(how, how)}")
        failure = document["failures"].get(model_id)
        if failure:
            lines += [f"  {failure['kind']}", *(f"  | {line}" for line in failure["evidence"].splitlines())]
            lines.append(f"  hint: {failure['hint']}")
    if document["after_restart"]:
        later = ", ".join(document["after_restart"])
        lines.append(f"{later}: changed, but read only at start: stop edgellm and start it again")
    return lines or ["no model is served"]


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


def _heat(telemetry: Mapping[str, Any] | None) -> str:
    """Return `12.3 W (VDD_IN) · 61 °C · NOMINAL`; nothing without a sensor."""
    if not telemetry or (telemetry.get("power_w") is None and telemetry.get("temp_c") is None):
        return ""
    power = [f"{telemetry['power_w']:.1f} W ({telemetry['rail']})"] if telemetry.get("power_w") is not None else []
    heat = [f"{telemetry['temp_c']:.0f} °C"] if telemetry.get("temp_c") is not None else []
    return " · ".join([*power, *heat, f"thermal {telemetry['thermal']}"])


def _gate(name: str, gate: Mapping[str, Any]) -> str:
    took = format_seconds(gate["took_s"]) if gate.get("took_s") is not None else ""
    why = gate.get("evidence") or (f"waiting for {gate['blocked_by']}" if gate.get("blocked_by") else "")
    return f"{'✓' if gate['ready'] else '·'} {name:<9} {took:>8}  {why}".rstrip()
