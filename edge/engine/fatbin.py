"""Read which GPUs a binary has machine code for, from its ELF sections. Pure; the bytes are untrusted.

Layout as nvcc 11 to 13 writes it: section `.nv_fatbin` is a row of containers, each `magic 0xBA55ED50, u16 version,
u16 header size, u64 size of what follows`; in it entries of `u16 kind (1 PTX, 2 machine code), u16, u32 header size,
u64 payload size, …, u32 architecture at byte 28`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap
from typing import TypeAlias

# \x7fELF, 64-bit, little-endian; elf(5).
_ELF64 = b"\x7fELF\x02\x01"
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2
# e_machine: EM_X86_64, EM_AARCH64; <elf.h>.
_MACHINES = {62: "x86_64", 183: "aarch64"}
# e_shnum has 16 bits.
_MAX_SECTIONS = 65_535
# Elf64_Shdr, elf(5).
_SECTION = struct.Struct("<IIQQQQIIQQ")
_CONTAINER = struct.Struct("<IHHQ")

Buffer: TypeAlias = "bytes | mmap"


@dataclass(frozen=True, slots=True)
class Kernels:
    """Compute capabilities as numbers (87): machine code, and PTX that a driver compiles at the first start."""

    sass: tuple[int, ...]
    ptx: tuple[int, ...]
    entries: int


def elf_machine(data: Buffer) -> str | None:
    """Return `x86_64`, `aarch64`, another machine's number, or None unless this is a 64-bit little-endian ELF file."""
    if len(data) < 64 or bytes(data[:6]) != _ELF64:
        return None
    number = struct.unpack_from("<H", data, 18)[0]
    return _MACHINES.get(number, f"elf-{number}")


def kernels(data: Buffer) -> Kernels | None:
    """Read the `.nv_fatbin` sections; None without one (no CUDA is linked in)."""
    found = sections(data, (".nv_fatbin", "__nv_relfatbin"))
    if not found:
        return None
    sass: set[int] = set()
    ptx: set[int] = set()
    count = 0
    for start, size in found:
        for kind, arch in _entries(data, start, start + size):
            (sass if kind == _MACHINE_CODE else ptx).add(arch)
            count += 1
    return Kernels(tuple(sorted(sass)), tuple(sorted(ptx)), count)


def sections(data: Buffer, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return (offset, size) of the named sections; damaged tables give an empty list."""
    if elf_machine(data) is None:
        return []
    table, entry_size, count, names_index = _section_table(data)
    if entry_size != _SECTION.size or not 0 < count <= _MAX_SECTIONS or names_index >= count:
        return []
    if table + count * entry_size > len(data):
        return []
    headers = [_SECTION.unpack_from(data, table + index * entry_size) for index in range(count)]
    names_at = headers[names_index][4]
    wanted = {name.encode() for name in names}
    return [(h[4], h[5]) for h in headers if h[4] + h[5] <= len(data) and _name(data, names_at + h[0]) in wanted]


def _section_table(data: Buffer) -> tuple[int, int, int, int]:
    offset = struct.unpack_from("<Q", data, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    return offset, entry_size, count, names_index


def _name(data: Buffer, at: int) -> bytes:
    return bytes(data[at : at + 32]).split(b"\0", 1)[0]


def _entries(data: Buffer, start: int, end: int) -> list[tuple[int, int]]:
    found = []
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
            if kind in (_PTX, _MACHINE_CODE) and 10 <= arch <= 999:
                found.append((kind, arch))
            entry += max(entry_header + payload, 8)
        at = max(stop, at + 16)
    return found
