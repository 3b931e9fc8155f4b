"""The gateway's interface to a model: where to send requests, and what to wait for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from msgspec import Struct

from edge.supervisor.status import ModelStatus


class Endpoint(Struct, frozen=True):
    """The socket of a live engine. `generation` differs for each child: pooled connections belong to one of them.

    `first`: no completion of it came back yet. What it answers with 400 or more counts for nothing.
    `port`: the loopback port of an engine that has no unix socket.
    """

    socket_path: str
    generation: int
    first: bool = False
    port: int | None = None


class Upstream(Protocol):
    """One model. The supervisor's ModelHandle implements it, and so do tests."""

    @property
    def model_id(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...

    @property
    def slots(self) -> int:
        """How many requests the engine works on at once (n_parallel)."""
        ...

    @property
    def last_load_s(self) -> float | None:
        """Seconds that the last known start took until READY."""
        ...

    @property
    def routes(self) -> tuple[str, ...] | None:
        """The paths that an engine beside llama.cpp serves, empty for all; None for llama.cpp."""
        ...

    @property
    def model_info(self) -> dict[str, Any]:
        """What llama-server's /v1/models shows of the model under `meta` (n_ctx_train, n_params, size, ...)."""
        ...

    @property
    def template_file(self) -> str | None:
        """Path of the GGUF file whose header holds the chat template; None where the template is not its own."""
        ...

    @property
    def held(self) -> bool:
        """Whether new requests wait though the model is READY: another model waits for its memory."""
        ...

    def status(self) -> ModelStatus: ...

    def endpoint(self, *, first: bool = False) -> Endpoint | None:
        """Return where to send a request now; None unless READY. `first`: or the engine takes its first request."""
        ...

    async def ensure_ready(self, *, first: bool = False) -> ModelStatus:
        """Wait until READY, FAILED or STOPPED, waking a sleeping model. It may be cancelled at any time.

        `first`: the caller has a request that runs inference, and it may be the engine's first one: return, in
        WARMING, once it may be sent.
        """
        ...

    def unload(self) -> None:
        """End the model's engine once its requests are answered; the next request wakes it."""
        ...

    def restart(self) -> None:
        """Start the model's engine anew once its requests are answered. A sleeping one starts as with a request."""
        ...

    def keep_alive(self, seconds: float) -> None:
        """Let the model sleep after so many idle seconds, until the next call; negative is never."""
        ...

    def sleeps_in_s(self) -> float | None:
        """Return the seconds until a READY model sleeps if no request comes; None is never."""
        ...

    def expected_ready_in_s(self) -> float | None:
        """Return the seconds to READY as the last start took them; None without a record."""
        ...

    def elapsed_s(self) -> float | None:
        """Return the seconds since the start that is under way began; None without one."""
        ...

    def request(self, fingerprint: Callable[[], str | None] = lambda: None) -> AbstractContextManager[RequestProgress]:
        """Count a request as open while the context lasts. Without `RequestProgress.moved()` the engine counts as hung.

        `fingerprint`: identifies the request if the engine dies; None if it cannot be identified.
        """
        ...

    def kills(self, fingerprint: Callable[[], str | None]) -> bool:
        """Return whether the request is refused for a while because it was in flight at two deaths of the engine."""
        ...


class RequestProgress(Protocol):
    """The progress of one open request."""

    def moved(self) -> None:
        """Note that bytes of the answer arrived."""
        ...

    def answered(self, generation: int) -> None:
        """Note that the engine of that generation produced a token of the answer."""
        ...
