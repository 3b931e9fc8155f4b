"""Choose among several CUDA toolkits and host compilers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge.engine.tools import Tool, Toolkit

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of the preflight. `verdict` is ok, warn or fail."""

    name: str
    verdict: str
    sentence: str
    hint: str | None = None


def numbers(text: str) -> tuple[int, ...]:
    """Parse a version: `"12.6"` → (12, 6)."""
    return tuple(int(part) for part in text.split("."))


def choose_toolkit(
    toolkits: tuple[Toolkit, ...],
    board: tuple[int, ...] | None,
    cuda_min: tuple[int, ...],
    cuda_proven: tuple[int, ...],
) -> tuple[Toolkit | None, Finding]:
    """Choose this JetPack's toolkit, else the nearest older, else the nearest newer of the same major (FC-05)."""
    if not toolkits:
        return None, Finding(
            "toolkit",
            FAIL,
            "no nvcc is installed, neither on PATH nor under /usr/local/cuda*",
            "sudo apt install cuda-toolkit (JetPack: sudo apt install nvidia-jetpack); without a GPU: --recipe cpu",
        )
    best = min(toolkits, key=lambda kit: _distance(kit.version, board))
    listed = f" (found {', '.join(kit.text for kit in toolkits)})" if len(toolkits) > 1 else ""
    name = f"CUDA {best.text} at {best.nvcc}{listed}"
    if best.version < cuda_min:
        need = ".".join(map(str, cuda_min))
        hint = "use the CPU build (edgellm build -p cpu), or install a newer toolkit if the driver allows it"
        return None, Finding("toolkit", FAIL, f"CUDA {best.text} is too old: llama.cpp needs {need} or newer", hint)
    if board is not None and best.version[0] > board[0]:
        own = ".".join(map(str, board))
        hint = (
            f"install the toolkit that belongs to the driver: sudo apt install cuda-toolkit-{'-'.join(map(str, board))}"
        )
        return None, Finding("toolkit", FAIL, f"{name} is newer than the driver, which serves CUDA {own}", hint)
    if board is not None and best.version[:2] != board[:2]:
        own = ".".join(map(str, board))
        return best, Finding("toolkit", WARN, f"{name}; this system's own is {own}: minor versions usually work")
    if best.version < (12, 0) <= cuda_proven:
        return best, Finding("toolkit", WARN, f"{name}; llama.cpp with CUDA 11 is unproven")
    return best, Finding("toolkit", OK, name)


def _distance(version: tuple[int, ...], board: tuple[int, ...] | None) -> tuple[int, int]:
    """Return a sort key: the same version, older of the major, newer of the major, older majors, newer majors."""
    ordinal = version[0] * 1000 + version[1]
    if board is None:
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
) -> tuple[Tool | None, Finding]:
    """Choose the default g++ if this nvcc supports it, else the newest installed one that it supports."""
    most = int(toolkit_row(toolkit.version, table)["gcc_max"])
    fitting = [tool for tool in compilers if gcc_min <= tool.version[0] <= most]
    if fitting and fitting[0] == compilers[0]:
        return fitting[0], Finding("compiler", OK, f"gcc {fitting[0].text}")
    if fitting:
        best = max(fitting, key=lambda tool: tool.version)
        return best, Finding(
            "compiler", OK, f"gcc {best.text} for nvcc: the default one does not suit CUDA {toolkit.text}"
        )
    installed = ", ".join(tool.text for tool in compilers) or "none"
    sentence = f"CUDA {toolkit.text} takes gcc {gcc_min} to {most}; installed: {installed}"
    return None, Finding("compiler", FAIL, sentence, f"sudo apt install g++-{most}")
