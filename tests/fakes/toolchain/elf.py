"""ELF files with CUDA fat binaries in them, as nvcc lays them out: enough for a reader, not for a loader."""

from __future__ import annotations

import struct

PTX, MACHINE_CODE = 1, 2
MACHINES = {"x86_64": 62, "aarch64": 183}


def fatbin(entries: list[tuple[int, int]], payload_bytes: int = 24) -> bytes:
    """One container of (kind, architecture) entries."""
    body = b""
    for kind, arch in entries:
        header = struct.pack("<HHIQIIHHI", kind, 0x0101, 64, payload_bytes, 0, 0, 0, 1, arch)
        body += header.ljust(64, b"\0") + b"\xee" * payload_bytes
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(machine: str = "aarch64", nv_fatbin: bytes | None = None, extra: bytes = b"") -> bytes:
    """A 64-bit little-endian ELF file with the sections `.nv_fatbin` (where given), `.rodata` and `.shstrtab`."""
    names = b"\0.nv_fatbin\0.rodata\0.shstrtab\0"
    contents = [(1, nv_fatbin or b""), (12, extra), (20, names)]
    if nv_fatbin is None:
        contents = contents[1:]
    header_size, section_size = 64, 64
    offset, data, sections = header_size, b"", [b"\0" * section_size]
    for name, content in contents:
        padding = -offset % 8
        data, offset = data + b"\0" * padding, offset + padding
        sections.append(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, len(content), 0, 0, 8, 0))
        data, offset = data + content, offset + len(content)
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    head += struct.pack(
        "<HHIQQQIHHHHHH",
        3,
        MACHINES[machine],
        1,
        0,
        0,
        offset,
        0,
        64,
        0,
        0,
        section_size,
        len(sections),
        len(sections) - 1,
    )
    return head + data + b"".join(sections)
