"""Memory at one instant."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Bytes by domain: `unified` on a Jetson, else `host` and each GPU's UUID. Available: MemAvailable, not MemFree."""

    total_bytes: dict[str, int]
    available_bytes: dict[str, int]
    swap_bytes: int = 0  # shown, never counted
    notes: tuple[str, ...] = field(default=())
