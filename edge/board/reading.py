"""What a GPU driver said at one instant. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from edge.board.board import Gpu


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one instant. Without memory the driver does not tell: an integrated GPU, or no NVML."""

    gpu: Gpu
    free_bytes: int | None = None
    persistence: bool | None = None  # the driver keeps the GPU's state between users


@dataclass(frozen=True, slots=True)
class Reading:
    """`source` is nvml, recorded or proc; `cuda` is the newest CUDA that the driver serves, where it tells."""

    gpus: tuple[GpuReading, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    source: str | None = None
    notes: tuple[str, ...] = ()


def mig_notes(gpus: tuple[GpuReading, ...]) -> tuple[str, ...]:
    """MIG is said aloud: the whole card's memory is not what one instance gets."""
    return tuple(
        f"{reading.gpu.name} is split by MIG: CUDA sees its instances, not the card, and one instance has less memory"
        for reading in gpus
        if reading.gpu.mig
    )
