"""An engine: a program that serves llama.cpp's HTTP API on a unix socket. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Flag(Struct, frozen=True):
    """One option of llama-server's --help. `arity` counts the values it takes; `spelling` is its longest name."""

    spelling: str
    arity: int
    values: tuple[str, ...] = ()  # where --help lists them


class Device(Struct, frozen=True):
    """One line of --list-devices."""

    id: str  # "CUDA0"
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None


class Acceleration(Struct, frozen=True):
    """An optimized code path of llama.cpp that can be switched off at start.

    A compiler detects CPU features that the kernel or the hypervisor does not let a process use, so a build can crash
    in its first graph while the same binary serves without one path. [proof] of build/llama-server.toml.
    """

    id: str
    args: tuple[str, ...]  # what switches it off
    environment: dict[str, str]
    lost: str  # the price of that, for a sentence


class Engine(Struct, frozen=True):
    """An engine. `kind` llama-server: `path` is the binary. `kind` embedded: `path` is a Python with xllamacpp."""

    id: str
    kind: str  # "llama-server" | "embedded"
    path: str
    version: str | None = None
    commit: str | None = None
    era: str = "load-mode"  # key of build/llama-server.toml: which spellings and log patterns
    flags: dict[str, Flag] = field(default_factory=dict)  # by every name: "--ctx-size" and "-c"
    devices: tuple[Device, ...] = ()
    cuda: bool = False
    built_for: tuple[int, ...] = ()  # CUDA architectures: (87,)
    no_vmm: bool | None = None
    progress_protocol: bool = True
    library_path: str | None = None  # LD_LIBRARY_PATH the child needs
    args: tuple[str, ...] = ()  # between `path` and the settings: the script of the embedded engine
    rpc: bool = False  # it can place layers on other machines: built with GGML_RPC
    assumed: bool = False  # not built yet: `flags` holds only what edgellm itself may give
    without: tuple[Acceleration, ...] = ()  # switched off at each start: this machine crashed with them at the proof

    def has(self, flag: str) -> bool:
        return flag in self.flags


# Determine a llama-server's era, the spelling of its command line, by --help and build/llama-server.toml. Pure.

# Unknown future builds are nearest to this one.
NEWEST = "load-mode"


def era_of(flags: Mapping[str, Flag], eras: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the first era whose conditions hold, else the newest: an unknown future build is nearest to it."""
    for name, era in eras.items():
        if _holds(flags, era):
            return name
    return NEWEST


def _holds(flags: Mapping[str, Flag], era: Mapping[str, Any]) -> bool:
    if any(flag not in flags for flag in era.get("requires", ())):
        return False
    if any(flag in flags for flag in era.get("absent", ())):
        return False
    return all(flag in flags and flags[flag].arity == arity for flag, arity in era.get("arity", {}).items())
