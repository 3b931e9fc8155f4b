"""Read the CUDA toolkits below /usr/local and the cache of just-in-time compiled kernels."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from edge.board.tree import Tree
from edge.doctor.facts import Cuda, CudaToolkit
from edge.service.disk import creatable

_NVCC_PATH = re.compile(r"cuda-(\d+\.\d+)")


def read_cuda(tree: Tree, env: Mapping[str, str], jit_cache: Path) -> Cuda:
    """Read toolkits and cache; `jit_cache` is the engine's CUDA_CACHE_PATH."""
    names = [f"/usr/local/{name}" for name in tree.children("/usr/local") if name.startswith("cuda")]
    # /usr/local/cuda and cuda-13 are links to cuda-13.0: keep the longest name of each folder.
    found = sorted({tree.path(name).resolve(): name for name in sorted(names, key=len)}.values())
    on_path = shutil.which("nvcc", path=env.get("PATH")) if tree.live else None
    return Cuda(
        toolkits=tuple(CudaToolkit(path, _version(tree, path), tree.exists(f"{path}/bin/nvcc")) for path in found),
        on_path=str(Path(on_path).resolve()) if on_path else None,
        jit_cache=jit_cache,
        jit_cache_bytes=_bytes(jit_cache) if tree.live and jit_cache.is_dir() else None,
        jit_cache_writable=creatable(jit_cache) if tree.live else None,
    )


def _version(tree: Tree, path: str) -> str | None:
    """Return `12.6` from version.json, else from the folder's name."""
    try:
        version = json.loads(tree.text(f"{path}/version.json") or "{}")["cuda"]["version"]
        return ".".join(str(version).split(".")[:2])
    except (ValueError, KeyError, TypeError):
        match = _NVCC_PATH.search(path)
        return match[1] if match else None


def _bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += Path(root, name).lstat().st_size
            except OSError:
                continue
    return total
