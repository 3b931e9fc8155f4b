"""The options of `edgellm service install`, and the unit settings that follow from them."""

from __future__ import annotations

import grp
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, field

from edge.board.device_nodes import GPU_GROUPS
from edge.config.devices import rpc_address
from edge.errors import ConfigError, UsageError
from edge.paths import Folders, system_folders
from edge.plan.choices import LoadChoice, choices_path, prefetch_helps
from edge.service import program
from edge.service.access import user_exists
from edge.service.config_file import NAME, read_base
from edge.service.units import TEMPORARY, USER, UnitSettings, endpoint, read_record, within

RECORD = "service.json"
ETC = Path("etc/edgellm")
# Names that User= takes without a warning (systemd's valid_user_group_name, relaxed), without `%`, a specifier there.
_USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}\$?")


class InstallRequest(Struct, frozen=True):
    """The options of an installation. `source`: folders whose engine, models and configuration are installed."""

    source: Folders
    profile: str | None = None
    models: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()
    run_as: str = USER
    model_dirs: tuple[Path, ...] = ()
    offline: Path | None = None
    power_mode: str = ""
    rpc_listen: str | None = None  # None: as recorded; empty: no edgellm-rpc.service
    rpc_interface: str = ""
    rpc_only: bool = False
    caller_uid: int = 0  # the user that called sudo
    root: Path = field(default=Path("/"))

    @property
    def configurations(self) -> tuple[Path, ...]:
        """Return the files that the service's configuration may start from; the first that exists counts."""
        offered = (self.offline / NAME,) if self.offline else ()
        return (self.root / ETC / NAME, *offered, self.source.config / NAME)


def unit_settings(request: InstallRequest, wheels: Path | None = None) -> UnitSettings:
    """Return the settings; options that are not given keep their recorded values.

    Raises UsageError and ConfigError for what a service cannot do.
    """
    for text in (request.power_mode, *map(str, request.model_dirs)):
        try:
            text.encode()
        except UnicodeEncodeError:  # neither a unit file nor TOML can hold it
            raise UsageError(f"not UTF-8: {text!a}", "rename it") from None
    for folder in request.model_dirs:
        if within(str(folder), TEMPORARY):
            raise UsageError(f"the service cannot see {folder} (PrivateTmp)", "keep the models elsewhere")
    if request.run_as in ("root", "0"):
        raise UsageError("edgellm does not run as root", "leave --run-as out: the service has its own user")
    if not _USER_NAME.fullmatch(request.run_as):
        raise UsageError(f"a unit file cannot name the user {request.run_as!r}", "name an existing user with --run-as")
    if request.run_as != USER and not user_exists(request.run_as):
        raise ConfigError(f"there is no user {request.run_as!r}", "name an existing user with --run-as")
    # Options that are left out keep what the last installation was given: a repeated `install` changes nothing.
    before = read_record(system_folders().data / RECORD) or UnitSettings()
    return UnitSettings(
        python=program.service_python(wheels=wheels),
        run_as=request.run_as,
        listen=_addresses(request) or before.listen,
        model_dirs=tuple(map(str, request.model_dirs)) or before.model_dirs,
        groups=existing_groups(GPU_GROUPS),
        jtop=not request.rpc_only and bool(existing_groups(("jtop",))),
        prefetch=prefetch_helps(*(choices_path(place, LoadChoice) for place in (system_folders(), request.source))),
        power_mode=request.power_mode or before.power_mode,
        rpc_only=request.rpc_only,
        **_rpc(request, before),
    )


_INTERFACE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")  # IFNAMSIZ of linux/if.h is 16, with a final zero


def _rpc(request: InstallRequest, before: UnitSettings) -> dict[str, str]:
    """Return the address of edgellm-rpc.service. Raises ConfigError for one that RPC may not use."""
    if request.rpc_only and not (request.rpc_listen or before.rpc_listen):
        raise UsageError("--rpc-only lends memory at an address", "name it: --rpc-listen 10.0.0.2:50052")
    if request.rpc_listen is None:
        return {"rpc_listen": before.rpc_listen, "rpc_interface": before.rpc_interface}
    if not request.rpc_listen:
        return {}
    if request.rpc_interface and not _INTERFACE_NAME.fullmatch(request.rpc_interface):
        raise UsageError(f"no name of a network interface: {request.rpc_interface!r}", "see `ip link`")
    address = rpc_address(request.rpc_listen, request.rpc_interface)
    return {"rpc_listen": str(address), "rpc_interface": request.rpc_interface}


def _addresses(request: InstallRequest) -> tuple[str, ...]:
    """Return the addresses of the socket unit: systemd binds them, not the configuration's reader."""
    configured, made_from = read_base(request.configurations)
    written = configured.get("listen", [])
    if not isinstance(written, list) or not all(isinstance(each, str) for each in written):
        raise ConfigError(f"{made_from}: listen wants a list of texts", 'listen = ["127.0.0.1:8080"]')
    given = request.listen or tuple(written)
    for address in given:
        endpoint(address)
    return tuple(given)


def existing_groups(names: Sequence[str]) -> tuple[str, ...]:
    """Return the groups that exist: an unknown group keeps a unit from starting (216/GROUP)."""
    known = {group.gr_name for group in grp.getgrall()}
    return tuple(name for name in names if name in known)
