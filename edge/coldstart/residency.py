"""How much of a file the page cache already holds: a sample, so that 40 GB cost no more than 40 MB."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

WINDOWS = 64
WINDOW_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def resident_ratio(path: Path) -> float | None:
    """0…1 over at most 64 windows of 1 MiB spread over the file; None when it cannot be told."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return None
            return _sample(file.fileno(), size)
    except (OSError, ValueError):
        return None


def _sample(descriptor: int, size: int) -> float | None:
    step = max(WINDOW_BYTES, size // WINDOWS // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY)
    pages = resident = 0
    for offset in range(0, size, step):
        length = min(WINDOW_BYTES, size - offset)
        # A private copy is never written: it only gives ctypes an address to ask about.
        with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=offset) as window:
            count = -(-length // mmap.PAGESIZE)
            answer = ctypes.create_string_buffer(count)
            view = ctypes.c_char.from_buffer(window)
            failed = _libc.mincore(ctypes.addressof(view), length, answer)
            del view
            if failed:
                return None
            pages += count
            resident += sum(byte & 1 for byte in answer.raw)
    return round(resident / pages, 3)
