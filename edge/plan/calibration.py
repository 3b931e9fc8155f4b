"""What past starts taught about the estimate: measured over estimated, by engine and architecture. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on the estimate, and the bytes that an engine takes before it loads anything. `samples` 0 is none yet."""

    compute: float = 1.0
    context_bytes: int | None = None
    samples: int = 0
