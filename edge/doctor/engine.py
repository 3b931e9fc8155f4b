"""Checks of the engine against the board (CUDA, machine code, driver, caches), and how their facts are read."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from edge.board.board import Board
from edge.board.tables import board_reference
from edge.doctor.check import Finding, bad, ok, unknown, warn
from edge.doctor.facts import Cuda, CudaToolkit, DoctorFacts
from edge.engine import gpu_code
from edge.linux.files import visible
from edge.linux.tree import Tree
from edge.service.access import PathUser, creatable
from edge.units import GIB, format_bytes


def present(facts: DoctorFacts) -> Finding:
    """Check that an engine can be chosen."""
    serving = facts.serving
    if serving.engine is None:
        says = serving.engine_problem or "no engine was looked for"
        if not facts.live:
            return unknown(says)
        return bad(says, serving.engine_hint or "build one", "edgellm build")
    version = serving.engine.version or "of unknown version"
    return ok(f"{serving.engine.id} ({serving.engine.kind} {version})")


def cuda(facts: DoctorFacts) -> Finding | None:
    """Find an engine without CUDA beside a GPU: it ignores `--gpu-layers` without an error and runs slowly (FC-41)."""
    engine, board = facts.serving.engine, facts.board
    if engine is None or not board.gpus or board.refused:
        return None
    if engine.cuda:
        return ok("has CUDA")
    says = f"{engine.id} has no CUDA: {board.gpus[0].name} would stay idle"
    if not facts.serving.needs_gpu:
        return warn(says, "build one with CUDA", "edgellm build")
    return bad(says, "build one with CUDA", "edgellm build")


def architecture(facts: DoctorFacts) -> Finding | None:
    """Check that the engine holds machine code for a GPU, by the rule of edge.engine.gpu_code; the plan uses those."""
    engine, board = facts.serving.engine, facts.board
    if engine is None or not engine.cuda or board.compute_capability is None:
        return None
    known = [board.compute_capability, *(gpu.compute_capability for gpu in board.gpus)]
    here = sorted({arch for text in known if (arch := gpu_code.architecture(text)) is not None})
    gpus = f"this GPU is {gpu_code.listed(here)}" if len(here) == 1 else f"the GPUs are {gpu_code.listed(here)}"
    if not engine.built_for or not here:
        return unknown(f"for which GPUs it was built is not recorded; {gpus}")
    built = gpu_code.listed(engine.built_for)
    used = [arch for arch in here if gpu_code.runs(engine.built_for, arch)]
    if used == here:
        return ok(f"built for {built}, {gpus}")
    if used:
        says = f"built for {built}, {gpus}: only {gpu_code.listed(used)} is used"
        # A card older than those is often one that this CUDA compiles nothing for.
        newer = here[-1] not in used
        return warn(says, "build for all", "edgellm build") if newer else ok(says)
    says = f"built for {built}, but {gpus}"
    # Only discrete GPUs: the recipes for Tegra embed no PTX, so there is nothing to compile from.
    if board.soc is None and min(engine.built_for) < here[-1]:
        step = "the driver compiles it at the first start (minutes), if it holds PTX; build for this GPU"
        return warn(says, step, "edgellm build")
    return bad(f"{says}: it dies at the first request", "build for this GPU", "edgellm build")


def driver(facts: DoctorFacts) -> Finding | None:
    """Find an engine built with a newer CUDA than the driver serves: it fails with `unsupported toolchain` (FC-05)."""
    built = facts.serving.engine_cuda
    if built is None:
        return None
    served = facts.board.cuda or _served(facts.board)
    if served is None:
        return None
    # Within a major version older drivers run newer toolkits (CUDA Compatibility, "minor version compatibility").
    if _numbers(built)[0] > _numbers(served)[0]:
        says = f"built with CUDA {built}, but this system's driver serves CUDA {served}"
        return bad(says, "build with the toolkit that belongs to this system", "edgellm build")
    # On Tegra the driver comes with JetPack and cannot be updated alone: PTX of a newer minor version may fail.
    if facts.board.soc is not None and _numbers(built) > _numbers(served):
        says = f"built with CUDA {built}, a little newer than JetPack's {served}"
        return warn(says, "if it reports PTX or toolchain errors, build with JetPack's own toolkit", "edgellm build")
    return ok(f"built with CUDA {built}, the driver serves {served}")


def _served(board: Board) -> str | None:
    """Return the newest CUDA major that a discrete GPU's driver serves."""
    if board.driver is None:
        return None
    branch = int(board.driver.split(".")[0])
    return next((f"{row.cuda}.0" for row in board_reference().drivers if branch >= int(row.oldest)), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) or (0,)


