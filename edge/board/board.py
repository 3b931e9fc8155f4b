"""Values that describe a machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from edge.errors import ConfigError


class PowerMode(Struct, frozen=True):
    """A mode of nvpmodel. Ids differ by module and image: compare names (FC-43)."""

    id: int
    name: str


class Gpu(Struct, frozen=True):
    """One discrete NVIDIA GPU (NVML) or the integrated one (`uuid` None)."""

    name: str
    uuid: str | None = None
    index: int | None = None
    pci_bus_id: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None  # "8.7"
    mig: bool = False


class Cpu(Struct, frozen=True):
    """The processor as llama.cpp uses it."""

    name: str
    physical_cores: int
    logical_cores: int
    isa: tuple[str, ...] = ()  # /proc/cpuinfo flags or Features that engines care about
    usable_cores: int | None = None  # where affinity or a cgroup quota leaves fewer than physical_cores


class Board(Struct, frozen=True):
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


# Values that a GPU driver reports at one instant.


class GpuReading(Struct, frozen=True):
    """One GPU. Its memory is unknown for an integrated GPU and without NVML."""

    gpu: Gpu
    free_bytes: int | None = None
    persistence: bool | None = None  # the driver keeps the GPU's state between users


class Reading(Struct, frozen=True):
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


# Restrict a machine to some of its GPUs. Pure.

VARIABLE = "CUDA_VISIBLE_DEVICES"  # read by the CUDA runtime of the engine, which inherits our environment


def visible(board: Board, value: str | None) -> Board:
    """Apply CUDA_VISIBLE_DEVICES of our environment: the engine must not use what it hides. None: it is not set."""
    if value is None or not board.gpus:
        return board
    left = _left(board.gpus, [token.strip() for token in value.split(",")])
    if not left:
        return replace(board, gpus=(), compute_capability=None, refused=f"{VARIABLE} hides every GPU")
    hidden = [gpu.name for gpu in board.gpus if gpu not in left]
    notes = (*board.notes, f"{VARIABLE} hides {', '.join(hidden)}") if hidden else board.notes
    return replace(board, gpus=left, compute_capability=newest_capability(left), notes=notes)


def only_gpus(board: Board, selectors: Sequence[str]) -> Board:
    """Apply the key `gpus`: nvidia-smi's indexes, prefixes of UUIDs, or parts of names. Raises ConfigError."""
    if not selectors or board.unified_memory:
        return board
    chosen = [_selected(selector.strip(), board.gpus) for selector in selectors]
    for selector, found in zip(selectors, chosen, strict=True):
        if not found:
            known = ", ".join(f"{gpu.index}: {gpu.name} ({gpu.uuid})" for gpu in board.gpus) or "there is none"
            raise ConfigError(f"gpus: no GPU is {selector!r}", f"it takes UUIDs, indexes and names; {known}")
    gpus = tuple(gpu for gpu in board.gpus if any(gpu in found for found in chosen))
    return replace(board, gpus=gpus, compute_capability=newest_capability(gpus))


def newest_capability(gpus: Iterable[Gpu]) -> str | None:
    """Return the highest compute capability: an old card beside a new one decides nothing for the new one."""
    known = [gpu.compute_capability for gpu in gpus if gpu.compute_capability]
    return max(known, key=lambda text: [int(part) for part in text.split(".") if part.isdecimal()], default=None)


def _selected(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that a selector names. A number is an index where one has it, else a number in a name: 4090."""
    if text.isdecimal():
        # Not a part of a longer number: 40 is no RTX 4090.
        number = re.compile(rf"(?<!\d){text}(?!\d)", re.ASCII)
        by_index = [gpu for gpu in gpus if gpu.index == int(text)]
        return by_index or [gpu for gpu in gpus if number.search(gpu.name)]
    by_uuid = [gpu for gpu in gpus if text and gpu.uuid and gpu.uuid.startswith(text)]
    return by_uuid or [gpu for gpu in gpus if text and text.lower() in gpu.name.lower()]


def _left(gpus: Sequence[Gpu], tokens: Sequence[str]) -> tuple[Gpu, ...]:
    """Select by number in PCI order or by a prefix of the UUID. As in CUDA, the first invalid entry ends the list."""
    ordered = sorted(gpus, key=lambda gpu: gpu.pci_bus_id or "")
    found: list[Gpu] = []
    for token in tokens:
        gpu = _one(ordered, token)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return tuple(found)


def _one(gpus: Sequence[Gpu], token: str) -> Gpu | None:
    if token.isdecimal():
        return gpus[int(token)] if int(token) < len(gpus) else None
    matches = [gpu for gpu in gpus if token and gpu.uuid and gpu.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None
