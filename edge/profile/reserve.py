"""The formula of memory that stays free: `1GiB`, `10%` of the total, or `max(1GiB, 10%)`. Pure."""

from __future__ import annotations

import re

from edge.errors import UsageError
from edge.units import parse_size

DEFAULT_RESERVE = "max(1GiB, 10%)"
_CALL = re.compile(r"\s*(max|min)\(([^()]*)\)\s*")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def reserve_bytes(formula: str, total_bytes: int) -> int:
    """Return the reserve in bytes of `total_bytes` (MemTotal or a GPU's VRAM). Raises ValueError for a bad formula."""
    call = _CALL.fullmatch(formula)
    if call is None:
        return _term(formula, total_bytes)
    terms = [_term(part, total_bytes) for part in call[2].split(",")]
    return max(terms) if call[1] == "max" else min(terms)


def check_reserve(formula: str) -> None:
    """Raise ValueError for a bad formula."""
    reserve_bytes(formula, 1 << 30)


def _term(text: str, total_bytes: int) -> int:
    percent = _PERCENT.fullmatch(text)
    if percent:
        share = float(percent[1])
        if share > 90:
            raise ValueError(f"wants at most 90%, got {text.strip()}")
        return int(total_bytes * share / 100)
    try:
        return parse_size(text)
    except UsageError:
        raise ValueError(f"wants a size, a share, or max(1GiB, 10%), got {text.strip()!r}") from None
