"""Values that describe a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PowerMode:
    """A mode of nvpmodel. Ids differ by module and image: compare names (FC-43)."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One discrete NVIDIA GPU (NVML) or the integrated one (`uuid` None)."""

    name: str
    uuid: str | None = None
    index: int | None = None
    pci_bus_id: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None  # "8.7"
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor as llama.cpp uses it."""

    name: str
    physical_cores: int
    logical_cores: int
    isa: tuple[str, ...] = ()  # /proc/cpuinfo flags or Features that engines care about
    usable_cores: int | None = None  # where affinity or a cgroup quota leaves fewer than physical_cores


@dataclass(frozen=True, slots=True)
class Board:
    """A machine. Absent is None. `notes` are sentences on what was assumed and why."""

    id: str  # "agx-orin-64", "orin-nano-8", "x86_64", ...
    module: str
    soc: str | None
    compute_capability: str | None
    memory_bytes: int
    unified_memory: bool
    cpu: Cpu
    gpus: tuple[Gpu, ...] = ()
    bandwidth_bytes_s: float | None = None
    l4t: str | None = None
    jetpack: str | None = None
    cuda: str | None = None
    power_mode: PowerMode | None = None
    container: str | None = None  # "docker", "podman", "nspawn", "wsl2", ...
    notes: tuple[str, ...] = ()
    refused: str | None = None  # why its GPU cannot be used (Jetson Nano, TX2)
    model: str | None = None  # `model` of the device tree, for display only
    driver: str | None = None  # NVIDIA driver of discrete GPUs: "580.95.05"
