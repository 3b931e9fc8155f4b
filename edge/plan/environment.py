"""Build the engine's whole environment from an allow-list: an inherited LLAMA_ARG_* would undo the plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge.engine.engine import Engine

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# CUDA's upper limit. The default is smaller than what one llama.cpp compiles from PTX, which would repeat every start.
_CUDA_CACHE_MAX_BYTES = 4 * 1024**3
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """Paths of this installation that the environment names."""

    home: str
    cache: str  # edgellm's cache folder
    wsl: bool = False


def environment(
    engine: Engine, facts: EnvFacts, *, gpus: tuple[str, ...] | None = None, managed_memory: bool = False
) -> dict[str, str]:
    """Return the environment. `gpus`: UUIDs that CUDA may see; () hides all, None leaves it open (integrated GPU)."""
    env = {
        "PATH": _PATH,
        "HOME": facts.home,
        "LC_ALL": "C",
        "XDG_CACHE_HOME": facts.cache,
        "LLAMA_CACHE": f"{facts.cache}/llama.cpp",
    }
    if engine.progress_protocol:
        env["LLAMA_SERVER_ROUTER_PORT"] = "1"  # any value: progress lines on stdout
    for off in engine.without:
        env |= off.environment
    libraries = [path for path in (engine.library_path, "/usr/lib/wsl/lib" if facts.wsl else None) if path]
    if libraries:
        env["LD_LIBRARY_PATH"] = ":".join(libraries)
    if engine.cuda:
        env |= {
            "CUDA_CACHE_PATH": f"{facts.cache}/cuda",
            "CUDA_CACHE_MAXSIZE": str(_CUDA_CACHE_MAX_BYTES),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_MODULE_LOADING": "LAZY",
        }
        if gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if managed_memory:
            env["GGML_CUDA_ENABLE_UNIFIED_MEMORY"] = "1"
    return env


def redacted(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy for printing, without values whose names look like a secret."""
    return {
        name: "[hidden]" if any(word in name.upper() for word in _SECRET) else value
        for name, value in sorted(env.items())
    }
