"""A server that speaks llama.cpp's RPC protocol, is silent as a busy one, or speaks something else."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edge.linux.rpc import PROTOCOL

MEMORY = [(6 << 30, 8 << 30), (1 << 30, 2 << 30)]


def answer(client: socket.socket, version: int) -> None:
    """Answer one client as rpc_serve_client does."""
    while header := client.recv(9, socket.MSG_WAITALL):
        command, length = struct.unpack("<BQ", header)
        data = client.recv(length, socket.MSG_WAITALL) if length else b""
        if command == 14:
            assert length == 24
            reply = bytes([version, 0, 0, 0]) + bytes(24)
        elif command == 15:
            reply = struct.pack("<I", len(MEMORY))
        else:
            assert command == 11
            reply = struct.pack("<QQ", *MEMORY[struct.unpack("<I", data)[0]])
        client.sendall(struct.pack("<Q", len(reply)) + reply)


@contextmanager
def serving(version: int = PROTOCOL, *, silent: bool = False, garbage: bytes = b"") -> Iterator[int]:
    """Serve one client on a loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                if garbage:
                    client.sendall(garbage)
                else:
                    answer(client, version)

        thread = threading.Thread(target=serve, daemon=True)
        if not silent:
            thread.start()
        yield listener.getsockname()[1]
        if not silent:
            thread.join(10)
