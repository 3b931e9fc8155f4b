"""Checks of WSL2, and how the facts of this process and of Windows are read."""

from __future__ import annotations

import ctypes
import locale
import sys
import time
from collections.abc import Callable, Mapping

from edge import resources
from edge.doctor.check import Finding, bad, ok, unknown, warn
from edge.doctor.facts import DoctorFacts, Environment, WslFacts
from edge.linux.files import visible
from edge.linux.tree import Tree
from edge.paths import Folders
from edge.service.access import PathUser, creatable

_IDLE_MS = 60_000  # the default of vmIdleTimeout (Microsoft, .wslconfig reference)
_RESTART = "wsl.exe --shutdown"


def gpu(facts: DoctorFacts, wsl: WslFacts) -> Finding:
    """Check /dev/dxg, the GPU of WSL2; /dev/nvidia0 does not exist there."""
    if wsl.dxg:
        return ok("/dev/dxg exists: Windows shares its GPU")
    return bad(
        "/dev/dxg is missing: Windows does not share its GPU",
        "update WSL and the Windows GPU driver",
        "wsl.exe --update",
    )


def library(facts: DoctorFacts, wsl: WslFacts) -> Finding:
    """Check libcuda, which comes from the Windows driver."""
    if wsl.linux_driver:
        step = "remove it: WSL uses the Windows driver, and a Linux driver hides it"
        return bad(
            "an NVIDIA driver for Linux is installed here", step, "sudo apt purge '^nvidia-driver' '^libnvidia-compute'"
        )
    if wsl.library:
        return ok("/usr/lib/wsl/lib has libcuda")
    return bad(
        "/usr/lib/wsl/lib/libcuda.so.1 is missing", "install NVIDIA's driver in Windows, then restart WSL", _RESTART
    )


def systemd(facts: DoctorFacts, wsl: WslFacts) -> Finding:
    """Check that systemd is on, for the service."""
    if wsl.systemd:
        return ok("systemd runs: the service can be installed")
    step = "put `systemd=true` under [boot] in /etc/wsl.conf and restart WSL; without it, run `edgellm up` by hand"
    return warn("systemd is off: no autostart", step, _RESTART)


def models(facts: DoctorFacts, wsl: WslFacts) -> Finding:
    """Warn of models on a Windows drive."""
    storage, path = facts.models.storage, facts.models.path
    if storage is not None and storage.kind == "windows":
        step = "move models into the Linux file system: a load from there takes many times as long"
        return warn(f"{path} is on a Windows drive", step, "edgellm model import")
    return ok(f"{path} is inside the Linux file system")


def idle(facts: DoctorFacts, wsl: WslFacts) -> Finding:
    """Warn of the idle timeout: Windows stops the VM when the last process started from Windows ends."""
    timeout = (wsl.settings or {}).get("vmidletimeout", "")
    if timeout.lstrip("-").isdecimal() and (int(timeout) < 0 or int(timeout) > 10 * _IDLE_MS):
        return ok(f"vmIdleTimeout={timeout}: the VM stays up")
    step = "set vmIdleTimeout=-1 under [wsl2] in .wslconfig, and keep one terminal or a scheduled task open"
    return warn("Windows stops this VM a minute after its last window closes", step)


def port(facts: DoctorFacts, wsl: WslFacts) -> Finding:
    """Report how the port is reached: under NAT Windows forwards localhost only, mirrored networking shares it."""
    settings = wsl.settings or {}
    if settings.get("networkingmode", "").lower() == "mirrored":
        return ok("mirrored networking: Windows and Linux share addresses")
    if settings.get("localhostforwarding", "true").lower() == "false":
        step = "set localhostForwarding=true, or networkingMode=mirrored, in .wslconfig"
        return bad("Windows cannot reach the port: localhost forwarding is off", step, _RESTART)
    if all(address.startswith(("127.", "localhost", "[::1]")) for address in facts.serving.listen):
        return ok(
            f"Windows reaches http://localhost:{facts.serving.listen[0].rpartition(':')[2]}; other machines do not"
        )
    return unknown(
        "other machines reach Windows, not this VM, unless networking is mirrored",
        "set networkingMode=mirrored in .wslconfig",
    )


def _on_wsl(check: Callable[[DoctorFacts, WslFacts], Finding]) -> Callable[[DoctorFacts], Finding | None]:
    """Return the check, which finds nothing on other systems."""
    return lambda facts: None if facts.wsl is None else check(facts, facts.wsl)


CHECKS = {f"wsl.{check.__name__}": _on_wsl(check) for check in (gpu, library, systemd, models, idle, port)}


# Read clock, cache folder and locale of this process, and the Windows side of WSL2.

_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # struct timex has 208 bytes on 64-bit Linux


def read_environment(tree: Tree, folders: Folders, env: Mapping[str, str], user: PathUser | None = None) -> Environment:
    """Read the clock, locale and folders of this process."""
    return Environment(
        now_s=time.time(),
        newest_file_s=_newest(folders),
        time_synchronised=_synchronised() if tree.live else None,
        cache_writable=creatable(folders.cache, user),
        locale=env.get("LC_ALL") or env.get("LC_NUMERIC") or env.get("LANG") or "C",
        encoding=locale.getpreferredencoding(False),
        prefix=sys.prefix,
    )


def _newest(folders: Folders) -> float | None:
    """Return the time of the newest installed file: edgellm's own tables and the engines' manifests."""
    engines = folders.engines.glob("*/engine.json") if visible(folders.engines) else ()
    files = [resources.data_dir("profiles") / "boards.toml", *engines]
    return max((file.stat().st_mtime for file in files if visible(file)), default=None)


def _synchronised() -> bool | None:
    """Ask the kernel whether its clock is synchronised; None where adjtimex(2) is not available."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _CLOCK_UNSYNCHRONISED


def read_wsl(tree: Tree) -> WslFacts:
    """Read WSL's devices and libraries, and `.wslconfig` of the first Windows user below /mnt/c."""
    users = tree.children("/mnt/c/Users")
    texts = (tree.text(f"/mnt/c/Users/{user}/.wslconfig") for user in users)
    text = next((text for text in texts if text is not None), None)
    return WslFacts(
        dxg=tree.exists("/dev/dxg"),
        library=tree.exists("/usr/lib/wsl/lib/libcuda.so.1"),
        systemd=tree.exists("/run/systemd/system"),
        settings=None if text is None else _settings(text),
        linux_driver=tree.exists("/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
    )


def _settings(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip().lower(): value.strip() for key, _, value in pairs}
