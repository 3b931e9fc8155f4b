"""Parse and format sizes, durations and terminal text. Binary units carry an i (GiB, IEC 80000-13); GB is decimal."""

from __future__ import annotations

import re

from edge.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": KIB,
    "m": 10**6,
    "mb": 10**6,
    "mib": MIB,
    "g": 10**9,
    "gb": 10**9,
    "gib": GIB,
    "t": 10**12,
    "tb": 10**12,
    "tib": 1024**4,
}
# Control characters of C0 and C1 except tab, and the marks that reorder text: a terminal would obey them. Lone
# surrogates are bytes of a file name that are no UTF-8.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff]"
)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Convert `"7.4GiB"` to bytes. Raises UsageError."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"not a size: {text!r}", "write it like 7.4GiB, 512MiB or 8GB")
    return int(float(match[1]) * factor)


def printable(text: str, *, newlines: bool = False) -> str:
    """Return text of unknown origin as a terminal may show it: control characters as \\x1b, \\n, \\u202e.

    Names of models, files, archives and hubs, log lines and messages that quote them go through here.
    """
    if newlines:
        return "\n".join(printable(line) for line in text.split("\n"))
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: 1 value, 2 values, 0 processes. `plural` where an s is not enough."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def logged_number(text: str) -> float | None:
    """Return a number as a log prints it, with a point or, by its locale, a comma; None for any other text."""
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return None


def format_bytes(count: int) -> str:
    """Format bytes in the largest binary unit, with one decimal."""
    size = float(count)
    if abs(size) < KIB:
        return f"{count} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # 1023.95 would be rounded to 1024.0 of this unit.
        if abs(size) < 1023.95 or unit == "TiB":
            return f"{size:.1f} {unit}"
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Format `0.012` as `12 ms`, `3.21` as `3.2 s`, `75` as `1 min 15 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
