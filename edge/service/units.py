"""The files of an installation: its recorded settings, the drop-ins made from them, and all paths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path, PurePosixPath

from msgspec import MsgspecError, Struct, convert, to_builtins

from edge.errors import UsageError
from edge.linux.files import read_json, write_atomic
from edge.linux.sockets import parse_address
from edge.resources import data_dir

# The settings of an installation; recorded beside the data for `diff` and the next `install`.

SCHEMA = 1
USER = "edgellm"
GROUP = "edgellm"
PREFIX = Path("/opt/edgellm")
PYTHON = str(PREFIX / "bin/python")
LISTEN = ("127.0.0.1:8080",)


class UnitSettings(Struct, frozen=True):
    """Everything that varies in the unit files."""

    python: str = PYTHON
    run_as: str = USER
    listen: tuple[str, ...] = LISTEN
    model_dirs: tuple[str, ...] = ()
    groups: tuple[
        str, ...
    ] = ()  # the existing ones of video and render: with an unknown group a unit fails (216/GROUP)
    jtop: bool = False
    prefetch: bool = False  # `edgellm bench load` found that reading ahead helps on this machine
    power_mode: str = ""
    rpc_listen: str = ""  # address of edgellm-rpc.service; empty: it is not installed
    rpc_interface: str = ""
    rpc_only: bool = False  # a board that lends memory and serves no model itself


def read_record(path: Path) -> UnitSettings | None:
    """Read the record of an installation; None where there is none or its schema is unknown."""
    try:
        document = read_json(path)
        if document["schema"] != SCHEMA:
            return None
        # Keys of a later version are ignored, those that are missing have their defaults.
        return convert(next(value for value in document.values() if isinstance(value, dict)), UnitSettings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, MsgspecError):
        return None


def record_text(settings: UnitSettings) -> str:
    """Return the text of the record."""
    return json.dumps({"schema": SCHEMA, "units": to_builtins(settings)}, indent=2) + "\n"


def write_record(path: Path, settings: UnitSettings) -> None:
    """Write the record; readable by all users, for `edgellm service diff`."""
    write_atomic(path, record_text(settings), 0o644)


HEAD = "# Written by `edgellm service install`. Your own changes go into another file of this folder.\n"
DROP_IN = "10-install.conf"
# Hidden by ProtectHome=yes, and by PrivateTmp=yes (systemd.exec(5)).
HOMES = ("/home", "/root", "/run/user")
TEMPORARY = ("/tmp", "/var/tmp")

Sections = dict[str, list[str]]


def quoted(text: str) -> str:
    """Quote one word of a unit file: spaces, quotes, `%`. Raises UsageError for control characters.

    `$` stays: systemd expands no variables in paths, nor in the first word of a command (systemd.service(5)).
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise UsageError(f"a unit file cannot hold a path with control characters: {text!r}", "rename it")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def drop_ins(settings: UnitSettings) -> dict[str, str]:
    """Return the text of 10-install.conf by unit, for the units that need one."""
    texts = {
        "edgellm.socket": drop_in_text({"Socket": _listen(settings.listen)}),
        "edgellm.service": drop_in_text(_service(settings)),
        "edgellm-ready.service": drop_in_text({"Service": [*_command(settings, "-m edge wait"), *_user(settings)]}),
        "edgellm-jtop.service": drop_in_text(
            {"Service": _command(settings, f"-m edge.telemetry.jtop_share --listen {SHARE}")}
        ),
        "edgellm-prefetch.service": drop_in_text(_prefetch(settings)),
        "edgellm-power.service": drop_in_text(
            {
                "Service": [
                    *_command(settings, "-m edge.service.power apply"),
                    *_command(settings, "-m edge.service.power restore", key="ExecStop"),
                ]
            }
        ),
    }
    if settings.rpc_listen:
        texts[RPC_UNIT] = drop_in_text({"Service": [*_groups(settings), *_rpc_command(settings), *_user(settings)]})
    # The usual machine needs almost no drop-in, so that `diff` shows what was decided for this one.
    return {unit: text for unit, text in texts.items() if text}


SHARE = "/run/edgellm-jtop/share.sock"


def drop_in_text(sections: Sections) -> str:
    """Return a drop-in, or an empty text without settings. systemd ignores lines above a [Section] (FC-79)."""
    parts = [f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items() if lines]
    return HEAD + "\n".join(parts) if parts else ""


def _listen(addresses: Sequence[str]) -> list[str]:
    if tuple(addresses) == LISTEN:
        return []
    # An empty assignment resets the list; otherwise the default address would be bound as well.
    return ["ListenStream=", *(f"ListenStream={endpoint(address)}" for address in addresses)]


def endpoint(address: str) -> str:
    """Return the value of ListenStream=, which takes IP addresses only; a bare port means loopback, as for `up`.

    Raises UsageError for a host name or a scope, ConfigError for what is no address at all.
    """
    host, port = parse_address(address)
    try:
        ip = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        ip = None
    if ip is None or getattr(ip, "scope_id", None):
        raise UsageError(f"a socket unit cannot listen on {address!r}", "use an IP address of this machine")
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


def _service(settings: UnitSettings) -> Sections:
    mounts = [unit for folder in settings.model_dirs for unit in mount_units(folder)]
    unit = [f"{key}={' '.join(dict.fromkeys(mounts))}" for key in ("Wants", "After") if mounts]
    lines = [*_command(settings, "-X faulthandler -m edge up"), *_user(settings), *_groups(settings)]
    return {"Unit": unit, "Service": [*lines, *_homes(settings)]}


