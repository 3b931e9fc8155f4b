"""Parse nvpmodel's state files, without its process and without root. Pure."""

from __future__ import annotations

import re

from edge.board.board import PowerMode

_ACTIVE = re.compile(r"\bpmode:\s*(\d+)")
_MODEL = re.compile(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)\s*>")
_DEFAULT = re.compile(r"<\s*PM_CONFIG\s+DEFAULT=(\d+)\s*>")


def modes(conf: str) -> tuple[PowerMode, ...]:
    """Return every mode of /etc/nvpmodel.conf. Ids differ by module and image (FC-43)."""
    return tuple(PowerMode(int(number), name) for number, name in _MODEL.findall(conf))


def active(status: str | None, conf: str | None) -> PowerMode | None:
    """Return the mode of `/var/lib/nvpmodel/status` (`pmode:0002 fmode:fanNull`), else the conf's default."""
    known = {mode.id: mode for mode in modes(conf or "")}
    match = _ACTIVE.search(status or "") or _DEFAULT.search(conf or "")
    if match is None:
        return None
    number = int(match[1])
    return known.get(number) or PowerMode(number, f"mode {number}")
