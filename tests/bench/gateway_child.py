"""The gateway in a process of its own, in front of any socket: `python -m tests.bench.gateway_child SOCKET PORT`.

On SIGUSR1 it prints what it holds, as one JSON line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge.gateway.config import GatewayOptions
from edge.gateway.handler import CONTEXT
from edge.gateway.server import make_app, serve
from edge.linux.procfs import limit_malloc_arenas
from edge.supervisor.traffic import Traffic
from tests.fakes.upstream.model import FakeModel


class _Model(FakeModel):
    """Counts requests as the supervisor does: FakeModel hashes each body, the supervisor those of a death."""

    def __init__(self, path: str) -> None:
        super().__init__(socket_path=path)
        self.slots = 64
        self.traffic = Traffic()

    @contextmanager
    def request(self, fingerprint: Callable[[], str | None] = lambda: None) -> Iterator[Any]:
        with self.traffic.request(fingerprint) as progress:
            yield progress

    def kills(self, fingerprint: Callable[[], str | None]) -> bool:
        return self.traffic.kills(fingerprint)


async def main(path: str, port: int) -> None:
    model = _Model(path)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
    app = make_app({"chat": model}, GatewayOptions(queue_requests=64))
    serving = await serve(app, [listener])
    context = app[CONTEXT]

    def tell() -> None:
        held = {
            "tasks": len(asyncio.all_tasks()),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "connections": len(context.connections),
            "active": context.admission.active("chat"),
            "open": model.traffic.open,
            "gone": context.stats.model("chat").gone,
        }
        print(json.dumps(held), flush=True)

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, tell)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    gc.freeze()  # as `edgellm up` does
    print(json.dumps({"pid": os.getpid()}), flush=True)
    await stop.wait()
    await serving.cleanup()


if __name__ == "__main__":
    limit_malloc_arenas()  # as `edgellm up` does
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
