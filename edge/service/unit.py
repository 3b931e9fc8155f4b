"""Find the systemd unit of a process, and stop it with its socket, which would start it again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.errors import EdgeError, UnavailableError
from edge.service.drop_ins import drop_in_conflicts

STOP_S = 120.0  # TimeoutStopSec=60 of the unit, twice


class Unit(Struct, frozen=True):
    """A systemd service. `user`: of a user manager; `warnings`: drop-in settings that hide the GPU from it."""

    name: str
    user: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def socket(self) -> str:
        return self.name.removesuffix(".service") + ".socket"

    @property
    def stop_command(self) -> list[str]:
        return ["systemctl", *(["--user"] if self.user else []), "stop", self.socket, self.name]

    def document(self) -> dict[str, Any]:
        return {"unit": self.name, "socket": self.socket, "user": self.user, "warnings": [*self.warnings]}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Unit:
        return cls(str(document["unit"]), bool(document["user"]), tuple(document.get("warnings", ())))


def holds(unit: Unit, pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a process is in the unit by its control group: its own word could name any unit of the machine."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return False
    return any(unit.name in line.rpartition(":")[2].split("/") for line in lines) and unit.name.endswith(".service")


def own(proc: Path = Path("/proc")) -> Unit | None:
    """Return the unit of this process by its control group; None outside a service."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        parts = line.rpartition(":")[2].split("/")
        services = [part for part in parts if part.endswith(".service")]
        # A child in a sub-group of its own is not the service: stopping that would stop more than itself.
        if services and services[-1] == parts[-1] and not services[-1].startswith("user@"):
            # user@1000.service/app.slice/edgellm.service: a unit of the user manager.
            user = any(part.startswith("user@") for part in services[:-1])
            return Unit(services[-1], user, () if user else drop_in_conflicts(services[-1]))
    return None


SHOW_S = 3.0  # PID 1 answers within milliseconds, or not at all


def begun_s(unit: Unit) -> float | None:
    """Return when systemd began to start the unit, in monotonic seconds; None where it does not answer.

    That is before ExecStartPre= and the fork. Takes some milliseconds of another process.
    """
    manager = ["systemctl", "--user"] if unit.user else ["systemctl"]
    command = [*manager, "show", "--property=InactiveExitTimestampMonotonic", "--value", unit.name]
    try:
        quiet = subprocess.DEVNULL
        shown = subprocess.run(command, stdin=quiet, capture_output=True, text=True, timeout=SHOW_S, check=False).stdout
        microseconds = int(shown)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return microseconds / 1e6 if microseconds > 0 else None


def stop(unit: Unit) -> None:
    """Stop service and socket.

    Raises UnavailableError with the command to run where this user may not, EdgeError when systemctl fails.
    """
    command = unit.stop_command
    shown = " ".join(command)
    if not unit.user and os.geteuid() != 0:
        raise UnavailableError(f"it runs as {unit.name}, and its socket would start it again", f"sudo {shown}")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=STOP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EdgeError(f"`{shown}` did not work: {error}", f"run it by hand: {shown}") from error
    if result.returncode:
        raise EdgeError(f"`{shown}` failed: {result.stderr.strip()}", "see `systemctl status` of both")