def address_pool(facts: DoctorFacts) -> Finding | None:
    """Find ggml's VMM pool on a Tegra: it reserves 32 GiB of addresses, which small parts refuse (FC-11)."""
    engine = facts.serving.engine
    if engine is None or not engine.cuda or facts.board.soc is None:
        return None
    if engine.no_vmm is None:
        return unknown("whether it was built with GGML_CUDA_NO_VMM is not recorded")
    if engine.no_vmm:
        return ok("built with GGML_CUDA_NO_VMM, as a Jetson needs it")
    step = "rebuild with GGML_CUDA_NO_VMM=ON: out-of-memory reports at the first request come from this"
    return warn("its CUDA pool reserves 32 GiB of addresses", step, "edgellm build")


def jit_cache(facts: DoctorFacts) -> Finding | None:
    """Check the cache of just-in-time compiled kernels: without it every boot compiles them again."""
    engine, cuda_facts = facts.serving.engine, facts.cuda
    if engine is None or not engine.cuda or cuda_facts.jit_cache_writable is None:
        return None
    if not cuda_facts.jit_cache_writable:
        says = f"the cache of compiled kernels cannot be written: {cuda_facts.jit_cache}"
        return bad(says, "give the serving user this folder: kernels are compiled again at each boot")
    # The driver keeps to CUDA_CACHE_MAXSIZE, which every plan sets; far more is the cache of another program.
    if (cuda_facts.jit_cache_bytes or 0) > 4 * GIB:
        says = f"the cache of compiled kernels holds {format_bytes(cuda_facts.jit_cache_bytes or 0)}"
        return warn(
            says, "delete it when no engine runs; it fills again", f"rm -r {shlex.quote(str(cuda_facts.jit_cache))}"
        )
    return ok("compiled kernels are kept between boots")


def toolkits(facts: DoctorFacts) -> Finding | None:
    """Report which nvcc a build uses where PATH has another one or none (FC-01, FC-05)."""
    found, board = facts.cuda, facts.board
    if not board.gpus:
        return None
    compilers = [kit for kit in found.toolkits if kit.nvcc]
    if not compilers:
        step = "only needed to build: install JetPack's CUDA toolkit" if board.soc else "only needed to build"
        return unknown("no nvcc under /usr/local/cuda*", step)
    listed = ", ".join(f"{kit.version or '?'} in {kit.path}" for kit in compilers)
    wrong = [
        kit
        for kit in compilers
        if board.soc and board.cuda and kit.version and _numbers(kit.version)[0] > _numbers(board.cuda)[0]
    ]
    # A build takes the toolkit that belongs to the system, so one that is too new only matters alone.
    if wrong and len(wrong) == len(compilers):
        step = f"install the CUDA {board.cuda} toolkit of JetPack {board.jetpack}: its driver serves nothing newer"
        return bad(f"CUDA {listed}", step, "sudo apt install cuda-toolkit-" + str(board.cuda).replace(".", "-"))
    if found.on_path and not any(found.on_path.startswith(kit.path) for kit in compilers if kit not in wrong):
        return warn(
            f"CUDA {listed}; PATH finds {found.on_path}",
            "the build takes the one that belongs to this system; check PATH if you build by hand",
        )
    hidden = (
        "" if found.on_path or not facts.live else "; not on PATH (nor under systemd), the build looks there by itself"
    )
    return ok(f"CUDA {listed}{hidden}")


CHECKS = {
    "engine.present": present,
    "engine.cuda": cuda,
    "engine.arch": architecture,
    "engine.driver": driver,
    "engine.pool": address_pool,
    "engine.jit_cache": jit_cache,
    "cuda.toolkit": toolkits,
}


# ---- facts

_NVCC_PATH = re.compile(r"cuda-(\d+\.\d+)")


def read_cuda(tree: Tree, env: Mapping[str, str], jit_cache: Path, user: PathUser | None = None) -> Cuda:
    """Read toolkits and cache; `jit_cache` is the engine's CUDA_CACHE_PATH."""
    names = [f"/usr/local/{name}" for name in tree.children("/usr/local") if name.startswith("cuda")]
    # /usr/local/cuda and cuda-13 are links to cuda-13.0: keep the longest name of each folder.
    found = sorted({tree.path(name).resolve(): name for name in sorted(names, key=len)}.values())
    on_path = shutil.which("nvcc", path=env.get("PATH")) if tree.live else None
    return Cuda(
        toolkits=tuple(CudaToolkit(path, _version(tree, path), tree.exists(f"{path}/bin/nvcc")) for path in found),
        on_path=str(Path(on_path).resolve()) if on_path else None,
        jit_cache=jit_cache,
        jit_cache_bytes=_bytes(jit_cache) if tree.live and visible(jit_cache) and jit_cache.is_dir() else None,
        jit_cache_writable=creatable(jit_cache, user) if tree.live else None,
    )


def _version(tree: Tree, path: str) -> str | None:
    """Return `12.6` from version.json, else from the folder's name."""
    try:
        version = json.loads(tree.text(f"{path}/version.json") or "{}")["cuda"]["version"]
        return ".".join(str(version).split(".")[:2])
    except (ValueError, KeyError, TypeError, RecursionError):
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
