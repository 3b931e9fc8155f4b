"""What a running edgellm tells over its control socket: the whole status, and log lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge import __version__
from edge.coldstart import journal
from edge.control import LogQuestion
from edge.gateway.health import healthz
from edge.handover import Launch
from edge.ring import Ring
from edge.service.unit import Unit
from edge.status import ModelStatus

SHOWN_CRASHES = 5


def overview(
    launch: Launch,
    statuses: Iterable[ModelStatus],
    telemetry: Mapping[str, Any],
    urls: Sequence[str],
    unit: Unit | None,
) -> dict[str, Any]:
    """/healthz with what only the owner may see: evidence, pids, folders."""
    known = list(statuses)
    document = healthz(known, telemetry, time.time() - time.monotonic())
    for status in known:
        model = document["models"][status.id]
        model["pid"] = status.pid
        if status.failure is not None:
            model["failure"]["evidence"] = status.failure.evidence
    prepared, folders = launch.prepared, launch.folders
    return document | {
        "version": __version__,
        "urls": list(urls),
        "uptime_s": round(time.monotonic() - launch.began_s, 1),
        "profile": prepared.profile.name if prepared else None,
        "engine": prepared.plan.engine.id if prepared else None,
        "service": unit.document() if unit and launch.inherited else None,
        "crashes": [_shown(crash) for crash in journal.read(folders.crashes)[-SHOWN_CRASHES:]],
        "folders": {"state": str(folders.instance_state), "run": str(folders.instance_run)},
    }


def _shown(crash: Mapping[str, Any]) -> dict[str, Any]:
    """crashes.jsonl holds the last lines too."""
    return {name: crash.get(name) for name in ("at", "model", "state", "rung", "kind", "hint")}


def log_lines(asked: LogQuestion, own: Ring, engines: Mapping[str, Ring]) -> dict[str, Any]:
    """`next` goes into the next question's `since`."""
    rings = {"": own}
    if asked.engine:
        rings = {name: ring for name, ring in engines.items() if asked.model in (None, name)}
    lines = [line for name, ring in rings.items() for line in ring.since(asked.since.get(name, 0))]
    return {"lines": lines, "next": {name: ring.count for name, ring in rings.items()}}
