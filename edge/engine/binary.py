"""Read a llama-server's properties from the bytes of its files, without running it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge.engine.fatbin import elf_machine, kernels

# The prefix of the progress lines on stdout, tools/server/server-models.cpp of llama.cpp.
_PROGRESS = b"cmd_child_to_router:state"
# ggml/src/ggml-cuda/ggml-cuda.cu: in every build with the CUDA backend, also in a stripped one (log text).
_CUDA = b"ggml_cuda_init"
# VMM builds call the driver API for it; GGML_CUDA_NO_VMM compiles every such call out.
_VMM = b"cuMemAddressReserve"


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a binary. `built_for`: GPUs with machine code, (87,). `no_vmm`: None without CUDA."""

    progress_protocol: bool
    cuda: bool
    no_vmm: bool | None
    built_for: tuple[int, ...] = ()
    ptx: tuple[int, ...] = ()
    machine: str | None = None


def traits(binary: Path) -> Traits:
    """Search the file and the .so files beside it: split builds keep the server and CUDA in libraries."""
    seen: set[bytes] = set()
    sass: set[int] = set()
    ptx: set[int] = set()
    machine = None
    for path in (binary, *neighbours(binary)):
        with _mapped(path) as data:
            if data is None:
                continue
            machine = machine or elf_machine(data)
            seen.update(marker for marker in (_PROGRESS, _CUDA, _VMM) if marker not in seen and data.find(marker) >= 0)
            found = kernels(data)
        if found is not None:
            sass.update(found.sass)
            ptx.update(found.ptx)
    cuda = _CUDA in seen
    no_vmm = _VMM not in seen if cuda else None
    return Traits(_PROGRESS in seen, cuda, no_vmm, tuple(sorted(sass)), tuple(sorted(ptx)), machine)


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
