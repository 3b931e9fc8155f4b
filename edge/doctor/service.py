"""Checks of the systemd unit and its surroundings, and how their facts are read."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from pathlib import Path

from edge.doctor.check import Finding, bad, ok, unknown, warn
from edge.doctor.facts import DoctorFacts, DropIn, Port, UnitState
from edge.errors import ConfigError
from edge.linux.procfs import PROC, listening_sockets, lock_holders, socket_owner
from edge.linux.sockets import parse_address
from edge.linux.systemctl import booted
from edge.linux.tree import Tree
from edge.service.drop_ins import FOLDERS, HOME_HIDDEN, conflicts, directives, drop_in_paths

# No edgellm is older: a clock before this has lost its battery and starts at the epoch or the image's build date.
_EARLY = datetime(2025, 1, 1, tzinfo=timezone.utc).timestamp()
_SLACK_S = 24 * 3600.0  # file times of an image may be in another time zone
# Languages whose LC_NUMERIC has a comma (glibc locales).
_DECIMAL_COMMA = ("de", "fr", "es", "it", "pt", "nl", "pl", "ru", "tr", "cs", "sv", "nb", "fi", "da", "uk", "id", "vi")


def unit(facts: DoctorFacts) -> Finding | None:
    """Check that edgellm.service is enabled and runs, where it is installed."""
    if not facts.live:
        return None
    if not facts.systemd:
        return unknown(
            "systemd does not run here: no autostart", "start `edgellm up` from this machine's own init system"
        )
    found = facts.units.get("edgellm.service")
    if found is None:
        return unknown("systemctl does not answer")
    if found.load == "not-found":
        return ok("not installed as a service (`edgellm service install` does)")
    if found.active == "failed":
        says = f"edgellm.service failed ({found.result or 'no result'})"
        return bad(says, "see why", "journalctl -u edgellm -n 50 --no-pager")
    again = f", restarted {found.restarts} times" if found.restarts else ""
    # An empty UnitFileState is a unit that was generated or is transient: it cannot be enabled.
    if found.file_state not in ("enabled", "enabled-runtime", "static", ""):
        return warn(
            f"edgellm.service is {found.active} but {found.file_state}",
            "enable it to start at boot",
            "sudo systemctl enable edgellm",
        )
    if found.active not in ("active", "activating", "reloading"):
        return warn(f"edgellm.service is {found.active}", "start it", "sudo systemctl start edgellm.socket edgellm")
    return ok(f"edgellm.service is {found.active}{again}")


def drop_ins(facts: DoctorFacts) -> Finding | None:
    """Find settings that hide the GPU (FC-76) or the models, and lines that systemd ignores (FC-79)."""
    if not facts.drop_ins:
        return None
    for file in facts.drop_ins:
        for conflict in conflicts(file.text, gpu=bool(facts.board.gpus)):
            return bad(f"{file.path}: {conflict}", "correct that line", "sudo systemctl edit edgellm.service")
        hidden = any(name == "ProtectHome" and value.lower() in HOME_HIDDEN for _, name, value in directives(file.text))
        if hidden and facts.models.path.parts[1:2] == ("home",):
            says = f"{file.path}: ProtectHome= hides the model folder {facts.models.path}"
            return bad(says, "move the models, or set ProtectHome=read-only")
    return ok(f"{len(facts.drop_ins)} unit files, none hides the GPU or the models")


def port(facts: DoctorFacts) -> tuple[Finding, ...]:
    """Name the process that holds a configured address (FC-34)."""
    return tuple(map(_port, facts.ports))


def _port(held: Port) -> Finding:
    if held.pid is None:
        return ok(f"{held.address} is free")
    owner = f"{held.name} (pid {held.pid})" if held.pid else "another user's process"
    if held.ours:
        return ok(f"{held.address} is held by edgellm: {owner}")
    number = parse_address(held.address)[1]
    step = "stop it, or listen elsewhere with --listen"
    return bad(f"{held.address} is taken by {owner}", step, f"sudo ss -ltnp 'sport = :{number}'")


def jtop(facts: DoctorFacts) -> Finding | None:
    """Tell apart three faults of jtop's socket (FC-68). None stops serving: telemetry reads sysfs as well."""
    if facts.board.soc is None or facts.jtop is None or not facts.live:
        return None
    unit, source = facts.units.get("jtop.service"), "telemetry comes from sysfs"
    # `docker run -v /run/jtop.sock:…` creates a folder on the host where the socket does not exist yet.
    if facts.jtop.socket == "folder":
        step = "remove the folder and mount the socket after jtop.service has started"
        return warn(
            f"/run/jtop.sock is a folder; {source}", step, "sudo rmdir /run/jtop.sock && sudo systemctl restart jtop"
        )
    if facts.jtop.socket == "absent":
        if unit is None or unit.load == "not-found":
            return ok(f"jetson-stats is not installed; {source}")
        return warn(
            f"jtop.service is {unit.active}; {source}",
            "jtop exits with status 0 when it fails, so systemd does not restart it: set Restart=always",
            "sudo systemctl restart jtop",
        )
    if not facts.jtop.reachable:
        group = facts.jtop.group or "jtop"
        step = "optional: only the telemetry reader needs that group, which is equivalent to root"
        return ok(f"{facts.devices.user} may not open its socket (group {group}); {source}. {step}")
    return ok("jtop.service answers")


