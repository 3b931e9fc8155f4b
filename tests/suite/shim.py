#!/usr/bin/env python3
"""Stands in for llama-server in llama.cpp's own server tests: our gateway on the port that was asked for, the real
server behind it on a unix socket, started with the same arguments. LLAMA_SERVER names the real one.

It lives as long as the server and ends with it, with its exit code; SIGTERM and SIGINT end both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edge.gateway import keys
from edge.gateway.config import GatewayOptions
from edge.gateway.server import make_app, serve
from edge.supervisor.status import ModelStatus, State
from edge.supervisor.upstream import Endpoint

ROUTER_SLOTS = 64


class Server:
    """edge.supervisor.upstream.Upstream over one llama-server."""

    aliases: tuple[str, ...] = ()
    held = False

    def __init__(self, path: Path) -> None:
        self.model_id = "model"
        self.slots = ROUTER_SLOTS
        self.routes: tuple[str, ...] | None = None
        self.last_load_s: float | None = None
        self.template_file: str | None = None
        self.model_info: dict[str, Any] = {}
        self._path = path
        self._ready = asyncio.Event()

    def status(self) -> ModelStatus:
        return ModelStatus(self.model_id, State.READY if self._ready.is_set() else State.LOADING)

    def endpoint(self, *, first: bool = False) -> Endpoint | None:
        return Endpoint(str(self._path), 1) if self._ready.is_set() else None

    async def ensure_ready(self, *, first: bool = False) -> ModelStatus:
        await self._ready.wait()
        return self.status()

    def unload(self) -> None:
        pass

    def restart(self) -> None:
        pass

    def keep_alive(self, seconds: float) -> None:
        pass

    def sleeps_in_s(self) -> float | None:
        return None

    def expected_ready_in_s(self) -> float | None:
        return None

    def elapsed_s(self) -> float | None:
        return None

    @contextmanager
    def request(self, fingerprint: Callable[[], str | None] = lambda: None) -> Iterator[Server]:
        yield self

    def kills(self, fingerprint: Callable[[], str | None]) -> bool:
        return False

    def moved(self) -> None:
        pass

    def answered(self, generation: int) -> None:
        pass

    async def watch(self) -> None:
        """Until it is healthy; then what it says of itself."""
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self._path))) as session:
            while not await self._healthy(session):
                await asyncio.sleep(0.01)
            async with session.get("http://x/props") as answer:
                props = await answer.json() if answer.status == 200 else {}
            self.slots = int(props.get("total_slots") or ROUTER_SLOTS)
            async with session.get("http://x/v1/models") as answer:
                listed = (await answer.json()).get("data") or [] if answer.status == 200 else []
            if len(listed) == 1:
                self.model_info = listed[0].get("meta") or {}
        self._ready.set()

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with session.get("http://x/health") as answer:
                return answer.status == 200
        return False


def option(arguments: list[str], name: str, default: str) -> str:
    return next((arguments[i + 1] for i, each in enumerate(arguments) if each == name), default)


def without(arguments: list[str], *names: str) -> list[str]:
    """Without these options and their values."""
    kept, skip = [], False
    for each in arguments:
        if skip or each in names:
            skip = not skip
            continue
        kept.append(each)
    return kept


def listeners(hosts: str, port: int) -> list[socket.socket]:
    found = []
    for host in hosts.split(","):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host.strip(), port))
        listener.listen(512)
        found.append(listener)
    return found


async def main(arguments: list[str], folder: Path) -> int:
    path = folder / "engine.sock"
    inner = [*without(arguments, "--host", "--port", "--api-key"), "--host", str(path)]
    child = await asyncio.create_subprocess_exec(os.environ["LLAMA_SERVER"], *inner)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, child.terminate)
    secret = option(arguments, "--api-key", "")
    file = folder / "keys.toml"
    if secret:
        keys.write(file, [keys.Key("suite", keys.digest(secret), admin=True)])
    server = Server(path)
    # Its aliases are the engine's business here: the only model answers to every name.
    server.model_id = option(arguments, "--alias", "model").split(",")[0]
    watching = asyncio.ensure_future(server.watch())
    sockets = listeners(option(arguments, "--host", "127.0.0.1"), int(option(arguments, "--port", "8080")))
    serving = await serve(make_app({server.model_id: server}, GatewayOptions(keys_file=file)), sockets, drain_s=0.1)
    code = await child.wait()
    watching.cancel()
    await serving.cleanup()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        sys.exit(asyncio.run(main(sys.argv[1:], Path(folder))))
