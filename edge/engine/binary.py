"""Read a llama-server's properties from the bytes of its files, without running it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

# Read which GPUs a binary has machine code for, from its ELF sections. Pure; the bytes are untrusted.

# \x7fELF, 64-bit, little-endian; elf(5).
_ELF64 = b"\x7fELF\x02\x01"
_MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2  # PTX is compiled by the driver at the first start
# e_machine: EM_X86_64, EM_AARCH64; <elf.h>.
_MACHINES = {62: "x86_64", 183: "aarch64"}
# e_shnum has 16 bits.
_MAX_SECTIONS = 65_535
# Elf64_Shdr, elf(5).
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_CONTAINER = struct.Struct("<IHHQ")

Buffer: TypeAlias = "bytes | mmap.mmap"


def elf_machine(data: Buffer) -> str | None:
    """Return `x86_64`, `aarch64`, another machine's number, or None unless this is a 64-bit little-endian ELF file."""
    if len(data) < 64 or bytes(data[:6]) != _ELF64:
        return None
    number = struct.unpack_from("<H", data, 18)[0]
    return _MACHINES.get(number, f"elf-{number}")


def architectures(data: Buffer, kind: int = MACHINE_CODE) -> set[int]:
    """Return the compute capabilities, as numbers (87), that the file has this kind of code for."""
    return {
        arch for start, size in _fatbins(data) for found, arch in _entries(data, start, start + size) if found == kind
    }


def _fatbins(data: Buffer) -> list[tuple[int, int]]:
    """Return (offset, size) of nvcc's sections; damaged tables give an empty list."""
    if elf_machine(data) is None:
        return []
    table, entry_size, count, names_index = _section_table(data)
    if entry_size != _SECTION.size or not 0 < count <= _MAX_SECTIONS or names_index >= count:
        return []
    if table + count * entry_size > len(data):
        return []
    headers = [_SECTION.unpack_from(data, table + index * entry_size) for index in range(count)]
    names_at = headers[names_index][4]
    return [(h[4], h[5]) for h in headers if h[4] + h[5] <= len(data) and _name(data, names_at + h[0]) in _SECTIONS]


def _section_table(data: Buffer) -> tuple[int, int, int, int]:
    offset = struct.unpack_from("<Q", data, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    return offset, entry_size, count, names_index


def _name(data: Buffer, at: int) -> bytes:
    return bytes(data[at : at + 32]).split(b"\0", 1)[0]


def _entries(data: Buffer, start: int, end: int) -> Iterator[tuple[int, int]]:
    at = start
    while at + _CONTAINER.size <= end:
        magic, _, header, size = _CONTAINER.unpack_from(data, at)
        if magic != _MAGIC:
            at += 8  # containers are aligned to 8 bytes, with padding between them
            continue
        stop = min(at + header + size, end)
        entry = at + header
        while entry + 32 <= stop:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            arch = struct.unpack_from("<I", data, entry + 28)[0]
            if 10 <= arch <= 999:
                yield kind, arch
            entry += max(entry_header + payload, 8)
        at = max(stop, at + 16)


# The prefix of the progress lines on stdout, tools/server/server-models.cpp of llama.cpp.
_PROGRESS = b"cmd_child_to_router:state"
# ggml/src/ggml-cuda/ggml-cuda.cu: in every build with the CUDA backend, also in a stripped one (log text).
_CUDA = b"ggml_cuda_init"
# VMM builds call the driver API for it; GGML_CUDA_NO_VMM compiles every such call out.
_VMM = b"cuMemAddressReserve"
# ggml/src/ggml-rpc/ggml-rpc.cpp: --help lists --rpc in every build, this text is in those that have the backend.
_RPC = b"Remote RPC server crashed"

_MARKERS = (_PROGRESS, _CUDA, _VMM, _RPC)


class Traits(Struct, frozen=True):
    """Properties of a binary. `built_for`: GPUs with machine code, (87,). `no_vmm`: None without CUDA."""

    progress_protocol: bool
    cuda: bool
    no_vmm: bool | None
    built_for: tuple[int, ...] = ()
    machine: str | None = None
    rpc: bool = False


def traits(binary: Path) -> Traits:
    """Search the file and the .so files beside it: split builds keep the server and CUDA in libraries."""
    seen: set[bytes] = set()
    built_for: set[int] = set()
    machine = None
    for path in (binary, *neighbours(binary)):
        with _mapped(path) as data:
            if data is None:
                continue
            machine = machine or elf_machine(data)
            seen.update(marker for marker in _MARKERS if marker not in seen and data.find(marker) >= 0)
            built_for |= architectures(data)
    cuda = _CUDA in seen
    no_vmm = _VMM not in seen if cuda else None
    return Traits(_PROGRESS in seen, cuda, no_vmm, tuple(sorted(built_for)), machine, _RPC in seen)


def neighbours(binary: Path) -> list[Path]:
    """Return llama.cpp's own libraries beside a binary or in ../lib."""
    folders = (binary.parent, binary.parent.parent / "lib")
    return [
        path
        for folder in folders
        for pattern in ("libllama*.so*", "libggml*.so*", "libmtmd*.so*")
        for path in sorted(folder.glob(pattern))
        if path.is_file() and not path.is_symlink()
    ]


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap | None]:
    """Map a file for reading; None for an empty file, which cannot be mapped."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            yield None
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            yield view