def home(facts: DoctorFacts) -> Finding | None:
    """Check that the cache folder can be written: the engine's HOME and caches lie in it (FC-77)."""
    if not facts.live:
        return None
    if not facts.environment.cache_writable:
        return bad(
            "the cache folder cannot be written", "give it to the serving user, or choose another with --state-dir"
        )
    return ok("the engine gets its own home and cache folders")


def install_place(facts: DoctorFacts) -> Finding | None:
    """Warn of an installation below /home, which the hardened unit cannot see (ProtectHome=)."""
    prefix = facts.environment.prefix
    if not facts.live or not facts.systemd:
        return None
    if prefix.startswith(("/home/", "/root/")):
        return warn(
            f"this edgellm is installed in {prefix}",
            "fine for `edgellm up`; a system service needs it outside /home",
            "sudo edgellm service install",
        )
    return ok(f"installed in {prefix}")


def clock(facts: DoctorFacts) -> Finding | None:
    """Find a clock in the past, as on boards without a battery: TLS and make fail under it (FC-13)."""
    about = facts.environment
    if not facts.live:
        return None
    shown = datetime.fromtimestamp(about.now_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    # edgellm itself measures on the monotonic clock: only TLS, make and file times suffer.
    past = about.now_s < _EARLY or (about.newest_file_s or 0) > about.now_s + _SLACK_S
    if past:
        return bad(
            f"the clock is wrong: {shown}",
            "set it before building or fetching anything",
            "sudo timedatectl set-ntp true",
        )
    if about.time_synchronised is False:
        return ok(f"{shown}, not synchronised yet")
    return ok(shown)


def locale(facts: DoctorFacts) -> Finding | None:
    """Warn of an output encoding other than UTF-8. The engine itself runs under LC_ALL=C: its log has no commas."""
    if not facts.live:
        return None
    about = facts.environment
    if about.encoding.upper().replace("-", "") not in ("UTF8", "UTF"):
        return warn(
            f"{about.locale}: output is {about.encoding}",
            "names that are not ASCII are printed wrong: use a UTF-8 locale",
            "export LC_ALL=C.UTF-8",
        )
    comma = about.locale.lower().startswith(_DECIMAL_COMMA)
    return ok(about.locale + ("; the engine runs under LC_ALL=C, so its log has decimal points" if comma else ""))


CHECKS = {
    "service.unit": unit,
    "service.drop_ins": drop_ins,
    "service.port": port,
    "service.jtop": jtop,
    "service.home": home,
    "service.path": install_place,
    "service.clock": clock,
    "service.locale": locale,
}


# Read systemd units with one `systemctl show`, and the text of edgellm.service with its drop-ins.

OURS = ("edgellm.service", "edgellm.socket")
WATCHED = (*OURS, "jtop.service", "nvidia-persistenced.service")
_PROPERTIES = "Id,LoadState,ActiveState,UnitFileState,Result,NRestarts"
_TIMEOUT_S = 3.0  # PID 1 answers within milliseconds, or not at all


def read_units(tree: Tree, systemctl: str = "systemctl") -> dict[str, UnitState]:
    """Return the watched units by name; empty where systemd does not run or answer within 3 s."""
    if not tree.live or not booted(tree.root):
        return {}
    command = [systemctl, "show", f"--property={_PROPERTIES}", *WATCHED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_show(done.stdout)


def parse_show(text: str) -> dict[str, UnitState]:
    """Parse blocks of KEY=VALUE lines that are separated by empty lines."""
    units = {}
    for block in text.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" not in fields:
            continue
        restarts = fields.get("NRestarts", "0")
        units[fields["Id"]] = UnitState(
            name=fields["Id"],
            load=fields.get("LoadState", ""),
            active=fields.get("ActiveState", ""),
            file_state=fields.get("UnitFileState", ""),
            result=fields.get("Result", ""),
            restarts=int(restarts) if restarts.isdecimal() else 0,
        )
    return units


def unit_files(tree: Tree) -> tuple[DropIn, ...]:
    """Return edgellm.service and its drop-ins as systemd applies them; empty where it is not installed."""
    unit = [path for folder in FOLDERS if tree.exists(path := f"{folder}/edgellm.service")][:1]
    paths = [*unit, *drop_in_paths("edgellm.service", tree)]
    return tuple(DropIn(path, tree.text(path) or "") for path in paths)


# Find the owners of the configured addresses in /proc, without sending a packet.


def read_ports(listen: tuple[str, ...], lock: Path, service_active: bool, proc: Path = PROC) -> tuple[Port, ...]:
    """Return the owner of each address. The process that holds `lock` is edgellm itself.

    For an active service systemd (pid 1) holds the port, or a process that /proc hides from this user (pid 0).
    """
    ports = []
    taken, holders = list(listening_sockets(proc)), lock_holders(lock, proc)
    for address in listen:
        try:
            host, number = parse_address(address)
        except ConfigError:  # `up` names it
            continue
        inode = next((s.inode for s in taken if s.port == number and _overlap(host, s.address)), None)
        if inode is None:
            ports.append(Port(address))
            continue
        owner = socket_owner({inode}, proc)
        # /proc/PID/fd of other users is closed: a socket without a visible owner is not free.
        pid, name = (owner.pid, owner.name) if owner else (0, None)
        ports.append(Port(address, pid, name, pid in holders or (pid in (0, 1) and service_active)))
    return tuple(ports)


def _overlap(host: str, ip: str) -> bool:
    """Return whether binding `host` collides with a listener on `ip`. `::` takes IPv4 too, the default of Linux."""
    wild = ("0.0.0.0", "::")
    return host in wild or ip in wild or host == ip or (host == "localhost" and ip in ("127.0.0.1", "::1"))
