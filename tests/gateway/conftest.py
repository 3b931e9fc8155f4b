"""A gateway on a real socket, a fake engine behind it."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from edge.gateway.config import GatewayOptions
from edge.gateway.context import Context
from edge.gateway.handler import CONTEXT
from edge.gateway.server import GatewayServer, make_app, serve
from tests.fakes.upstream.engine import FakeEngine, Script, answer_ok
from tests.fakes.upstream.model import FakeModel
from tests.gateway.raw import Answer, Client, once


@dataclass
class Rig:
    """Everything a test needs: the engine, the model that points at it, the gateway's port, a client."""

    engine: FakeEngine
    model: FakeModel
    port: int
    client: aiohttp.ClientSession
    context: Context
    serving: GatewayServer
    stack: AsyncExitStack

    async def connect(self) -> Client:
        """A raw connection; closed with the test."""
        client = await Client.connect(self.port)
        self.stack.push_async_callback(client.close)
        return client

    async def once(self, data: bytes) -> Answer:
        return await once(self.port, data)


class Rigs:
    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._count = 0

    async def __call__(
        self,
        script: Script = answer_ok,
        *,
        config: GatewayOptions | None = None,
        loading: bool = False,
        read_body: bool = True,
        models: dict[str, FakeModel] | None = None,
        address: str = "127.0.0.1",
        **options: Any,
    ) -> Rig:
        self._count += 1
        engine = FakeEngine(self._folder / f"{self._count}.sock", script, read_body=read_body)
        await engine.start()
        self._stack.push_async_callback(engine.stop)
        model = FakeModel(socket_path=None if loading else str(engine.path))
        listener = socket.socket()
        self._stack.callback(listener.close)
        listener.bind((address, 0))
        listener.listen(512)
        app = make_app(models if models is not None else {"chat": model}, config or GatewayOptions(), **options)
        serving = await serve(app, [listener], drain_s=0.5)
        self._stack.push_async_callback(serving.cleanup)
        port = listener.getsockname()[1]
        client = aiohttp.ClientSession(f"http://127.0.0.1:{port}", auto_decompress=False)
        self._stack.push_async_callback(client.close)
        return Rig(engine, model, port, client, app[CONTEXT], serving, self._stack)


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        yield Path(folder)


@pytest.fixture
async def rig(sockets: Path) -> AsyncIterator[Rigs]:
    async with AsyncExitStack() as stack:
        yield Rigs(sockets, stack)
