"""Call NVML through ctypes: nvidia-ml-py is optional, and its import costs time before the engine is started.

Only entry points that have not changed since driver 450 are called. NVML opens no CUDA context and takes no memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_char, c_char_p, c_int, c_uint, c_ulonglong, c_void_p

from msgspec.structs import replace

from edge.board.board import Gpu, GpuReading, Reading, mig_notes

# WSL2 keeps the library of the Windows driver outside of the loader's path.
_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_TEXT_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE of nvml.h
# nvmlInit of a driver without persistence mode loads firmware to each GPU: 1 to 3 s on data-centre GPUs.
LIMIT_S = 5.0
NOTICE_S = 1.0  # a command that is silent for longer looks dead
WAITS = "waiting for the NVIDIA driver: a call into libnvidia-ml.so.1 has not returned for 1 s"
HANGS = "the NVIDIA driver does not answer (a call into libnvidia-ml.so.1 hangs)"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Pci(ctypes.Structure):
    """nvmlPciInfo_t of nvmlDeviceGetPciInfo_v3."""

    _fields_ = (
        ("bus_id_legacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pci_device_id", c_uint),
        ("pci_subsystem_id", c_uint),
        ("bus_id", c_char * 32),
    )


class _Call(threading.Thread):
    """One read in a thread: a call into a driver that hangs never returns. ctypes releases the GIL meanwhile."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        super().__init__(name="nvml", daemon=True)
        self.libraries = libraries
        self.reading: Reading | None = None

    def run(self) -> None:
        with suppress(AttributeError):  # a library without one of the entry points
            self.reading = _read(self.libraries)


_call: _Call | None = None  # that has not returned in time


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3 (driver 510 and later)."""

    _fields_ = (
        ("pid", c_uint),
        ("used_bytes", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


_MOST_PROCESSES = 64
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE: WSL2, and drivers that may not look


def process_bytes(pid: int, libraries: tuple[str, ...] = _LIBRARIES) -> int | None:
    """Return the memory of a process over all GPUs. None without NVML, and where it does not know this process.

    In a container with a PID namespace NVML lists the processes by their numbers outside.
    """
    nvml = _load(libraries)
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return None
    try:
        count, sizes = c_uint(), []
        nvml.nvmlDeviceGetCount_v2(byref(count))
        for index in range(count.value):
            handle, number = c_void_p(), c_uint(_MOST_PROCESSES)
            rows = (_Process * _MOST_PROCESSES)()
            if nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle)) != 0:
                continue
            if nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, byref(number), rows) == 0:
                own = [row.used_bytes for row in rows[: number.value] if row.pid == pid]
                sizes += [size for size in own if size != _UNKNOWN]
        return sum(sizes) if sizes else None
    except AttributeError:
        return None
    finally:
        nvml.nvmlShutdown()


def read(
    libraries: tuple[str, ...] = _LIBRARIES,
    limit_s: float = LIMIT_S,
    on_wait: Callable[[str], None] = lambda _: None,
) -> Reading | None:
    """Read every GPU that NVML lists. None when there is no library or it does not initialize.

    `on_wait` gets one sentence when there is no answer after a second.

    Raises TimeoutError when the driver does not answer within `limit_s`. A later call waits for the same answer.
    """
    global _call
    call = _call
    if call is None:
        call = _Call(libraries)
        call.start()
        call.join(min(NOTICE_S, limit_s))
        if call.is_alive() and limit_s > NOTICE_S:
            on_wait(WAITS)
            call.join(limit_s - NOTICE_S)
    if call.is_alive():
        _call = call
        raise TimeoutError(HANGS)
    _call = None
    return call.reading


def hangs() -> bool:
    """Return whether a call into NVML has not returned in time and still has not."""
    return _call is not None and _call.is_alive()


def _read(libraries: tuple[str, ...]) -> Reading | None:
    nvml = _load(libraries)
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return None
    try:
        count = c_uint()
        if nvml.nvmlDeviceGetCount_v2(byref(count)) != 0:
            return None
        gpus = tuple(gpu for index in range(count.value) for gpu in _gpus(nvml, index))
        return Reading(gpus, _driver(nvml), _cuda(nvml), "nvml", mig_notes(gpus))
    finally:
        nvml.nvmlShutdown()


def _load(libraries: tuple[str, ...]) -> ctypes.CDLL | None:
    for name in libraries:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _gpus(nvml: ctypes.CDLL, index: int) -> list[GpuReading]:
    """Return the card, or its MIG instances, which are what CUDA sees of it."""
    handle = c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(handle)) != 0:
        return []
    card = _gpu(nvml, handle, index)
    return (_instances(nvml, handle, card) if card.gpu.mig else []) or [card]


def _instances(nvml: ctypes.CDLL, handle: c_void_p, card: GpuReading) -> list[GpuReading]:
    """Return the MIG instances of a card: own UUID and memory, the card's bus id and compute capability."""
    count, found = c_uint(), []
    try:
        if nvml.nvmlDeviceGetMaxMigDeviceCount(handle, byref(count)) != 0:
            return []
        for number in range(count.value):
            instance, memory = c_void_p(), _Memory()
            if nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, c_uint(number), byref(instance)) != 0:
                continue
            known = nvml.nvmlDeviceGetMemoryInfo(instance, byref(memory)) == 0 and memory.total > 0
            uuid = _text(nvml.nvmlDeviceGetUUID, instance)
            name = _text(nvml.nvmlDeviceGetName, instance) or f"{card.gpu.name} MIG"
            size = memory.total if known else None
            gpu = replace(card.gpu, name=name, uuid=uuid, memory_bytes=size, mig=False)
            found.append(replace(card, gpu=gpu, free_bytes=memory.free if known else None))
    except AttributeError:  # a driver before 450
        return []
    return found


