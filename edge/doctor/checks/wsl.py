"""Checks of WSL2. Pure."""

from __future__ import annotations

from collections.abc import Callable

from edge.doctor.check import Check, bad, ok, unknown, warn
from edge.doctor.facts import Facts, Wsl

_IDLE_MS = 60_000  # the default of vmIdleTimeout (Microsoft, .wslconfig reference)
_RESTART = "wsl.exe --shutdown"


def gpu(facts: Facts, wsl: Wsl) -> Check:
    """Check /dev/dxg, the GPU of WSL2; /dev/nvidia0 does not exist there."""
    if wsl.dxg:
        return ok("wsl.gpu", "/dev/dxg exists: Windows shares its GPU")
    return bad(
        "wsl.gpu",
        "/dev/dxg is missing: Windows does not share its GPU",
        "update WSL and the Windows GPU driver",
        "wsl.exe --update",
    )


def library(facts: Facts, wsl: Wsl) -> Check:
    """Check libcuda, which comes from the Windows driver."""
    if wsl.linux_driver:
        step = "remove it: WSL uses the Windows driver, and a Linux driver hides it"
        return bad(
            "wsl.library",
            "an NVIDIA driver for Linux is installed here",
            step,
            "sudo apt purge '^nvidia-driver' '^libnvidia-compute'",
        )
    if wsl.library:
        return ok("wsl.library", "/usr/lib/wsl/lib has libcuda")
    return bad(
        "wsl.library",
        "/usr/lib/wsl/lib/libcuda.so.1 is missing",
        "install NVIDIA's driver in Windows, then restart WSL",
        _RESTART,
    )


def systemd(facts: Facts, wsl: Wsl) -> Check:
    """Check that systemd is on, for the service."""
    if wsl.systemd:
        return ok("wsl.systemd", "systemd runs: the service can be installed")
    step = "put `systemd=true` under [boot] in /etc/wsl.conf and restart WSL; without it, run `edgellm up` by hand"
    return warn("wsl.systemd", "systemd is off: no autostart", step, _RESTART)


def models(facts: Facts, wsl: Wsl) -> Check:
    """Warn of models on a Windows drive."""
    storage, path = facts.models.storage, facts.models.path
    if storage is not None and storage.kind == "windows":
        step = "move models into the Linux file system: a load from there takes many times as long"
        return warn("wsl.models", f"{path} is on a Windows drive", step, "edgellm model import")
    return ok("wsl.models", f"{path} is inside the Linux file system")


def idle(facts: Facts, wsl: Wsl) -> Check:
    """Warn of the idle timeout: Windows stops the VM when the last process started from Windows ends."""
    timeout = (wsl.settings or {}).get("vmidletimeout", "")
    if timeout.lstrip("-").isdecimal() and (int(timeout) < 0 or int(timeout) > 10 * _IDLE_MS):
        return ok("wsl.idle", f"vmIdleTimeout={timeout}: the VM stays up")
    step = "set vmIdleTimeout=-1 under [wsl2] in .wslconfig, and keep one terminal or a scheduled task open"
    return warn("wsl.idle", "Windows stops this VM a minute after its last window closes", step)


def port(facts: Facts, wsl: Wsl) -> Check:
    """Report how the port is reached: under NAT Windows forwards localhost only, mirrored networking shares it."""
    settings = wsl.settings or {}
    if settings.get("networkingmode", "").lower() == "mirrored":
        return ok("wsl.port", "mirrored networking: Windows and Linux share addresses")
    if settings.get("localhostforwarding", "true").lower() == "false":
        step = "set localhostForwarding=true, or networkingMode=mirrored, in .wslconfig"
        return bad("wsl.port", "Windows cannot reach the port: localhost forwarding is off", step, _RESTART)
    if all(address.startswith(("127.", "localhost", "[::1]")) for address in facts.serving.listen):
        return ok(
            "wsl.port",
            f"Windows reaches http://localhost:{facts.serving.listen[0].rpartition(':')[2]}; other machines do not",
        )
    return unknown(
        "wsl.port",
        "other machines reach Windows, not this VM, unless networking is mirrored",
        "set networkingMode=mirrored in .wslconfig",
    )


_WSL: tuple[Callable[[Facts, Wsl], Check], ...] = (gpu, library, systemd, models, idle, port)


def everything(facts: Facts) -> tuple[Check, ...]:
    """Run the checks of WSL2; none on other systems."""
    return tuple(check(facts, facts.wsl) for check in _WSL) if facts.wsl is not None else ()


CHECKS = (everything,)
