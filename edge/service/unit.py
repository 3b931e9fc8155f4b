"""Which systemd unit a process is, and how to end it for good: its socket would start it again at the next poll."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.errors import EdgeError, UnavailableError
from edge.service.hindrance import hindrances

STOP_S = 120.0


@dataclass(frozen=True, slots=True)
class Unit:
    """`user`: of a user's own service manager; `warnings`: what in its drop-ins keeps it from the machine's GPU."""

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


def own(proc: Path = Path("/proc"), root: Path = Path("/")) -> Unit | None:
    """By its control group: systemd keeps each service in one of its own."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        parts = line.rpartition(":")[2].split("/")
        services = [part for part in parts if part.endswith(".service")]
        if services and services[-1] == parts[-1] and not services[-1].startswith("user@"):
            user = any(part.startswith("user@") for part in services[:-1])
            return Unit(services[-1], user, () if user else hindrances(services[-1], root))
    return None


def stop(unit: Unit) -> None:
    """Raises UnavailableError with the command to type where we may not, EdgeError when systemctl fails."""
    command = unit.stop_command
    typed = " ".join(command)
    if not unit.user and os.geteuid() != 0:
        raise UnavailableError(f"it runs as {unit.name}, and its socket would start it again", f"sudo {typed}")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=STOP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EdgeError(f"`{typed}` did not work: {error}", f"try it by hand: {typed}") from error
    if result.returncode:
        raise EdgeError(f"`{typed}` failed: {result.stderr.strip()}", "see `systemctl status` of both")
