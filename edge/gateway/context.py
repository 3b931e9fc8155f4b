"""The parts of one running gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from edge.gateway.access import Door
from edge.gateway.accessfile import AccessLog
from edge.gateway.admission import Admission
from edge.gateway.connections import Connections
from edge.gateway.hold import WaitingRoom
from edge.gateway.keyring import KeyRing
from edge.gateway.metrics import Metrics
from edge.gateway.openai import ListedModel
from edge.gateway.page import Page
from edge.gateway.pool import Pools
from edge.gateway.settings import GatewayConfig
from edge.gateway.stats import Stats
from edge.status import Failure, ModelStatus
from edge.telemetry.energy import EnergyMeter
from edge.upstream import Upstream


class TelemetrySource(Protocol):
    """The source of temperatures and power."""

    def summary(self) -> Mapping[str, Any]:
        """Return `source`, `age_s`, `thermal`. Every probe calls it, so it must not read a sensor."""
        ...

    def document(self) -> Mapping[str, Any]:
        """Return the whole telemetry document. Sampling goes on for a while after each call."""
        ...


@dataclass(slots=True)
class Context:
    """State shared by all requests. `upstreams` is by model id and may change while the gateway runs.

    `fault` is set where nothing can be served at all.
    """

    upstreams: Mapping[str, Upstream]
    config: GatewayConfig
    alive: Callable[[], bool]
    telemetry: TelemetrySource | None
    fault: Failure | None
    wall: Callable[[], float]
    monotonic: Callable[[], float]
    origins: Door
    keys: KeyRing
    waiting: WaitingRoom
    admission: Admission
    connections: Connections
    page: Page
    access_log: AccessLog
    started: int
    stats: Stats = field(default_factory=Stats)
    metrics: Metrics = field(default_factory=Metrics)
    pools: Pools = field(default_factory=Pools)
    energy: EnergyMeter | None = None

    def statuses(self) -> list[ModelStatus]:
        return [upstream.status() for upstream in self.upstreams.values()]

    def listed(self) -> list[ListedModel]:
        return [ListedModel(each.model_id, each.aliases, each.model_info) for each in self.upstreams.values()]

    def by_name(self, name: str) -> Upstream | None:
        """Return the model with this id or alias. An id wins over another model's alias."""
        found = self.upstreams.get(name)
        if found is not None:
            return found
        return next((each for each in self.upstreams.values() if name in each.aliases), None)

    def only(self) -> Upstream | None:
        """Return the model if there is exactly one."""
        return next(iter(self.upstreams.values())) if len(self.upstreams) == 1 else None
