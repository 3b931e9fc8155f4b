"""What the bytes of a llama-server (and of the libraries beside it) say without running it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

_PROGRESS = b"cmd_child_to_router:state"
_CUDA = b"ggml_cuda_init"
# VMM builds call the driver API for it; GGML_CUDA_NO_VMM compiles every such call out.
_VMM = b"cuMemAddressReserve"


@dataclass(frozen=True, slots=True)
class Traits:
    """`no_vmm` is None where there is no CUDA."""

    progress_protocol: bool
    cuda: bool
    no_vmm: bool | None


def traits(binary: Path) -> Traits:
    """Markers in the file and in the .so files beside it (split builds keep the server and CUDA in libraries)."""
    found = dict.fromkeys((_PROGRESS, _CUDA, _VMM), False)
    for path in (binary, *neighbours(binary)):
        for marker in _markers_in(path, tuple(marker for marker, seen in found.items() if not seen)):
            found[marker] = True
    cuda = found[_CUDA]
    return Traits(found[_PROGRESS], cuda, not found[_VMM] if cuda else None)


def neighbours(binary: Path) -> list[Path]:
    """llama.cpp's own libraries beside a binary or in ../lib."""
    folders = (binary.parent, binary.parent.parent / "lib")
    return [
        path
        for folder in folders
        for pattern in ("libllama*.so*", "libggml*.so*", "libmtmd*.so*")
        for path in sorted(folder.glob(pattern))
        if path.is_file() and not path.is_symlink()
    ]


def _markers_in(path: Path, markers: tuple[bytes, ...]) -> list[bytes]:
    if not markers or path.stat().st_size == 0:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return [marker for marker in markers if view.find(marker) >= 0]
