"""How far a long work on a model is. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One instant. `phase` is fetch, verify, unpack, copy or quantize; rate and rest are None until they are known."""

    phase: str
    what: str  # file name
    done_bytes: int
    total_bytes: int | None = None
    rate_bytes_s: float | None = None
    rest_s: float | None = None
    note: str | None = None


Report = Callable[[Progress], None]
