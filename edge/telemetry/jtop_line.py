"""Parse the JSON lines of jtop_reader.py and explain its errors. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edge.board.board import PowerMode
from edge.telemetry.sample import Fan, GpuProcess, GpuState, PowerState, Rail, Sample, Zone, celsius
from edge.telemetry.sensors import SUM, SUM_NOTE

SCHEMA = 1
IDLE_INTERVAL_S, WATCHED_INTERVAL_S = 5.0, 1.0  # between samples: without a client that shows them, and with one
_VERSIONS = re.compile(r"service: \[([^\]]+)\] and client: \[([^\]]+)\]")


class JtopFault(Struct, frozen=True):
    """Why jtop gives no values now. `kind` is a stable word; `hint` is one next step."""

    kind: str
    because: str
    hint: str | None = None


_HINTS = {
    "not_installed": ("jetson-stats is not installed", "sudo pip3 install jetson-stats, then log in again"),
    "no_socket": ("the jtop service is not running", "sudo systemctl restart jtop.service"),
    "not_active": ("the jtop service is not running", "sudo systemctl restart jtop.service"),
    "socket_is_directory": (
        "/run/jtop.sock is a folder: a container mounted it before the service was there",
        "remove the container and the folder, start jtop.service, then the container",
    ),
    "no_access": (
        "this user may not use /run/jtop.sock",
        "sudo usermod -aG jtop USER and log in again; as a service, install edgellm-jtop.service",
    ),
    "version_mismatch": ("client and service are different versions", "install one jetson-stats for both"),
    "python_mismatch": ("client and service run different Pythons", "run edgellm's reader with the service's Python"),
    "authentication": ("the jtop service refused the client", "install one jetson-stats for both"),
    "frozen": ("the jtop service does not answer", "sudo systemctl restart jtop.service"),
    "lost": ("the jtop service went away", "systemctl status jtop.service; a drop-in with Restart=always keeps it up"),
    "failed": ("reading jtop failed", "systemctl status jtop.service"),
}


def jtop_fault(kind: str, message: str = "") -> JtopFault:
    """Explain an error of the reader; `message` is that of jtop's own exception."""
    because, hint = _HINTS.get(kind, _HINTS["failed"])
    versions = _VERSIONS.search(message)
    if kind == "version_mismatch" and versions:
        because = f"version mismatch: service {versions[1]}, client {versions[2]}"
    elif kind == "failed" and message:
        because = f"{because}: {message[:200]}"
    return JtopFault(kind, because, hint)


def parse(line: bytes, now: float) -> Sample | JtopFault | None:
    """Parse one line; None if it is not a reader's line of this schema."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or row.get("schema") != SCHEMA:
            return None
        if row.get("event") == "error":
            fault = jtop_fault(str(row.get("kind")), str(row.get("message", "")))
            return replace(fault, because=str(row.get("because", fault.because)))
        return sample_of(row, now) if row.get("event") == "sample" else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def error_line(now: JtopFault) -> bytes:
    """Build an error line as the reader writes it, with our explanation added."""
    row = {"schema": SCHEMA, "event": "error", "kind": now.kind, "because": now.because}
    return json.dumps(row).encode() + b"\n"


def interval_of(line: bytes) -> float | None:
    """Return the interval that a sample line reports, in seconds."""
    try:
        return float(json.loads(line)["interval_s"])
    except (ValueError, TypeError, KeyError):
        return None


def sample_of(row: dict[str, Any], now: float) -> Sample:
    """Build a sample. Raises ValueError, TypeError or KeyError for a row of another shape."""
    power, mode, fan = row.get("power"), row.get("power_mode"), row.get("fan")
    temps = [(name, celsius(float(value))) for name, value in row.get("temps_c", {}).items()]
    return Sample(
        at_s=min(now, float(row["at_s"])),
        source="jtop",
        power=None if power is None else _power(power),
        rails=tuple(
            Rail(r["name"], r["power_w"], r.get("voltage_v"), r.get("current_a")) for r in row.get("rails", ())
        ),
        zones=tuple(Zone(name, temp) for name, temp in temps if temp is not None),
        gpus=tuple(GpuState(**{key: g[key] for key in _GPU_KEYS if key in g}) for g in row.get("gpus", ())),
        gpu_processes=tuple(
            GpuProcess(p["pid"], p["name"], p.get("gpu_memory_bytes")) for p in row.get("processes", ())
        ),
        gpu_used_bytes=row.get("gpu_used_bytes"),
        emc_load_ratio=row.get("emc_load_ratio"),
        emc_clock_hz=row.get("emc_clock_hz"),
        fan=None if fan is None else Fan(fan.get("speed_ratio"), fan.get("rpm")),
        power_mode=None if mode is None else PowerMode(int(mode["id"]), str(mode["name"])),
        jetson_clocks=row.get("jetson_clocks"),
    )


_GPU_KEYS = (
    "name",
    "load_ratio",
    "clock_hz",
    "max_clock_hz",
    "temp_c",
    "power_w",
    "memory_used_bytes",
    "memory_total_bytes",
)


def _power(row: dict[str, Any]) -> PowerState:
    rail = str(row["rail"])
    return PowerState(float(row["power_w"]), rail, tuple(row.get("parts", ())), SUM_NOTE if rail == SUM else None)
