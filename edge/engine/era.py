"""Which spelling of the command line a llama-server understands. Pure: --help and build/llama-server.toml decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.engine.engine import Flag

NEWEST = "load-mode"


def era_of(flags: Mapping[str, Flag], eras: Mapping[str, Mapping[str, Any]]) -> str:
    """The first era whose conditions hold; the newest when none does (an unknown future is nearest to today)."""
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
