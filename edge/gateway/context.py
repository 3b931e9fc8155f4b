"""What one running gateway consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge.gateway.hold import WaitingRoom
from edge.gateway.openai import ListedModel
from edge.gateway.pool import Pools
from edge.gateway.settings import GatewayConfig
from edge.status import ModelStatus
from edge.upstream import Upstream


@dataclass(slots=True)
class Context:
    """`upstreams` by model id, the first is the default. The mapping may change while we run."""

    upstreams: Mapping[str, Upstream]
    config: GatewayConfig
    alive: Callable[[], bool]
    telemetry: Callable[[], Mapping[str, Any]] | None
    wall: Callable[[], float]
    monotonic: Callable[[], float]
    room: WaitingRoom
    started: int
    pools: Pools = field(default_factory=Pools)

    def statuses(self) -> list[ModelStatus]:
        return [upstream.status() for upstream in self.upstreams.values()]

    def listed(self) -> list[ListedModel]:
        return [ListedModel(each.model_id, each.aliases, each.card) for each in self.upstreams.values()]

    def by_name(self, name: str) -> Upstream | None:
        """By id or alias."""
        found = self.upstreams.get(name)
        if found is not None:
            return found
        return next((each for each in self.upstreams.values() if name in each.aliases), None)

    def only(self) -> Upstream | None:
        """The one model, where there is exactly one."""
        return next(iter(self.upstreams.values())) if len(self.upstreams) == 1 else None
