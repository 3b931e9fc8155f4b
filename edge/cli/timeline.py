"""`edgellm timeline`: how long each stage of a start took."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from edge.cli.options import Json, StateDir, print_lines, print_result
from edge.errors import UnavailableError, UsageError
from edge.linux.files import write_report
from edge.units import format_bytes, format_seconds


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm timeline --compare 1 2")(timeline)


def timeline(
    state_dir: StateDir = None,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="the last N starts")] = 1,
    compare: Annotated[
        tuple[int, int] | None, typer.Option("--compare", metavar="A B", help="two starts, side by side; 1 is the last")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="write Chrome's trace format")] = None,
    as_json: Json = False,
) -> None:
    """Show the last start as a waterfall: how long each stage took, and how many bytes it read."""
    from edge.cli.client import find
    from edge.plan.start_records import read

    records = [record for record in read(find(os.environ, state_dir, running=False).starts) if is_whole(record)]
    if not records:
        raise UnavailableError("no start is recorded yet", "start one: `edgellm up`")
    if compare is not None:
        if max(compare) > len(records) or min(compare) < 1:
            raise UsageError(f"{len(records)} starts are recorded", "1 is the last, 2 the one before")
        print_lines(comparison(records[-compare[0]], records[-compare[1]]))
        return
    if trace is not None:
        write_report(trace, json.dumps(chrome_trace(records[-1])))
        typer.echo(f"wrote {trace}: open it in https://ui.perfetto.dev or chrome://tracing")
        return
    chosen = records[-last:]
    lines = (line for record in chosen for line in ("", *waterfall(record)))
    print_result(as_json, {"schema": 1, "starts": chosen}, lines)


# Text of `edgellm timeline`: a start record as a waterfall.

# Name, time, bar and bytes make a line of 80 columns.
BAR_CELLS = 44
_TRACK = {"pid": 1, "tid": 1}  # of the trace
AT_BOOT_S = 600.0  # a start later than this after the kernel's is no part of a boot


def is_whole(record: Mapping[str, Any]) -> bool:
    """Return whether every view can show the record: a full disk or another version may have left a part of one."""
    try:
        waterfall(record), chrome_trace(record), comparison(record, record)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return False
    return True


def waterfall(record: Mapping[str, Any]) -> list[str]:
    """Return one line a span, ordered by start; spans of the engine are indented. Then the instants, and the limit."""
    spans = sorted(record["spans"], key=lambda span: (span["start_s"], -span["end_s"]))
    total_s = max([span["end_s"] for span in spans], default=0.0) or 1.0
    resident = record["cache_state"]["resident_ratio"]
    mode = record["cache_state"].get("load_mode")
    cached = "" if resident is None else f", {resident:.0%} of the model was in the page cache"
    cached += f", read with {mode}" if mode else ""
    lines = [f"{record['model']}: {record['outcome']} on rung {record['rung']}, engine {record['engine']}{cached}"]
    for span in spans:
        lines.append(_line(span, total_s))
    for label, at_s in instants(record):
        lines.append(f"  {label:<16} {format_seconds(at_s):>8}")
    return [*lines, *_since_boot(record), *_limit(record)]


def instants(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the moments of a start in their order, in seconds since the process began: six gates and readiness."""
    found = [(f"gate {name}", at_s) for name, at_s in record.get("gates", {}).items()]
    for name in ("engine_ready", "first_token", "READY"):
        at_s = record.get(f"{name.lower()}_s")
        if at_s is not None:
            found.append((name.replace("_", " "), at_s))
    return sorted(found, key=lambda each: each[1])


def _since_boot(record: Mapping[str, Any]) -> list[str]:
    """Return when the kernel, systemd and the process began, for a start that belongs to a boot of the machine."""
    boot = record.get("boot", {})
    process_s, service_s = boot.get("process_s"), boot.get("service_s")
    if process_s is None or process_s > AT_BOOT_S:
        return []
    service = "" if service_s is None else f"the service at {format_seconds(service_s)}, "
    ready_s = record.get("ready_s")
    ready = "" if ready_s is None else f", READY at {format_seconds(process_s + ready_s)}"
    return [f"  since the kernel started: {service}the process at {format_seconds(process_s)}{ready}"]


