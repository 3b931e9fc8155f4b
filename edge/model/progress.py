"""Progress of a long operation on a model. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One instant. `phase`: fetch, verify, unpack, copy or quantize; rate and remaining time are None until known."""

    phase: str
    what: str  # file name
    done_bytes: int
    total_bytes: int | None = None
    rate_bytes_s: float | None = None
    rest_s: float | None = None
    note: str | None = None


Report = Callable[[Progress], None]
