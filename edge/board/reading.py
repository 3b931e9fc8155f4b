"""Values that a GPU driver reports at one instant."""

from __future__ import annotations

from dataclasses import dataclass

from edge.board.board import Gpu


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. Its memory is unknown for an integrated GPU and without NVML."""

    gpu: Gpu
    free_bytes: int | None = None
    persistence: bool | None = None  # the driver keeps the GPU's state between users


@dataclass(frozen=True, slots=True)
class Reading:
    """All GPUs. `source` is nvml, recorded or proc; `cuda` is the newest CUDA that the driver supports, if known."""

    gpus: tuple[GpuReading, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    source: str | None = None
    notes: tuple[str, ...] = ()


def mig_notes(gpus: tuple[GpuReading, ...]) -> tuple[str, ...]:
    """Return a note for each GPU with MIG: an instance has only part of the card's memory."""
    return tuple(
        f"{reading.gpu.name} is split by MIG: CUDA sees its instances, not the card, and one instance has less memory"
        for reading in gpus
        if reading.gpu.mig
    )
