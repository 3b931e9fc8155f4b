"""A connection is accepted with what its client has sent, and is not read while its protocol has paused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from edge.gateway.server import _AT_ONCE_BUSY, Acceptor
from tests.gateway.raw import until


class Recorder(asyncio.Protocol):
    """Records what is called, and what ran between. `at_first`: the method of the transport to call in the first."""

    def __init__(self, at_first: str | None = None, *, on_data: bool = True) -> None:
        self.seen: list[bytes | str] = []
        self._at_first = at_first
        self._on_data = on_data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.seen.append("made")
        asyncio.get_running_loop().call_soon(self.seen.append, "another callback")
        if self._at_first is not None and not self._on_data:
            getattr(transport, self._at_first)()

    def data_received(self, data: bytes) -> None:
        self.seen.append(data)
        if self._at_first is not None and self._on_data:
            getattr(self.transport, self._at_first)()
            self._at_first = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.seen.append("lost")


@pytest.fixture
def listener(short_dir: Path) -> Iterator[socket.socket]:
    """A unix socket: what its clients send has arrived when send() returns."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(short_dir / "s.sock"))
        made.listen()
        yield made


@pytest.fixture
def client(listener: socket.socket) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(listener.getsockname())
        made.sendall(b"first")
        yield made


@asynccontextmanager
async def accepted(
    listener: socket.socket, recorder: Recorder, *, reads_early: bool = True
) -> AsyncIterator[list[bytes | str]]:
    """What the recorder has seen, from the end of the accept on."""
    acceptor = Acceptor(asyncio.get_running_loop(), listener, lambda: recorder, reads_early=reads_early)
    await until(lambda: "another callback" in recorder.seen)
    acceptor.close()
    acceptor.close()
    yield recorder.seen
    recorder.transport.abort()
    await until(lambda: "lost" in recorder.seen)


async def test_what_a_client_has_sent_is_read_before_anything_else_runs(
    listener: socket.socket, client: socket.socket
) -> None:
    async with accepted(listener, Recorder()) as seen:
        assert seen[:3] == ["made", b"first", "another callback"]
        client.sendall(b"second")
        await until(lambda: b"second" in seen)


async def test_a_handshake_is_left_to_its_transport(listener: socket.socket, client: socket.socket) -> None:
    async with accepted(listener, Recorder(), reads_early=False) as seen:
        await until(lambda: b"first" in seen)
        assert seen == ["made", "another callback", b"first"]


async def test_nothing_is_read_while_the_protocol_has_paused(listener: socket.socket, client: socket.socket) -> None:
    recorder = Recorder("pause_reading")
    async with accepted(listener, recorder) as seen:
        client.sendall(b"second")
        for _ in range(20):  # iterations of the loop, each of which would read
            await asyncio.sleep(0)
        assert b"second" not in seen
        recorder.transport.resume_reading()
        await until(lambda: b"second" in seen)


async def test_a_rejected_connection_is_not_read(listener: socket.socket, client: socket.socket) -> None:
    async with accepted(listener, Recorder("abort", on_data=False)) as seen:
        await until(lambda: "lost" in seen)
    assert seen == ["made", "another callback", "lost"]


async def test_a_protocol_that_fails_at_its_first_data_is_ended(listener: socket.socket, client: socket.socket) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))
    async with accepted(listener, Recorder("no_such_method")) as seen:
        await until(lambda: "lost" in seen)
    assert len(errors) == 1 and "no_such_method" in errors[0]


async def test_a_client_that_left_before_its_turn_is_lost(listener: socket.socket, client: socket.socket) -> None:
    client.close()
    async with accepted(listener, Recorder()) as seen:
        await until(lambda: "lost" in seen)
    assert seen == ["made", b"first", "another callback", "lost"]


async def test_more_are_accepted_at_once_while_clients_keep_the_loop_busy(listener: socket.socket) -> None:
    busy, made = False, list[Recorder]()

    def make() -> Recorder:
        made.append(Recorder())
        return made[-1]

    loop = asyncio.get_running_loop()
    acceptor = Acceptor(loop, listener, make, reads_early=True, is_busy=lambda: busy)
    clients = [socket.socket(listener.family) for _ in range(_AT_ONCE_BUSY + 5)]
    for client in clients:
        client.connect(listener.getsockname())
    counts = []
    for busy in (False, False, True, True, True):  # noqa: B007
        acceptor._accept()  # as the loop calls it, once in an iteration
        counts.append(len(made))
    assert counts == [1, 2, _AT_ONCE_BUSY + 2, len(clients), len(clients)]
    acceptor.close()
    for client, recorder in zip(clients, made, strict=True):
        client.close()
        recorder.transport.abort()
    await until(lambda: all("lost" in recorder.seen for recorder in made))
