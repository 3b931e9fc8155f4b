"""List the files of an installation with their text; reads only edgellm's own data folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.resources import data_dir
from edge.service.unitfile import DROP_IN, drop_ins
from edge.service.wish import UnitSettings

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
PREPARING = (SYSUSERS, JTOP_SYSUSERS, TMPFILES)  # users and folders: the other steps need them


@dataclass(frozen=True, slots=True)
class UnitFile:
    """One file of the installation. `path` is relative to the root folder."""

    path: Path
    text: str


def files(settings: UnitSettings) -> tuple[UnitFile, ...]:
    """Return users, folders, units, drop-ins and power.toml."""
    source = data_dir("systemd")

    def read(name: str) -> str:
        return (source / name).read_text(encoding="utf-8")

    wanted = [unit for unit in UNITS if settings.jtop or unit != "edgellm-jtop.service"]
    units = [UnitFile(UNIT_DIR / unit, read(unit)) for unit in wanted]
    changed = [UnitFile(drop_in(unit), text) for unit, text in drop_ins(settings).items() if unit in wanted]
    users = [UnitFile(SYSUSERS, read("edgellm.sysusers"))]
    if settings.jtop:
        users.append(UnitFile(JTOP_SYSUSERS, read("edgellm-jtop.sysusers")))
    power = [UnitFile(POWER, power_text(settings.power_mode))] if settings.power_mode else []
    return (*users, UnitFile(TMPFILES, read("edgellm.tmpfiles")), *units, *changed, *power)


def all_paths() -> tuple[Path, ...]:
    """Return every path that `install` may have written. power.toml is configuration and stays."""
    units = [path for unit in UNITS for path in (UNIT_DIR / unit, drop_in(unit))]
    return (*units, SYSUSERS, JTOP_SYSUSERS, TMPFILES)


def drop_in(unit: str) -> Path:
    """Return the path of the installer's drop-in for a unit."""
    return UNIT_DIR / f"{unit}.d" / DROP_IN


def power_text(mode: str) -> str:
    """Return power.toml for one power mode, with the other keys of `edge.service.power` as comments."""
    import tomli_w

    return (
        "# Set by edgellm-power.service at boot; it reads nothing else.\n"
        + tomli_w.dumps({"schema": 1, "mode": mode})
        + "# restore = true        # put the former settings back when the unit stops\n"
        "# jetson_clocks = true  # lock the clocks at their maximum\n"
        "# persistence = true    # discrete GPUs: keep the driver loaded\n"
    )
