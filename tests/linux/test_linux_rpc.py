"""The RPC protocol of llama.cpp, against a server that speaks it, is busy, speaks another version, or nothing of it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

import pytest

from edge.errors import ConfigError, RemoteMissingError
from edge.linux.rpc import (
    PROTOCOL,
    Clients,
    DeviceMemory,
    address_towards,
    ask_memory,
    clients,
    connected,
    own_addresses,
    reachable,
)
from tests.fakes.rpc_protocol import MEMORY, serving


def test_every_device_answers_with_its_memory() -> None:
    with serving() as port:
        assert ask_memory("127.0.0.1", port) == tuple(DeviceMemory(*row) for row in MEMORY)


def test_a_server_that_serves_another_engine_is_busy() -> None:
    """The kernel accepts the connection, and nothing comes back: rpc-server has one client at a time."""
    with serving(silent=True) as port, pytest.raises(RemoteMissingError, match="does not answer") as busy:
        ask_memory("127.0.0.1", port, 0.2)
    assert busy.value.busy


def test_nothing_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        assert reachable(f"127.0.0.1:{port}")
    assert not reachable(f"127.0.0.1:{port}")
    with pytest.raises(RemoteMissingError, match="refused") as gone:
        ask_memory("127.0.0.1", port)
    assert not gone.value.busy and gone.value.kind == "remote_missing"


def test_another_version_is_no_matter_of_waiting() -> None:
    with serving(version=PROTOCOL + 1) as port, pytest.raises(ConfigError, match=rf"speaks protocol {PROTOCOL + 1}"):
        ask_memory("127.0.0.1", port)


@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH_9\r\n", struct.pack("<Q", 1 << 60), b"\0" * 4])
def test_another_program_is_named_as_one(garbage: bytes) -> None:
    with serving(garbage=garbage) as port, pytest.raises(RemoteMissingError, match="does not answer as an rpc-server"):
        ask_memory("127.0.0.1", port, 2)


def test_a_connection_that_the_server_closed_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert not connected(os.getpid(), endpoint)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            assert connected(os.getpid(), endpoint)
            accepted.close()
            assert not connected(os.getpid(), endpoint), "CLOSE_WAIT"
    assert connected(-1, endpoint), "unknown"


def test_a_board_that_asks_anew_behind_its_own_connection_has_lost_its_engine() -> None:
    """A connection that waits for accept(2) has no inode in /proc/net/tcp, also once its peer has closed it."""
    with socket.create_server(("127.0.0.1", 0), backlog=4) as listener:
        host, port = listener.getsockname()

        def seen() -> Clients:
            return clients(os.getpid(), host, port)

        with socket.create_connection((host, port)), listener.accept()[0]:
            assert len(seen().served) == 1 and seen().waiting == () and not seen().returned
            with socket.create_connection((host, port)):
                assert seen().returned == seen().served, "an engine that waits"
            assert len(seen().waiting) == 1 and not seen().returned, "one look at the port"
            socket.create_connection((host, port)).close()
            assert len(seen().waiting) == 2 and seen().returned, "a plan that asks again and again"
        assert not seen().served and not seen().returned


def test_interfaces_and_routes() -> None:
    assert "127.0.0.1" in own_addresses("lo")
    assert own_addresses("nosuch0") == ()
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_a_server_that_sends_a_byte_now_and_then_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with server.accept()[0] as client, contextlib.suppress(OSError):
                client.recv(100)
                for byte in struct.pack("<Q", 28) + bytes(28):
                    time.sleep(0.1)
                    client.sendall(bytes([byte]))

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(RemoteMissingError):
            ask_memory("127.0.0.1", server.getsockname()[1], 0.3)
        thread.join()
