"""Find the compilers and tools of this machine and read their versions."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from edge.engine.tools import Tool, Toolchain, Toolkit

# `nvcc --version` takes 0.1 s; a wrapper that waits for a license server must not stop the plan.
_TIMEOUT_S = 10.0
_CUDA_RELEASE = re.compile(r"release (\d+)\.(\d+)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)+|\d+")
# `nvcc --list-gpu-arch`: compute_87, compute_90a, compute_100f.
_ARCH = re.compile(r"compute_(\d+)[af]?")
# nvidia-smi may print a sentence in place of a number (FC-02).
_CAPABILITY = re.compile(r"\d{1,2}\.\d")

Run = Callable[[list[str]], str | None]


def survey(
    environment: Mapping[str, str],
    root: Path = Path("/"),
    *,
    cuda: bool,
    tools_dir: Path | None = None,
    machine: str | None = None,
) -> Toolchain:
    """Search PATH, and JetPack's folders for nvcc. `tools_dir` holds fetched tools and comes first."""
    path = _search_path(environment, root, tools_dir)
    run = _runner(environment, path)
    compilers = [environment["CXX"]] if environment.get("CXX") else ["c++", "g++"]
    older = [f"g++-{number}" for number in range(16, 7, -1)]
    return Toolchain(
        machine=machine or os.uname().machine,
        cmake=_tool("cmake", path, run),
        ninja=_tool("ninja", path, run) or _tool("ninja-build", path, run),
        cc=_tool(environment.get("CC") or "cc", path, run, "-dumpfullversion", "-dumpversion"),
        cxx=_compilers([*compilers, *older], path, run),
        ccache=_tool("ccache", path, run),
        toolkits=find_toolkits(environment, root, run) if cuda else (),
    )


def find_toolkits(environment: Mapping[str, str], root: Path, run: Run) -> tuple[Toolkit, ...]:
    """Find every nvcc: PATH, CUDA_HOME, CUDACXX, /usr/local/cuda, /usr/local/cuda-*. (FC-01)"""
    folders = [Path(entry) for entry in environment.get("PATH", "").split(":") if entry]
    folders += [Path(environment[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    folders += [Path(environment["CUDACXX"]).parent] if environment.get("CUDACXX") else []
    local = root / "usr/local"
    folders += [local / "cuda/bin", *sorted((entry / "bin" for entry in local.glob("cuda-*")), reverse=True)]
    folders += [root / "usr/lib/nvidia-cuda-toolkit/bin", root / "opt/cuda/bin"]
    found: dict[Path, Toolkit] = {}
    for folder in folders:
        nvcc = folder / "nvcc"
        real = nvcc.resolve()
        if real in found or not os.access(nvcc, os.X_OK):
            continue
        toolkit = _toolkit(nvcc, run)
        if toolkit is not None:
            found[real] = toolkit
    # A wrapper on PATH and the toolkit it belongs to are one; cmake wants the one with its headers beside it.
    return tuple(
        kit
        for kit in found.values()
        if _whole(kit) or not any(other.version == kit.version and _whole(other) for other in found.values())
    )


def _whole(toolkit: Toolkit) -> bool:
    return (Path(toolkit.nvcc).parent.parent / "nvvm").is_dir()


def _toolkit(nvcc: Path, run: Run) -> Toolkit | None:
    release = _CUDA_RELEASE.search(run([str(nvcc), "--version"]) or "")
    if release is None:
        return None
    listed = run([str(nvcc), "--list-gpu-arch"]) or ""
    archs = tuple(sorted({int(number) for number in _ARCH.findall(listed)}))
    return Toolkit(str(nvcc), (int(release[1]), int(release[2])), archs)


def gpu_capabilities(run: Run) -> tuple[str, ...]:
    """Read each GPU's compute capability from nvidia-smi; a sentence or [N/A] is not a number (FC-02)."""
    text = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]) or ""
    lines = [line.strip() for line in text.splitlines()]
    return tuple(dict.fromkeys(line for line in lines if _CAPABILITY.fullmatch(line)))


def ask_gpu(environment: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """Return the compute capabilities of the installed GPUs, ("9.0",); empty if no driver answers."""
    return gpu_capabilities(_runner(environment, _search_path(environment, root, None)))


def _search_path(environment: Mapping[str, str], root: Path, tools_dir: Path | None) -> list[str]:
    path = [entry for entry in environment.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":") if entry]
    fetched = [str(tools_dir / "bin")] if tools_dir else []
    return [*fetched, *path, *([str(root / "usr/bin")] if root != Path("/") else [])]


def _runner(environment: Mapping[str, str], path: list[str]) -> Run:
    env = {**environment, "PATH": ":".join(path), "LC_ALL": "C"}

    def run(command: list[str]) -> str | None:
        """Return stdout, None if the program is absent, fails, or does not answer in time."""
        program = command[0] if "/" in command[0] else _which(command[0], path)
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                env=env,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    return run


def _which(name: str, path: Iterable[str]) -> str | None:
    for folder in path:
        candidate = Path(folder) / name
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    return None


def _tool(name: str, path: list[str], run: Run, *flags: str) -> Tool | None:
    program = name if "/" in name else _which(name, path)
    if program is None:
        return None
    answer = run([program, *(flags or ("--version",))])
    numbers = _NUMBERS.search(answer or "")
    return Tool(program, tuple(int(part) for part in numbers[0].split("."))) if numbers else None


def _compilers(names: list[str], path: list[str], run: Run) -> tuple[Tool, ...]:
    found: dict[str, Tool] = {}
    for name in names:
        tool = _tool(name, path, run, "-dumpfullversion", "-dumpversion")
        if tool is not None:
            found.setdefault(str(Path(tool.path).resolve()), tool)
    return tuple(found.values())
