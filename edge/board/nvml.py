"""Call NVML through ctypes: nvidia-ml-py is optional, and its import costs time before the engine is started.

Only entry points that have not changed since driver 450 are called. NVML opens no CUDA context and takes no memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
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
_asking = threading.Lock()  # while the driver hangs, one thread waits for it, not one for each question
_ASKING_S = 1.0
_MOST_GPUS = 64  # of one host; also of the instances of a card, which are seven
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE: WSL2, and drivers that may not look


def process_bytes(pid: int, libraries: tuple[str, ...] = _LIBRARIES) -> int | None:
    """Return the memory of a process over all GPUs. None without NVML, and where it does not know this process.

    In a container with a PID namespace NVML lists the processes by their numbers outside. None too while another
    thread's question has not been answered.
    """
    if not _asking.acquire(timeout=_ASKING_S):
        return None
    try:
        return _process_bytes(pid, libraries)
    finally:
        _asking.release()


def _process_bytes(pid: int, libraries: tuple[str, ...]) -> int | None:
    nvml = _load(libraries)
    if nvml is None or not _done(nvml, "nvmlInit_v2"):
        return None
    try:
        sizes = []
        for index in range(_count(nvml) or 0):
            handle, number = c_void_p(), c_uint(_MOST_PROCESSES)
            rows = (_Process * _MOST_PROCESSES)()
            if not _done(nvml, "nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)):
                continue
            if _done(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", handle, byref(number), rows):
                own = [row.used_bytes for row in rows[: number.value] if row.pid == pid]
                sizes += [size for size in own if size != _UNKNOWN]
        return sum(sizes) if sizes else None
    finally:
        _done(nvml, "nvmlShutdown")


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
    if nvml is None or not _done(nvml, "nvmlInit_v2"):
        return None
    try:
        if (count := _count(nvml)) is None:
            return None
        gpus = tuple(gpu for index in range(count) for gpu in _gpus(nvml, index))
        return Reading(gpus, _text(nvml, "nvmlSystemGetDriverVersion"), _cuda(nvml), "nvml", mig_notes(gpus))
    finally:
        _done(nvml, "nvmlShutdown")


def _done(nvml: ctypes.CDLL, name: str, *arguments: object) -> bool:
    """Call an entry point; return whether it exists in this driver's library and succeeded."""
    function = getattr(nvml, name, None)
    return function is not None and function(*arguments) == 0


def _count(nvml: ctypes.CDLL) -> int | None:
    count = c_uint()
    if not _done(nvml, "nvmlDeviceGetCount_v2", byref(count)):
        return None
    return count.value if count.value <= _MOST_GPUS else None


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
    if not _done(nvml, "nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)):
        return []
    card = _gpu(nvml, handle, index)
    return (_instances(nvml, handle, card) if card.gpu.mig else []) or [card]


def _instances(nvml: ctypes.CDLL, handle: c_void_p, card: GpuReading) -> list[GpuReading]:
    """Return the MIG instances of a card: own UUID and memory, the card's bus id and compute capability."""
    count, found = c_uint(), []
    if not _done(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle, byref(count)):  # absent before driver 450
        return []
    for number in range(min(count.value, _MOST_GPUS)):
        instance = c_void_p()
        if not _done(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, c_uint(number), byref(instance)):
            continue
        total, free = _memory(nvml, instance)
        uuid = _text(nvml, "nvmlDeviceGetUUID", instance)
        name = _text(nvml, "nvmlDeviceGetName", instance) or f"{card.gpu.name} MIG"
        gpu = replace(card.gpu, name=name, uuid=uuid, memory_bytes=total, mig=False)
        found.append(replace(card, gpu=gpu, free_bytes=free))
    return found


def _gpu(nvml: ctypes.CDLL, handle: c_void_p, index: int) -> GpuReading:
    pci, major, minor, current, pending = _Pci(), c_int(), c_int(), c_uint(), c_uint()
    total, free = _memory(nvml, handle)
    has_pci = _done(nvml, "nvmlDeviceGetPciInfo_v3", handle, byref(pci))
    has_capability = _done(nvml, "nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
    has_mig = _done(nvml, "nvmlDeviceGetMigMode", handle, byref(current), byref(pending))
    gpu = Gpu(
        name=_text(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU",
        uuid=_text(nvml, "nvmlDeviceGetUUID", handle),
        index=index,
        pci_bus_id=pci.bus_id.decode(errors="replace") if has_pci else None,
        memory_bytes=total,
        compute_capability=f"{major.value}.{minor.value}" if has_capability else None,
        mig=has_mig and current.value == 1,
    )
    return GpuReading(gpu, free, _persistence(nvml, handle))


def _memory(nvml: ctypes.CDLL, handle: c_void_p) -> tuple[int | None, int | None]:
    """Return total and free bytes. An integrated GPU has 0; drivers report all ones for what they do not know."""
    memory = _Memory()
    if not _done(nvml, "nvmlDeviceGetMemoryInfo", handle, byref(memory)) or not 0 < memory.total < _UNKNOWN:
        return None, None
    return memory.total, memory.free if memory.free <= memory.total else None


def _persistence(nvml: ctypes.CDLL, handle: c_void_p) -> bool | None:
    mode = c_uint()
    return mode.value == 1 if _done(nvml, "nvmlDeviceGetPersistenceMode", handle, byref(mode)) else None


def _text(nvml: ctypes.CDLL, name: str, *handle: c_void_p) -> str | None:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    if not _done(nvml, name, *handle, c_char_p(ctypes.addressof(buffer)), c_uint(_TEXT_BYTES)):
        return None
    return buffer.value.decode(errors="replace") or None


def _cuda(nvml: ctypes.CDLL) -> str | None:
    """Convert 12080 to `12.8`."""
    version = c_int()
    if not _done(nvml, "nvmlSystemGetCudaDriverVersion_v2", byref(version)) or version.value <= 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
