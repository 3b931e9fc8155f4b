"""Which files an installation consists of, with their text. Pure but for reading our own data folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.resources import data_dir
from edge.service.unitfile import DROP_IN, drop_ins
from edge.service.wish import Wish

UNITS = (
    "edgellm.socket",
    "edgellm.service",
    "edgellm-ready.target",
    "edgellm-ready.service",
    "edgellm-jtop.service",
    "edgellm-power.service",
)
UNIT_DIR = Path("etc/systemd/system")
SYSUSERS = Path("etc/sysusers.d/edgellm.conf")
JTOP_SYSUSERS = Path("etc/sysusers.d/edgellm-jtop.conf")
TMPFILES = Path("etc/tmpfiles.d/edgellm.conf")
POWER = Path("etc/edgellm/power.toml")
PREPARING = (SYSUSERS, JTOP_SYSUSERS, TMPFILES)  # needed before anything else can be done


@dataclass(frozen=True, slots=True)
class File:
    """One file of the installation. `path` is relative to the root folder."""

    path: Path
    text: str


def files(wish: Wish) -> tuple[File, ...]:
    """Units, their drop-ins, users and folders."""
    source = data_dir("systemd")

    def read(name: str) -> str:
        return (source / name).read_text(encoding="utf-8")

    wanted = [unit for unit in UNITS if wish.jtop or unit != "edgellm-jtop.service"]
    units = [File(UNIT_DIR / unit, read(unit)) for unit in wanted]
    changed = [File(drop_in(unit), text) for unit, text in drop_ins(wish).items() if unit in wanted]
    users = [File(SYSUSERS, read("edgellm.sysusers"))]
    if wish.jtop:
        users.append(File(JTOP_SYSUSERS, read("edgellm-jtop.sysusers")))
    power = [File(POWER, power_text(wish.power_mode))] if wish.power_mode else []
    return (*users, File(TMPFILES, read("edgellm.tmpfiles")), *units, *changed, *power)


def all_paths() -> tuple[Path, ...]:
    """Everything that any installation may have written, for its removal. Not power.toml: that is configuration."""
    units = [path for unit in UNITS for path in (UNIT_DIR / unit, drop_in(unit))]
    return (*units, SYSUSERS, JTOP_SYSUSERS, TMPFILES)


def drop_in(unit: str) -> Path:
    return UNIT_DIR / f"{unit}.d" / DROP_IN


def power_text(mode: str) -> str:
    return (
        "# What edgellm-power.service sets at boot. It reads nothing else.\n"
        "schema = 1\n"
        f'mode = "{mode}"      # by its name in /etc/nvpmodel.conf\n'
        "# restore = true     # what was set before comes back when the unit stops\n"
        "# clocks = true       # jetson_clocks\n"
        "# persistence = true # discrete GPUs: keep the driver loaded\n"
    )
