"""Render the probes' documents from the supervisor's status. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edge.supervisor.status import Failure, Gate, ModelStatus, State

DEGRADED = "Edgellm-Degraded"  # header of an answer whose model serves less than planned


def serves(status: ModelStatus, strict: bool) -> bool:
    """Return whether the model serves: ready, or asleep since it wakes for a request; degraded unless `strict`."""
    return _is_up(status) and not (strict and status.degraded)


def _is_up(status: ModelStatus) -> bool:
    """Return whether a request is answered now or wakes the model. One that sleeps on a hot board has a failure."""
    return status.state is State.READY or (status.state is State.SLEEPING and status.failure is None)


def is_unloaded(status: ModelStatus) -> bool:
    """Return whether the model was stopped on purpose. One that was stopped for heat has a failure."""
    return status.state is State.STOPPED and status.failure is None


def overall(statuses: Iterable[ModelStatus]) -> str:
    """Return starting | ok | degraded | failed, the worst of all models."""
    known = list(statuses)
    if any(status.state is State.FAILED for status in known):
        return "failed"
    if not known or any(not _is_up(status) and not is_unloaded(status) for status in known):
        return "starting"
    return "degraded" if any(status.degraded for status in known) else "ok"


def healthz(
    statuses: Iterable[ModelStatus],
    telemetry: Mapping[str, Any] | None,
    clock_offset_s: float,
    fault: Failure | None = None,
    admin: bool = False,
) -> dict[str, Any]:
    """Return the document of /healthz.

    `clock_offset_s`: wall clock minus monotonic clock, since gates carry wall-clock times. `admin`: include the
    evidence of failures, which holds log lines and paths.
    """
    known = list(statuses)
    document: dict[str, Any] = {
        "schema": 1,
        "status": "failed" if fault else overall(known),
        "models": {status.id: _model(status, clock_offset_s, admin) for status in known},
        "telemetry": telemetry,
    }
    if fault is not None:
        document["failure"] = _failure(fault, admin)
    return document


def degraded_header(status: ModelStatus) -> str:
    """Return `n_ctx: 4096 instead of 8192` as a header's value: one line of printable ASCII."""
    # A header takes neither line ends nor characters beyond Latin-1.
    text = "; ".join(f"{item.subject}: {item.got} instead of {item.wanted}" for item in status.degraded)
    return text.encode("ascii", "replace").decode().replace("\r", " ").replace("\n", " ")[:1000]


def readyz(status: ModelStatus, strict: bool) -> dict[str, Any]:
    return {
        "schema": 1,
        "model": status.id,
        "ready": serves(status, strict),
        "state": status.state.value,
        "progress": status.progress,
        "blocked_by": blocked_by(status),
        "failure": _failure(status.failure, False),
    }


def blocked_by(status: ModelStatus) -> str | None:
    """Return the gate that holds the start up: the closed one that others wait for.

    Of a start that failed the gates before it are closed as well, since their process is gone; none waits for those.
    """
    closed = {name: gate for name, gate in status.gates.items() if not gate.ready}
    if "driver" in closed or not closed:
        return next(iter(closed), None)
    named = next((gate.blocked_by for gate in closed.values() if gate.blocked_by in closed), None)
    return named or list(closed)[-1]


def _model(status: ModelStatus, clock_offset_s: float, admin: bool) -> dict[str, Any]:
    return {
        "state": status.state.value,
        "rung": status.rung,
        "degraded": [
            {"subject": item.subject, "wanted": item.wanted, "got": item.got, "because": item.because}
            for item in status.degraded
        ],
        "gates": {name: _gate(gate, clock_offset_s) for name, gate in status.gates.items()},
        "progress": status.progress,
        "restarts": status.restarts,
        "failure": _failure(status.failure, admin),
    }


def _gate(gate: Gate, clock_offset_s: float) -> dict[str, Any]:
    document: dict[str, Any] = {
        "ready": gate.ready,
        "since": None if gate.since_s is None else round(gate.since_s + clock_offset_s, 3),
        "took_s": gate.took_s,
        "evidence": gate.evidence,
        "blocked_by": gate.blocked_by,
    }
    if gate.devices:
        document["devices"] = {name: _gate(device, clock_offset_s) for name, device in gate.devices.items()}
    return document


def _failure(failure: Failure | None, admin: bool) -> dict[str, str] | None:
    """Return kind and hint, with the evidence for an admin key only."""
    if failure is None:
        return None
    public = {"kind": failure.kind, "hint": failure.hint}
    # Evidence holds log lines and paths, and a log line may quote a prompt.
    return {**public, "evidence": failure.evidence} if admin else public
