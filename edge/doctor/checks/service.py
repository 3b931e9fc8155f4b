"""The service and what surrounds it: unit, port, jtop, PATH, clock, locale. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from edge.doctor.check import Check, bad, ok, unknown, warn
from edge.doctor.facts import Facts

# Hardening that takes the GPU away; the pattern is what a unit's line looks like.
_HIDES_GPU = {
    r"^PrivateDevices=\s*(yes|true|on|1)": "PrivateDevices hides the GPU's device nodes",
    r"^DevicePolicy=\s*(closed|strict)": "DevicePolicy keeps CUDA from the GPU's device nodes",
    r"^MemoryDenyWriteExecute=\s*(yes|true|on|1)": "MemoryDenyWriteExecute stops CUDA's just-in-time compiler",
}
_EARLY = datetime(2025, 1, 1, tzinfo=timezone.utc).timestamp()
_SLACK_S = 24 * 3600.0
_DECIMAL_COMMA = ("de", "fr", "es", "it", "pt", "nl", "pl", "ru", "tr", "cs", "sv", "nb", "fi", "da", "uk", "id", "vi")


def unit(facts: Facts) -> Check | None:
    if not facts.live:
        return None
    if not facts.systemd:
        return unknown(
            "service.unit",
            "systemd does not run here: no autostart",
            "run `edgellm up` from whatever starts this machine's programs",
        )
    found = facts.units.get("edgellm.service")
    if found is None:
        return unknown("service.unit", "systemctl does not answer")
    if found.load == "not-found":
        return ok("service.unit", "not installed as a service (`edgellm service install` does)")
    if found.active == "failed":
        says = f"edgellm.service failed ({found.result or 'no result'})"
        return bad("service.unit", says, "see why", "journalctl -u edgellm -n 50 --no-pager")
    again = f", restarted {found.restarts} times" if found.restarts else ""
    if found.file_state not in ("enabled", "enabled-runtime", "static", ""):
        return warn(
            "service.unit",
            f"edgellm.service is {found.active} but {found.file_state}",
            "enable it to start at boot",
            "sudo systemctl enable edgellm",
        )
    if found.active not in ("active", "activating", "reloading"):
        return warn(
            "service.unit",
            f"edgellm.service is {found.active}",
            "start it",
            "sudo systemctl start edgellm.socket edgellm",
        )
    return ok("service.unit", f"edgellm.service is {found.active}{again}")


def drop_ins(facts: Facts) -> Check | None:
    """FC-76: the GPU is gone only under systemd, after hardening. FC-79: a drop-in without a section is ignored."""
    if not facts.drop_ins:
        return None
    for file in facts.drop_ins:
        lines = [line.strip() for line in file.text.splitlines()]
        settings = [line for line in lines if line and not line.startswith(("#", ";"))]
        if settings and not settings[0].startswith("["):
            return bad(
                "service.drop_ins",
                f"{file.path} starts without a [Section]: systemd ignores it",
                "begin it with [Service]",
            )
        for pattern, why in _HIDES_GPU.items():
            if facts.board.gpus and any(re.match(pattern, line) for line in settings):
                return bad(
                    "service.drop_ins", f"{file.path}: {why}", "remove that line", "sudo systemctl edit edgellm.service"
                )
        if any(
            re.match(r"^ProtectHome=\s*(yes|true|on|1|tmpfs)", line) for line in settings
        ) and facts.models.path.parts[1:2] == ("home",):
            return bad(
                "service.drop_ins",
                f"{file.path}: ProtectHome hides the model folder {facts.models.path}",
                "move the models, or set ProtectHome=read-only",
            )
    return ok("service.drop_ins", f"{len(facts.drop_ins)} unit files, none hides the GPU or the models")


def port(facts: Facts) -> tuple[Check, ...]:
    """FC-34: whoever owns the port is named before anything is loaded."""
    return tuple(_port(port.address, port.pid, port.name, port.ours) for port in facts.ports)


def _port(address: str, pid: int | None, name: str | None, ours: bool) -> Check:
    if pid is None:
        return ok("service.port", f"{address} is free")
    who = f"{name} (pid {pid})" if pid else "another user's process"
    if ours:
        return ok("service.port", f"{address} is ours: {who}")
    step = "stop it, or listen elsewhere with --listen"
    return bad(
        "service.port", f"{address} is taken by {who}", step, f"sudo ss -ltnp 'sport = :{address.rpartition(':')[2]}'"
    )


def jtop(facts: Facts) -> Check | None:
    """FC-68: three different faults with one symptom. None of them matters to serving: sysfs tells enough."""
    if facts.board.soc is None or facts.jtop is None or not facts.live:
        return None
    unit, calm = facts.units.get("jtop.service"), "telemetry comes from sysfs"
    if facts.jtop.socket == "folder":
        step = "remove the folder and mount the socket after jtop.service has started"
        return warn(
            "service.jtop",
            f"/run/jtop.sock is a folder; {calm}",
            step,
            "sudo rmdir /run/jtop.sock && sudo systemctl restart jtop",
        )
    if facts.jtop.socket == "absent":
        if unit is None or unit.load == "not-found":
            return ok("service.jtop", f"jetson-stats is not installed; {calm}")
        return warn(
            "service.jtop",
            f"jtop.service is {unit.active}; {calm}",
            "it ends with status 0 when it fails, so systemd does not restart it: set Restart=always",
            "sudo systemctl restart jtop",
        )
    if not facts.jtop.reachable:
        group = facts.jtop.group or "jtop"
        step = "optional: only the telemetry reader needs that group, never the engine (the group is as good as root)"
        return ok("service.jtop", f"its socket is closed to {facts.devices.user} (group {group}); {calm}. {step}")
    return ok("service.jtop", "jtop.service answers")


def home(facts: Facts) -> Check | None:
    """FC-77: engines die without a home or cache folder. Ours get their own, if one can be written."""
    if not facts.live:
        return None
    if not facts.environment.cache_writable:
        return bad(
            "service.home",
            "the cache folder cannot be written",
            "give it to the serving user, or name another with --state-dir",
        )
    return ok("service.home", "the engine gets its own home and cache folders")


def install_place(facts: Facts) -> Check | None:
    """A system service does not see /home (ProtectHome) and has a short PATH: it needs an absolute path outside."""
    prefix = facts.environment.prefix
    if not facts.live or not facts.systemd:
        return None
    if prefix.startswith(("/home/", "/root/")):
        return warn(
            "service.path",
            f"this edgellm is installed in {prefix}",
            "fine by hand; a system service needs it outside of home",
            "sudo python3 -m venv /opt/edgellm && sudo /opt/edgellm/bin/pip install edgellm",
        )
    return ok("service.path", f"installed in {prefix}; the unit names it in full, PATH does not matter")


def clock(facts: Facts) -> Check | None:
    """FC-13: a board without a clock battery wakes in the past; then TLS fails and builds see files of the future."""
    about = facts.environment
    if not facts.live:
        return None
    shown = datetime.fromtimestamp(about.now_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    past = about.now_s < _EARLY or (about.newest_file_s or 0) > about.now_s + _SLACK_S
    if past:
        return bad(
            "service.clock",
            f"the clock is wrong: {shown}",
            "set it before building or fetching anything",
            "sudo timedatectl set-ntp true",
        )
    if about.time_synchronised is False:
        return ok("service.clock", f"{shown}, not synchronised; edgellm measures on the monotonic clock")
    return ok("service.clock", shown)


def locale(facts: Facts) -> Check | None:
    """Under some locales numbers in the engine's log have a comma; the engine is therefore run under LC_ALL=C."""
    if not facts.live:
        return None
    about = facts.environment
    if about.encoding.upper().replace("-", "") not in ("UTF8", "UTF"):
        return warn(
            "service.locale",
            f"{about.locale}: output is {about.encoding}",
            "names that are not ASCII come out wrong: use a UTF-8 locale",
            "export LC_ALL=C.UTF-8",
        )
    comma = about.locale.lower().startswith(_DECIMAL_COMMA)
    return ok(
        "service.locale",
        about.locale + ("; the engine runs under LC_ALL=C, so its log has decimal points" if comma else ""),
    )


CHECKS = (unit, drop_ins, port, jtop, home, install_place, clock, locale)
