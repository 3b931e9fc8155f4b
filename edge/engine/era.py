"""Determine a llama-server's era, the spelling of its command line, by --help and build/llama-server.toml. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge.engine.engine import Flag

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
