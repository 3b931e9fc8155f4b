"""The documents of the control socket: the whole status, and log lines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge import __version__
from edge.coldstart import journal
from edge.control import LogQuestion
from edge.folders import Folders
from edge.gateway.health import healthz
from edge.prepare import Prepared
from edge.ring import Ring
from edge.service.unit import Unit
from edge.status import ModelStatus

SHOWN_CRASHES = 5


def overview(
    folders: Folders,
    prepared: Prepared | None,
    statuses: Iterable[ModelStatus],
    telemetry: Mapping[str, Any],
    urls: Sequence[str],
    began_s: float,
    unit: Unit | None,
) -> dict[str, Any]:
    """Return /healthz with the fields that only the owner may see: evidence, pids, folders.

    `unit`: the systemd unit that opened the sockets, None if started by hand.
    """
    known = list(statuses)
    document = healthz(known, telemetry, time.time() - time.monotonic())
    for status in known:
        model = document["models"][status.id]
        model["pid"] = status.pid
        if status.failure is not None:
            model["failure"]["evidence"] = status.failure.evidence
    return document | {
        "version": __version__,
        "urls": list(urls),
        "uptime_s": round(time.monotonic() - began_s, 1),
        "profile": prepared.profile.name if prepared else None,
        "engine": prepared.plan.engine.id if prepared else None,
        "service": unit.document() if unit else None,
        "crashes": [_shown(crash) for crash in journal.read(folders.crashes)[-SHOWN_CRASHES:]],
        "folders": {"state": str(folders.instance_state), "run": str(folders.instance_run)},
    }


def _shown(crash: Mapping[str, Any]) -> dict[str, Any]:
    """Return a crash without its evidence and argv, which crashes.jsonl holds too."""
    return {name: crash.get(name) for name in ("at", "model", "state", "rung", "kind", "hint")}


def log_lines(asked: LogQuestion, own: Ring, engines: Mapping[str, Ring]) -> dict[str, Any]:
    """Return the lines that the reader has not seen; `next` goes into its next `since`."""
    rings = {"": own}
    if asked.engine:
        rings = {name: ring for name, ring in engines.items() if asked.model in (None, name)}
    lines = [line for name, ring in rings.items() for line in ring.since(asked.since.get(name, 0))]
    return {"lines": lines, "next": {name: ring.count for name, ring in rings.items()}}
