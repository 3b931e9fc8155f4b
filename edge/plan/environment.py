"""The child's whole environment, from an allow-list: nothing is inherited (LLAMA_ARG_* would undo the plan). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge.engine.engine import Engine

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The most that CUDA takes. Its default is smaller than what one llama.cpp can compile.
_CUDA_CACHE_MAX_BYTES = 4 * 1024**3
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What the environment is built from: paths of this installation."""

    home: str
    cache: str  # edgellm's cache folder
    wsl: bool = False


def environment(
    engine: Engine, facts: EnvFacts, *, gpus: tuple[str, ...] | None = None, managed_memory: bool = False
) -> dict[str, str]:
    """`gpus`: UUIDs of the discrete GPUs the child may see, () hides all, None says nothing (integrated GPU)."""
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
    """For printing: what may be a secret is hidden."""
    return {
        name: "[hidden]" if any(word in name.upper() for word in _SECRET) else value
        for name, value in sorted(env.items())
    }
