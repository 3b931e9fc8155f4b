"""Text of `edgellm timeline`: a start record as a waterfall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.units import format_bytes, format_seconds

BAR_CELLS = 44


def waterfall(record: Mapping[str, Any]) -> list[str]:
    """Return one line a span, ordered by start; spans of the engine are indented."""
    spans = sorted(record["spans"], key=lambda span: (span["start_s"], -span["end_s"]))
    total_s = max([span["end_s"] for span in spans], default=0.0) or 1.0
    resident = record["cache_state"]["resident_ratio"]
    cached = "" if resident is None else f", {resident:.0%} of the model was in the page cache"
    lines = [f"{record['model']}: {record['outcome']} on rung {record['rung']}, engine {record['engine']}{cached}"]
    for span in spans:
        lines.append(_line(span, total_s))
    for name, label in (("engine_ready_s", "engine ready"), ("ready_s", "READY")):
        if record.get(name) is not None:
            lines.append(f"  {label:<16} {format_seconds(record[name]):>8}")
    return lines


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


def trace(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return Chrome's trace event format (chrome://tracing, Perfetto): complete events, microseconds."""
    events = [
        {
            "name": span["name"],
            "cat": span["source"],
            "ph": "X",
            "ts": round(span["start_s"] * 1e6),
            "dur": round((span["end_s"] - span["start_s"]) * 1e6),
            "pid": 1,
            "tid": 2 if span["parent"] else 1,
        }
        for span in record["spans"]
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _line(span: Mapping[str, Any], total_s: float) -> str:
    begin = int(span["start_s"] / total_s * BAR_CELLS)
    cells = max(1, round((span["end_s"] - span["start_s"]) / total_s * BAR_CELLS))
    bar = (" " * begin + "█" * cells)[:BAR_CELLS].ljust(BAR_CELLS)
    name = ("  " if span["parent"] else "") + span["name"]
    took_s = span["end_s"] - span["start_s"]
    size = f"  {format_bytes(span['bytes'])}" if span["bytes"] else ""
    rate = f" at {format_bytes(int(span['bytes'] / took_s))}/s" if span["bytes"] and took_s > 0 else ""
    return f"  {name:<16} {format_seconds(took_s):>8} |{bar}|{size}{rate}".rstrip()


def _took(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
