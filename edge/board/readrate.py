"""Measure how fast a file can be read past the page cache, with several stream counts, bounded in bytes and time.

A cold start cannot be faster. Direct reads leave the page cache as it is, so measuring evicts no warm model.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from edge.units import MIB

BUDGET_BYTES = 64 * MIB  # 0.7 s of an SD card at 90 MB/s
_CHUNK_BYTES = 2 * MIB  # larger requests are split by the block layer anyway
_LIMIT_S = 4.0  # a network file system may be slower than any guess
_DEPTH = 3  # folders below the store that may hold a model
_ALIGN_BYTES = 4096  # O_DIRECT needs offsets in logical blocks, 512 or 4096 bytes


class ReadRate(Struct, frozen=True):
    """The best rate. `by_streams` has the bytes per second of each stream count."""

    bytes_s: float
    streams: int
    read_bytes: int
    took_s: float
    by_streams: dict[int, float]


def measure(
    path: Path,
    streams: tuple[int, ...] = (1, 2, 4, 8),
    budget_bytes: int = BUDGET_BYTES,
    limit_s: float = _LIMIT_S,
    clock: Callable[[], float] = time.perf_counter,
) -> ReadRate | None:
    """Measure one file; None if it is too small or has no direct reads. Raises OSError if it is unreadable."""
    size = path.stat().st_size
    share = budget_bytes // len(streams)
    if size < _CHUNK_BYTES:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:  # EINVAL: tmpfs and some network file systems
        with path.open("rb"):
            return None  # readable, but not with O_DIRECT
    started = clock()
    rates: dict[int, float] = {}
    total = 0
    try:
        for number, count in enumerate(streams):
            left = limit_s - (clock() - started)
            if left <= 0:
                break
            start = _aligned(number * size // len(streams))
            done, took = _run(fd, _regions(start, min(share, size), count, size), clock, left)
            if done == 0:
                break
            rates[count] = done / max(took, 1e-9)
            total += done
    finally:
        os.close(fd)
    if not rates:
        return None
    best = max(rates, key=lambda count: rates[count])
    return ReadRate(rates[best], best, total, clock() - started, rates)


def biggest_file(folders: tuple[Path, ...]) -> Path | None:
    """Return the largest regular file under the folders; unreadable folders are skipped."""
    best: tuple[int, Path] | None = None
    for folder in folders:
        for root, names, files in os.walk(folder):
            if len(Path(root).relative_to(folder).parts) >= _DEPTH:
                names.clear()
            for name in files:
                path = Path(root, name)
                try:
                    size = path.lstat().st_size if not path.is_symlink() else 0
                except OSError:
                    continue
                if size > 0 and (best is None or size > best[0]):
                    best = (size, path)
    return best[1] if best else None


def _regions(start: int, length: int, count: int, size: int) -> list[tuple[int, int]]:
    """Return `count` ranges of the file, one a stream, wrapped at its end."""
    each = max(_CHUNK_BYTES, _aligned(length // count))
    return [(_aligned((start + number * each) % max(1, size - each + 1)), each) for number in range(count)]


def _run(fd: int, regions: list[tuple[int, int]], clock: Callable[[], float], limit_s: float) -> tuple[int, float]:
    """Read all ranges in parallel and return (bytes read, seconds)."""
    barrier = threading.Barrier(len(regions) + 1)
    done = [0] * len(regions)

    def stream(number: int, buffer: mmap.mmap, offset: int, length: int) -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            return
        end, stop = offset + length, clock() + limit_s
        while offset < end and clock() < stop:
            try:
                got = os.preadv(fd, [buffer], offset)
            except OSError:
                break
            done[number] += got
            offset += got
            if got < _CHUNK_BYTES:
                break

    buffers = [mmap.mmap(-1, _CHUNK_BYTES) for _ in regions]  # page-aligned, as O_DIRECT needs them
    threads = [
        threading.Thread(target=stream, args=(number, buffers[number], *region))
        for number, region in enumerate(regions)
    ]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:  # no memory or no pid for another thread; those that wait must not wait without end
        barrier.abort()
        raise OSError(f"no {len(threads)} threads to read with: {error}") from error
    barrier.wait()
    started = clock()
    for thread in threads:
        thread.join()
    return sum(done), clock() - started


def _aligned(offset: int) -> int:
    return offset // _ALIGN_BYTES * _ALIGN_BYTES
