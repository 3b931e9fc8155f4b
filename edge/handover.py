"""What the launcher hands to the application: open sockets, running children, and the plan they follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from socket import socket

from edge import listen
from edge.coldstart.timeline import Span
from edge.config import Config
from edge.errors import EdgeError
from edge.folders import Folders
from edge.instance import Lock
from edge.prepare import Prepared
from edge.supervisor.child import Child
from edge.supervisor.notify import Notifier


@dataclass
class Launch:
    """What the launcher hands to edge.app. `failure` stands in for a plan when sockets were inherited."""

    folders: Folders
    config: Config
    lock: Lock
    sockets: list[socket]
    inherited: bool
    began_s: float  # monotonic: when this process began
    json: bool
    prepared: Prepared | None = None
    failure: EdgeError | None = None
    children: dict[str, Child] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    spawn_cpu_s: float | None = None
    notifier: Notifier = field(default_factory=Notifier)
    given: Mapping[str, object] = field(default_factory=dict)  # flags of the command line, for a reload

    @property
    def urls(self) -> list[str]:
        """Of the sockets, by the configuration that holds now: `https://127.0.0.1:8080`, `unix:PATH`."""
        return [listen.url(each, tls=bool(self.config.gateway.tls_cert)) for each in self.sockets]
