"""Discrete NVIDIA GPUs: what the driver says."""

from __future__ import annotations

from dataclasses import dataclass

from edge.board.board import Gpu
from edge.board.tree import Tree


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
    """`source` is nvml, recorded or proc; `cuda` is the newest CUDA that the driver serves."""

    gpus: tuple[GpuReading, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    source: str | None = None
    notes: tuple[str, ...] = ()


def read(tree: Tree) -> Reading:
    """Nothing is asked where there is no NVIDIA driver."""
    return from_proc(tree)


def from_proc(tree: Tree) -> Reading:
    """/proc/driver/nvidia: names, UUIDs and bus ids, no memory."""
    base = "/proc/driver/nvidia/gpus"
    gpus = []
    for index, name in enumerate(tree.children(base)):
        fields = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in tree.lines(f"{base}/{name}/information"))
        }
        gpus.append(
            GpuReading(
                fields.get("Model", "NVIDIA GPU"), fields.get("GPU UUID"), index, fields.get("Bus Location", name)
            )
        )
    words = (tree.text("/proc/driver/nvidia/version") or "").split("\n")[0].split()
    driver = next((word for word in words if word[0].isdigit() and "." in word), None)
    return Reading(tuple(gpus), driver, source="proc" if gpus else None)
