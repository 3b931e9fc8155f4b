"""What `edgellm service install` was told, and what that means for the units of this machine."""

from __future__ import annotations

import grp
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge.errors import ConfigError, UsageError
from edge.folders import Folders, system_folders
from edge.listen import parse_address
from edge.service import program, wish
from edge.service.config_file import NAME, base
from edge.service.disk import user_exists
from edge.service.unitfile import TEMPORARY, within
from edge.service.wish import Wish

GPU_GROUPS = ("video", "render")
RECORD = "service.json"
ETC = Path("etc/edgellm")


@dataclass(frozen=True, slots=True)
class Request:
    """`source`: whose engine, models and configuration are taken over. Files go below `root`."""

    source: Folders
    profile: str | None = None
    models: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()
    run_as: str = wish.USER
    model_dirs: tuple[Path, ...] = ()
    offline: Path | None = None
    power_mode: str = ""
    caller_uid: int = 0  # who called sudo
    root: Path = field(default=Path("/"))

    @property
    def configurations(self) -> tuple[Path, ...]:
        """The first that exists is what the service's configuration starts from."""
        offered = (self.offline / NAME,) if self.offline else ()
        return (self.root / ETC / NAME, *offered, self.source.config / NAME)


def wanted(request: Request, wheels: Path | None = None) -> Wish:
    """Raises UsageError and ConfigError for what a service cannot do."""
    for folder in request.model_dirs:
        if within(str(folder), TEMPORARY):
            raise UsageError(f"the service cannot see {folder} (PrivateTmp)", "keep the models elsewhere")
    if request.run_as in ("root", "0"):
        raise UsageError("edgellm does not run as root", "leave --run-as out: it gets a user of its own")
    if request.run_as != wish.USER and not user_exists(request.run_as):
        raise ConfigError(f"there is no user {request.run_as!r}", "name an existing user with --run-as")
    before = wish.read(system_folders().data / RECORD) or Wish()
    return Wish(
        python=program.service_python(wheels=wheels),
        run_as=request.run_as,
        listen=_addresses(request) or before.listen,
        model_dirs=tuple(map(str, request.model_dirs)) or before.model_dirs,
        groups=existing(GPU_GROUPS),
        jtop=bool(existing(("jtop",))),
        power_mode=request.power_mode or before.power_mode,
    )


def _addresses(request: Request) -> tuple[str, ...]:
    """systemd owns the socket, so that the configuration's addresses become the unit's."""
    configured, _ = base(request.configurations)
    given = request.listen or tuple(configured.get("listen", ()))
    for address in given:
        parse_address(address)
    return tuple(given)


def existing(names: Sequence[str]) -> tuple[str, ...]:
    """A group that does not exist keeps a unit from starting (status 216/GROUP)."""
    known = {group.gr_name for group in grp.getgrall()}
    return tuple(name for name in names if name in known)
