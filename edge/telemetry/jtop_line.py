"""Parse the JSON lines of jtop_reader.py and explain its errors. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace

from edge.board.board import PowerMode
from edge.telemetry.sample import Fan, GpuProcess, GpuState, PowerState, Rail, Sample, Zone, celsius, plausible
from edge.telemetry.sensors import SUM, SUM_NOTE
from edge.telemetry.sensors import total as total_of

SCHEMA = 1  # of the lines; as in jtop_reader.py, which imports nothing of ours
IDLE_INTERVAL_S, WATCHED_INTERVAL_S = 5.0, 1.0  # between samples: without a client that shows them, and with one
_LONGEST_INTERVAL_S = 60.0  # the reader allows 10; a longer one would let a dead source look fresh
_LARGEST = 1e15  # no value of a sensor; what a float holds exactly
_MOST_BECAUSE = 300  # characters; the reader's own are shorter
_MOST_NOTES = 8  # one for each property of the client
# The message of jetson-stats 4.2.1 to 7.2.2 for FC-65.
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


def parse(line: bytes, now: float, total: Sequence[Sequence[str]] = ()) -> Sample | JtopFault | None:
    """Parse one line; None if it is no reader's line of this schema. `total`: rails that make up the board's power."""
    try:
        row = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        if b"\\ud" in line.lower() or not line.isascii():  # a lone surrogate, which no document of ours could hold
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
        if not isinstance(row, dict) or row.get("schema") != SCHEMA:
            return None
        if row.get("event") == "error":
            fault = jtop_fault(str(row.get("kind")), str(row.get("message", "")))
            return replace(fault, because=str(row.get("because", fault.because))[:_MOST_BECAUSE])
        return plausible(sample_of(row, now, total)) if row.get("event") == "sample" else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _no_number(_: str) -> None:
    """Read NaN and Infinity, which are no JSON, as null."""


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def error_line(now: JtopFault) -> bytes:
    """Build an error line as the reader writes it, with our explanation added."""
    row = {"schema": SCHEMA, "event": "error", "kind": now.kind, "because": now.because}
    return json.dumps(row).encode() + b"\n"


def interval_of(line: bytes) -> float | None:
    """Return the interval that a sample line reports, in seconds."""
    try:
        interval_s = float(json.loads(line)["interval_s"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return interval_s if 0 < interval_s <= _LONGEST_INTERVAL_S else None


def sample_of(row: dict[str, Any], now: float, total: Sequence[Sequence[str]] = ()) -> Sample:
    """Build a sample. A field of another shape is absent. Raises TypeError or KeyError without an instant."""
    mode, fan, power, odd = (row.get(name) for name in ("power_mode", "fan", "power", "odd"))
    temps = row.get("temps_c")
    zones = temps.items() if isinstance(temps, dict) else ()
    known = [(str(name), celsius(float(value))) for name, value in zones if _is_number(value)]
    rails = tuple(_rows(Rail, row.get("rails")))
    return Sample(
        at_s=_instant(row["at_s"], now),
        source="jtop",
        power=_power(power, rails, total) if isinstance(power, dict) else None,
        rails=rails,
        zones=tuple(Zone(name, temp) for name, temp in known if temp is not None),
        gpus=tuple(_rows(GpuState, row.get("gpus"))),
        gpu_processes=tuple(_rows(GpuProcess, row.get("processes"))),
        gpu_used_bytes=_number(row, "gpu_used_bytes", int),
        emc_load_ratio=_number(row, "emc_load_ratio"),
        emc_clock_hz=_number(row, "emc_clock_hz"),
        fan=Fan(_number(fan, "speed_ratio"), _number(fan, "rpm", int)) if isinstance(fan, dict) else None,
        power_mode=next(iter(_rows(PowerMode, [mode])), None),
        jetson_clocks=row["jetson_clocks"] if isinstance(row.get("jetson_clocks"), bool) else None,
        notes=tuple(f"jtop: {str(text)[:200]}" for text in odd[:_MOST_NOTES]) if isinstance(odd, list) else (),
    )


def _instant(value: Any, now: float) -> float:
    """Return when it was measured. Raises TypeError for what is no number: `"-inf"` would be an age without end."""
    if not _is_number(value):
        raise TypeError(f"no instant: {value!r:.40}")
    return min(now, float(value))


_Row = TypeVar("_Row", bound=Struct)


def _rows(kind: type[_Row], rows: Any) -> Iterator[_Row]:
    """Yield the rows that have the fields that `kind` needs; other fields of a wrong type are left out."""
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict):
            continue
        fields = {key: value for key, value in row.items() if key in kind.__struct_fields__}
        for name in [name for name, value in fields.items() if value is None or not _fits(kind, name, value)]:
            del fields[name]
        with suppress(ValidationError):
            yield convert(fields, kind, strict=False)


def _fits(kind: type[Struct], name: str, value: Any) -> bool:
    """Return whether one value has the type of its field."""
    try:
        convert(value, _hints(kind)[name], strict=True)
    except ValidationError:
        return False
    return not isinstance(value, (int, float)) or abs(value) <= _LARGEST


@lru_cache(maxsize=8)
def _hints(kind: type[Struct]) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _number(row: dict[str, Any], name: str, kind: type[Any] = float) -> Any:
    """Return a field as a number, None if it is none."""
    value = row.get(name)
    return kind(value) if _is_number(value) else None


def _power(row: dict[str, Any], rails: Sequence[Rail], alternatives: Sequence[Sequence[str]]) -> PowerState | None:
    """Return the total: the rail that jtop names, or a sum of rails that are the whole of this board."""
    rail, watts = row.get("rail"), _number(row, "power_w")
    if watts is None or not isinstance(rail, str):
        return None
    if rail != SUM:
        return PowerState(watts, rail, (rail,))
    if alternatives:
        return total_of(rails, alternatives)
    return PowerState(watts, rail, tuple(map(str, row.get("parts") or ())), SUM_NOTE)