def _groups(settings: UnitSettings) -> list[str]:
    """Return the groups that may open the GPU's device nodes."""
    return [f"SupplementaryGroups={' '.join(settings.groups)}"] if settings.groups else []


def _prefetch(settings: UnitSettings) -> Sections:
    # No client waits for this unit, so a failed mount cannot cause repeated starts here.
    folders = [quoted(folder) for folder in settings.model_dirs if not within(folder, HOMES)]
    unit = [f"RequiresMountsFor={' '.join(folders)}"] if folders else []
    command = _command(settings, "-m edge.daemon.boot_prefetch")
    return {"Unit": unit, "Service": [*command, *_user(settings), *_homes(settings)]}


def _homes(settings: UnitSettings) -> list[str]:
    """Return the lines that show model folders below /home; root binds them, so closed folders above do not matter."""
    # `-`: a missing one is no failure.
    bound = [f'BindReadOnlyPaths="-{quoted(folder)[1:]}' for folder in settings.model_dirs if within(folder, HOMES)]
    return ["ProtectHome=tmpfs", *bound] if bound else []


def mount_units(folder: str) -> list[str]:
    """Return every mount unit that `folder` may lie on: `/mnt/models` → mnt.mount, mnt-models.mount.

    They are wanted, never required: every waiting client restarts a unit whose required mount fails, 600 times a
    second (measured on systemd 252). The supervisor reports a folder that is missing after the mounts.
    """
    path = PurePosixPath(folder)
    return [f"{escaped(str(part))}.mount" for part in (*reversed(path.parents), path) if str(part) != "/"]


def escaped(path: str) -> str:
    """Escape a path as `systemd-escape --path`: slashes become dashes, other characters `\\xNN`."""
    parts = [part for part in path.split("/") if part]
    words = ["".join(c if c.isascii() and (c.isalnum() or c in ":_.") else _hex(c) for c in part) for part in parts]
    text = "-".join(words)
    return f"\\x2e{text[1:]}" if text.startswith(".") else text


def _hex(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def _command(settings: UnitSettings, rest: str, key: str = "ExecStart") -> list[str]:
    if settings.python == PYTHON:
        return []
    # The empty assignment removes the command of the unit file: a oneshot would run both, others refuse a second.
    return [f"{key}=", f"{key}={quoted(settings.python)} -I {rest}"]


def _rpc_command(settings: UnitSettings) -> list[str]:
    words = f"-m edge rpc serve --listen {settings.rpc_listen}"
    words += f" --interface {settings.rpc_interface}" if settings.rpc_interface else ""
    return ["ExecStart=", f"ExecStart={quoted(settings.python)} -I {words}"]


def _user(settings: UnitSettings) -> list[str]:
    # User= takes a bare name: quotes would become part of it (217/USER).
    return [] if settings.run_as == USER else [f"User={settings.run_as}", f"Group={GROUP}"]


def within(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path is one of these folders or lies below one."""
    parents = {str(part) for part in (PurePosixPath(path), *PurePosixPath(path).parents)}
    return any(folder in parents for folder in folders)


# List the files of an installation with their text; reads only edgellm's own data folder.

UNITS = (
    "edgellm.socket",
    "edgellm.service",
    "edgellm-ready.target",
    "edgellm-ready.service",
    "edgellm-jtop.service",
    "edgellm-prefetch.service",
    "edgellm-power.service",
    "edgellm-rpc.service",
)
RPC_UNIT = UNITS[-1]
UNIT_DIR = Path("etc/systemd/system")
SYSUSERS = Path("etc/sysusers.d/edgellm.conf")
JTOP_SYSUSERS = Path("etc/sysusers.d/edgellm-jtop.conf")
TMPFILES = Path("etc/tmpfiles.d/edgellm.conf")
POWER = Path("etc/edgellm/power.toml")
PREPARING = (SYSUSERS, JTOP_SYSUSERS, TMPFILES)  # users and folders: the other steps need them


class UnitFile(Struct, frozen=True):
    """One file of the installation. `path` is relative to the root folder."""

    path: Path
    text: str


def files(settings: UnitSettings) -> tuple[UnitFile, ...]:
    """Return users, folders, units, drop-ins and power.toml."""
    source = data_dir("systemd")

    def read(name: str) -> str:
        return (source / name).read_text(encoding="utf-8")

    jtop = settings.jtop and not settings.rpc_only
    optional = {
        "edgellm-jtop.service": jtop,
        "edgellm-prefetch.service": settings.prefetch,
        RPC_UNIT: bool(settings.rpc_listen),
    }
    wanted = [RPC_UNIT] if settings.rpc_only else [unit for unit in UNITS if optional.get(unit, True)]
    units = [UnitFile(UNIT_DIR / unit, read(unit)) for unit in wanted]
    changed = [UnitFile(drop_in(unit), text) for unit, text in drop_ins(settings).items() if unit in wanted]
    users = [UnitFile(SYSUSERS, read("edgellm.sysusers"))]
    if jtop:
        users.append(UnitFile(JTOP_SYSUSERS, read("edgellm-jtop.sysusers")))
    # Only on demand: with the file the unit's condition is met, and root changes the machine at boot.
    power = [UnitFile(POWER, power_text(settings.power_mode))] if settings.power_mode and not settings.rpc_only else []
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