def _limit(record: Mapping[str, Any]) -> list[str]:
    """Return how long the engine needs at least, from this disk, and how far this start was from it."""
    limit = record["limit"]
    if limit.get("distance") is None:
        return []
    rate = f"{format_bytes(limit['bytes'])} at {format_bytes(limit['rate'])}/s ({limit['streams']} direct streams)"
    what = f"{rate} + {format_seconds(limit['fixed_s'])} of the engine's own"
    took = f"this start took {limit['distance']:.2f} times that"
    return [f"  {'limit':<16} {format_seconds(limit['total_s']):>8}  {what}; {took}"]


def comparison(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return two starts side by side: the duration of each span, and the difference."""
    first = {span["name"]: span["end_s"] - span["start_s"] for span in one["spans"]}
    second = {span["name"]: span["end_s"] - span["start_s"] for span in other["spans"]}
    lines = [f"  {'':<16} {'A':>9} {'B':>9} {'B - A':>9}"]
    for name in list(dict.fromkeys([*first, *second])):
        a, b = first.get(name), second.get(name)
        difference = f"{(b - a) * 1000:+.0f} ms" if a is not None and b is not None else ""
        lines.append(f"  {name:<16} {_took(a):>9} {_took(b):>9} {difference:>9}")
    ready = [record.get("ready_s") for record in (one, other)]
    lines.append(f"  {'READY':<16} {_took(ready[0]):>9} {_took(ready[1]):>9}")
    return lines


def chrome_trace(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return Chrome's trace event format (chrome://tracing, Perfetto): complete events, microseconds.

    A start that belongs to a boot begins with the kernel's start, any other with the process.
    """
    boot = record.get("boot", {})
    zero_s = boot.get("process_s") or 0.0
    zero_s = zero_s if zero_s <= AT_BOOT_S else 0.0
    service_s = boot.get("service_s") if zero_s else None
    before = [("boot", 0.0, service_s or zero_s), *([("service", service_s, zero_s)] if service_s else [])]
    events: list[dict[str, Any]] = [
        {"name": name, "cat": "boot", "ph": "X", "ts": round(at_s * 1e6), "dur": round((end_s - at_s) * 1e6), **_TRACK}
        for name, at_s, end_s in before
        if zero_s
    ]
    events += [
        {
            "name": span["name"],
            "cat": span["source"],
            "ph": "X",
            "ts": round((zero_s + span["start_s"]) * 1e6),
            "dur": round((span["end_s"] - span["start_s"]) * 1e6),
            "pid": 1,
            # Two tracks: complete events of one track must nest, and the engine runs beside the launcher.
            "tid": 2 if span["parent"] else 1,
        }
        for span in record["spans"]
    ]
    counters = ("power (W)", "memory (bytes)", "temperature (°C)")
    for at_s, *values in record.get("samples", ()):
        counter = {"ph": "C", "ts": round((zero_s + at_s) * 1e6), "pid": 1}
        for name, value in zip(counters, values, strict=False):
            if value is not None:
                events.append(counter | {"name": name, "args": {"value": value}})
    for name, at_s in instants(record):
        events.append({"name": name, "ph": "i", "s": "g", "ts": round((zero_s + at_s) * 1e6), **_TRACK})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _line(span: Mapping[str, Any], total_s: float) -> str:
    begin = int(span["start_s"] / total_s * BAR_CELLS)
    # At least one cell: a stage of a millisecond is there, and would vanish.
    cells = max(1, round((span["end_s"] - span["start_s"]) / total_s * BAR_CELLS))
    bar = (" " * begin + "█" * cells)[:BAR_CELLS].ljust(BAR_CELLS)
    name = ("  " if span["parent"] else "") + span["name"]
    took_s = span["end_s"] - span["start_s"]
    size = f"  {format_bytes(span['bytes'])}" if span["bytes"] else ""
    rate = f" at {format_bytes(int(span['bytes'] / took_s))}/s" if span["bytes"] and took_s > 0 else ""
    return f"  {name:<16} {format_seconds(took_s):>8} |{bar}|{size}{rate}".rstrip()


def _took(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
