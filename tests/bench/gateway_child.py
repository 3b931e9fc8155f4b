"""The gateway in a process of its own, in front of any socket: `python -m tests.bench.gateway_child SOCKET PORT`.

On SIGUSR1 it prints what it holds, as one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

from edge.gateway.config import GatewayOptions
from edge.gateway.handler import CONTEXT
from edge.gateway.server import make_app, serve
from tests.fakes.upstream.model import FakeModel


async def main(path: str, port: int) -> None:
    model = FakeModel(socket_path=path)
    model.slots = 64
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
            "open": model.open,
            "gone": context.stats.model("chat").gone,
        }
        print(json.dumps(held), flush=True)

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, tell)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    await stop.wait()
    await serving.cleanup()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
