"""Find the compilers and tools of this machine and read their versions."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

# Programs that build an engine. Values only.


def numbers(text: str) -> tuple[int, ...]:
    """Parse a version: `"12.6"` → (12, 6)."""
    return tuple(int(part) for part in text.split("."))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


class Tool(Struct, frozen=True):
    """One program. `version` compares as numbers: (3, 25, 1)."""

    path: str
    version: tuple[int, ...]

    @property
    def text(self) -> str:
        return dotted(self.version)


class Toolkit(Struct, frozen=True):
    """One CUDA toolkit. `archs`: what its nvcc lists, empty if it lists nothing."""

    nvcc: str
    version: tuple[int, ...]
    archs: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return dotted(self.version)


class Toolchain(Struct, frozen=True):
    """All tools of a machine. Absent is None or an empty tuple."""

    machine: str  # "x86_64", "aarch64"
    cmake: Tool | None = None
    ninja: Tool | None = None
    cc: Tool | None = None
    cxx: tuple[Tool, ...] = ()  # the default first, then g++-14, g++-13, …
    ccache: Tool | None = None
    toolkits: tuple[Toolkit, ...] = ()


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
    # Distributions install other majors beside the default one under these names.
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
    # cmake's variable for nvcc.
    folders += [Path(environment["CUDACXX"]).parent] if environment.get("CUDACXX") else []
    local = root / "usr/local"
    folders += [local / "cuda/bin", *sorted((entry / "bin" for entry in local.glob("cuda-*")), reverse=True)]
    folders += [root / "usr/lib/nvidia-cuda-toolkit/bin", root / "opt/cuda/bin"]
    found: dict[Path, Toolkit] = {}
    for folder in folders:
        nvcc = folder / "nvcc"
        # /usr/local/cuda is a link to one of the versioned folders: one toolkit, listed once.
        real = nvcc.resolve()
        if real in found or not os.access(nvcc, os.X_OK):
            continue
        toolkit = _toolkit(nvcc, run)
        if toolkit is not None:
            found[real] = toolkit
    # A wrapper on PATH and the toolkit it belongs to are one; cmake needs the one with its headers beside it.
    return tuple(
        kit
        for kit in found.values()
        if _whole(kit) or not any(other.version == kit.version and _whole(other) for other in found.values())
    )


def _whole(toolkit: Toolkit) -> bool:
    # nvvm/ holds cicc, the compiler that nvcc runs: a wrapper script has none beside it.
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
    # LC_ALL=C: version texts are parsed, and gcc translates them.
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
    found = _NUMBERS.search(answer or "")
    return Tool(program, numbers(found[0])) if found else None


def _compilers(names: list[str], path: list[str], run: Run) -> tuple[Tool, ...]:
    found: dict[str, Tool] = {}
    for name in names:
        tool = _tool(name, path, run, "-dumpfullversion", "-dumpversion")
        if tool is not None:
            found.setdefault(str(Path(tool.path).resolve()), tool)
    return tuple(found.values())


# Choose among several CUDA toolkits and host compilers. Pure.


class BuildFinding(Struct, frozen=True):
    """One finding of the preflight. `verdict` is ok, warn or fail."""

    name: str
    verdict: str
    sentence: str
    hint: str | None = None


def ok(name: str, sentence: str) -> BuildFinding:
    return BuildFinding(name, "ok", sentence)


def warn(name: str, sentence: str, hint: str | None = None) -> BuildFinding:
    return BuildFinding(name, "warn", sentence, hint)


def fail(name: str, sentence: str, hint: str) -> BuildFinding:
    return BuildFinding(name, "fail", sentence, hint)


def choose_toolkit(
    toolkits: tuple[Toolkit, ...],
    board: tuple[int, ...] | None,
    cuda_min: tuple[int, ...],
    cuda_proven: tuple[int, ...],
) -> tuple[Toolkit | None, BuildFinding]:
    """Choose this JetPack's toolkit, else the nearest older, else the nearest newer of the same major (FC-05)."""
    if not toolkits:
        return None, fail(
            "toolkit",
            "no nvcc is installed, neither on PATH nor under /usr/local/cuda*",
            "sudo apt install cuda-toolkit (JetPack: sudo apt install nvidia-jetpack); without a GPU: --recipe cpu",
        )
    best = min(toolkits, key=lambda kit: _distance(kit.version, board))
    listed = f" (found {', '.join(kit.text for kit in toolkits)})" if len(toolkits) > 1 else ""
    name = f"CUDA {best.text} at {best.nvcc}{listed}"
    if best.version < cuda_min:
        hint = "use the CPU build (edgellm build -p cpu), or install a newer toolkit if the driver allows it"
        too_old = f"CUDA {best.text} is too old: llama.cpp needs {dotted(cuda_min)} or newer"
        return None, fail("toolkit", too_old, hint)
    if board is not None and best.version[0] > board[0]:
        package = f"cuda-toolkit-{'-'.join(map(str, board))}"
        hint = f"install the toolkit that belongs to the driver: sudo apt install {package}"
        return None, fail("toolkit", f"{name} is newer than the driver, which serves CUDA {dotted(board)}", hint)
    if board is not None and best.version[:2] != board[:2]:
        return best, warn("toolkit", f"{name}; this system's own is {dotted(board)}: minor versions usually work")
    if best.version < (12, 0) <= cuda_proven:
        return best, warn("toolkit", f"{name}; llama.cpp with CUDA 11 is unproven")
    return best, ok("toolkit", name)


def _distance(version: tuple[int, ...], board: tuple[int, ...] | None) -> tuple[int, int]:
    """Return a sort key: the same version, older of the major, newer of the major, older majors, newer majors."""
    ordinal = version[0] * 1000 + version[1]
    if board is None:
        # No driver to fit: the newest.
        return (0, -ordinal)
    own = board[0] * 1000 + board[1]
    if version[0] == board[0]:
        return (0 if ordinal == own else 1 if ordinal < own else 2, abs(ordinal - own))
    return (3 if ordinal < own else 4, abs(ordinal - own))


def toolkit_row(version: tuple[int, ...], table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the newest row that is not newer than this toolkit, else the oldest row."""
    rows: list[Mapping[str, Any]] = sorted(table["toolkits"], key=lambda row: numbers(row["cuda"]))
    fitting = [row for row in rows if numbers(row["cuda"]) <= version]
    return fitting[-1] if fitting else rows[0]


def choose_host_compiler(
    compilers: tuple[Tool, ...], toolkit: Toolkit, gcc_min: int, table: Mapping[str, Any]
) -> tuple[Tool | None, BuildFinding]:
    """Choose the default g++ if this nvcc supports it, else the newest installed one that it supports."""
    most = int(toolkit_row(toolkit.version, table)["gcc_max"])
    fitting = [tool for tool in compilers if gcc_min <= tool.version[0] <= most]
    if fitting and fitting[0] == compilers[0]:
        return fitting[0], ok("compiler", f"gcc {fitting[0].text}")
    if fitting:
        best = max(fitting, key=lambda tool: tool.version)
        return best, ok("compiler", f"gcc {best.text} for nvcc: the default one does not suit CUDA {toolkit.text}")
    installed = ", ".join(tool.text for tool in compilers) or "none"
    sentence = f"CUDA {toolkit.text} takes gcc {gcc_min} to {most}; installed: {installed}"
    return None, fail("compiler", sentence, f"sudo apt install g++-{most}")