def _gpu(nvml: ctypes.CDLL, handle: c_void_p, index: int) -> GpuReading:
    memory, pci = _Memory(), _Pci()
    major, minor, current, pending = c_int(), c_int(), c_uint(), c_uint()
    has_memory = nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0 and memory.total > 0
    has_pci = nvml.nvmlDeviceGetPciInfo_v3(handle, byref(pci)) == 0
    has_capability = nvml.nvmlDeviceGetCudaComputeCapability(handle, byref(major), byref(minor)) == 0
    has_mig = _mig(nvml, handle, current, pending)
    gpu = Gpu(
        name=_text(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        uuid=_text(nvml.nvmlDeviceGetUUID, handle),
        index=index,
        pci_bus_id=pci.bus_id.decode(errors="replace") if has_pci else None,
        memory_bytes=memory.total if has_memory else None,
        compute_capability=f"{major.value}.{minor.value}" if has_capability else None,
        mig=has_mig and current.value == 1,
    )
    return GpuReading(gpu, memory.free if has_memory else None, _persistence(nvml, handle))


def _persistence(nvml: ctypes.CDLL, handle: c_void_p) -> bool | None:
    mode = c_uint()
    return mode.value == 1 if nvml.nvmlDeviceGetPersistenceMode(handle, byref(mode)) == 0 else None


def _mig(nvml: ctypes.CDLL, handle: c_void_p, current: c_uint, pending: c_uint) -> bool:
    """Return whether the call for the MIG mode succeeded; drivers before 450 do not have it."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle, byref(current), byref(pending)) == 0)
    except AttributeError:
        return False


def _text(function: ctypes._NamedFuncPointer, handle: c_void_p) -> str | None:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    if function(handle, c_char_p(ctypes.addressof(buffer)), c_uint(_TEXT_BYTES)) != 0:
        return None
    return buffer.value.decode(errors="replace") or None


def _driver(nvml: ctypes.CDLL) -> str | None:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    return buffer.value.decode() or None if nvml.nvmlSystemGetDriverVersion(buffer, c_uint(_TEXT_BYTES)) == 0 else None


def _cuda(nvml: ctypes.CDLL) -> str | None:
    """Convert 12080 to `12.8`."""
    version = c_int()
    if nvml.nvmlSystemGetCudaDriverVersion_v2(byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
