"""The parts of one running gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, field

from edge.gateway.access_log import AccessLog
from edge.gateway.accounting import Stats
from edge.gateway.admission import Admission
from edge.gateway.config import GatewayOptions
from edge.gateway.connection_pool import Pools
from edge.gateway.connections import Connections
from edge.gateway.keys import KeyRing
from edge.gateway.metrics import Metrics
from edge.gateway.model_name import only_one
from edge.gateway.openai import ListedModel
from edge.gateway.origin import OriginPolicy
from edge.gateway.page import Page
from edge.gateway.streams import StreamOwners
from edge.gateway.waiting_room import WaitingQueue
from edge.supervisor.status import Failure, ModelStatus
from edge.supervisor.upstream import Upstream
from edge.telemetry.energy import EnergyMeter


class TelemetrySource(Protocol):
    """The source of temperatures and power."""

    def summary(self) -> Mapping[str, Any]:
        """Return `source`, `age_s`, `thermal`. Every probe calls it, so it must not read a sensor."""
        ...

    def document(self) -> Mapping[str, Any]:
        """Return the whole telemetry document. Sampling goes on for a while after each call."""
        ...


class PastSource(Protocol):
    """The source of past starts and log lines."""

    def starts(self) -> Sequence[Mapping[str, Any]]:
        """Return the last starts, oldest first."""
        ...

    def log(self, engine: bool, model: str | None, since: Mapping[str, int]) -> Mapping[str, Any]:
        """Return `lines` that the reader has not seen, and `next`, its next `since`."""
        ...


class Context(Struct):
    """State shared by all requests. `upstreams` is by model id and may change while the gateway runs.

    `fault` is set where nothing can be served at all.
    """

    upstreams: Mapping[str, Upstream]
    config: GatewayOptions
    alive: Callable[[], bool]
    telemetry: TelemetrySource | None
    fault: Failure | None
    about: Callable[[], Mapping[str, Any]]
    wall: Callable[[], float]
    monotonic: Callable[[], float]
    origins: OriginPolicy
    keys: KeyRing
    waiting: WaitingQueue
    admission: Admission
    connections: Connections
    page: Page
    access_log: AccessLog
    started: int
    stats: Stats = field(default_factory=Stats)
    metrics: Metrics = field(default_factory=Metrics)
    loading: set[Any] = field(default_factory=set)  # futures of models that are started by POST /admin
    stream_owners: StreamOwners = field(default_factory=StreamOwners)
    pools: Pools = field(default_factory=Pools)
    energy: EnergyMeter | None = None
    history: PastSource | None = None

    def key_use(self) -> dict[str, Any]:
        """Return the key file, None if there is none, and the requests since the start by the name of their key."""
        file = self.config.keys_file
        return {"file": None if file is None else str(file), "requests": dict(self.stats.keys)}

    def statuses(self) -> list[ModelStatus]:
        return [upstream.status() for upstream in self.upstreams.values()]

    def listed(self) -> list[ListedModel]:
        return [ListedModel(each.model_id, each.aliases, each.model_info) for each in self.upstreams.values()]

    def by_name(self, name: str) -> Upstream | None:
        """Return the model with this id or alias. An id wins over another model's alias.

        Clients of Ollama write `chat:latest` for `chat`, also to the routes of OpenAI.
        """
        return self._by_name(name) or self._by_name(name.removesuffix(":latest"))

    def _by_name(self, name: str) -> Upstream | None:
        found = self.upstreams.get(name)
        if found is not None:
            return found
        return next((each for each in self.upstreams.values() if name in each.aliases), None)

    def only(self, path: str) -> Upstream | None:
        """Return the model that serves a path if there is exactly one."""
        return only_one(self.upstreams.values(), path)
