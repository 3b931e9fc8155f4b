"""What the gateway needs from whoever runs an engine. The supervisor implements it; tests implement it too."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from edge.status import ModelStatus


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One live engine. `generation` grows with each new child, so pooled connections to an old one are dropped."""

    socket_path: str
    generation: int


class Upstream(Protocol):
    """One model."""

    @property
    def model_id(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def slots(self) -> int:
        """Requests that the engine works on at once (n_parallel)."""
        ...

    @property
    def card(self) -> dict[str, Any]:
        """The model as llama-server's /v1/models describes it under `meta` (n_ctx_train, n_params, size, ...)."""
        ...

    def status(self) -> ModelStatus: ...

    def endpoint(self) -> Endpoint | None:
        """Where to send a request now; None unless READY."""
        ...

    async def ensure_ready(self) -> ModelStatus:
        """Waits until READY or FAILED, waking a sleeping model. Cancelling it costs nothing."""
        ...

    def expected_ready_in_s(self) -> float | None:
        """From the last start's record; None when there was none."""
        ...

    def request(self) -> AbstractContextManager[Progress]:
        """Counts a request as open; the supervisor judges a wedge by `Progress.moved()`."""
        ...


class Progress(Protocol):
    def moved(self) -> None:
        """A byte of the answer arrived."""
        ...
