"""What a GPU driver said at one instant. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from edge.board.board import Gpu


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one instant. `memory_bytes` None: the driver does not tell (an integrated GPU, or no NVML)."""

    name: str
    uuid: str | None
    index: int | None
    pci_bus_id: str | None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    compute_capability: str | None = None
    mig: bool = False

    def gpu(self) -> Gpu:
        return Gpu(
            self.name, self.uuid, self.index, self.pci_bus_id, self.memory_bytes, self.compute_capability, self.mig
        )


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
        f"{gpu.name} is split by MIG: CUDA sees its instances, not the card, and one instance has less memory"
        for gpu in gpus
        if gpu.mig
    )
