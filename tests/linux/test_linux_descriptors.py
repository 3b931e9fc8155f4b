"""Servers that meet EMFILE at accept(2) log little, and answer again once descriptors are free."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT

DESCRIPTORS, CLIENTS, PATIENCE_S = 40, 60, 120.0
MEETS_EMFILE = b"socket.accept() out of system resource"  # asyncio's words
ALL = """
import asyncio, resource, socket, sys
from pathlib import Path
from edge.daemon.control import Control
from edge.gateway.server import make_app, serve
from edge.linux.sockets import Listener
from edge.telemetry import jtop_share

class Operations:
    def status(self):
        return {}

async def serving():
    print("serves", flush=True)
    await asyncio.Event().wait()

async def start(path):
    %s

resource.setrlimit(resource.RLIMIT_NOFILE, (%d, %d))
asyncio.run(start(Path(sys.argv[1])))
"""
GATEWAY = """
    listener = Listener(socket.AF_UNIX)
    listener.bind(str(path))
    running = await serve(make_app({}), [listener])
    await serving()
"""
CONTROL = """
    running = Control(path, Operations())
    await running.start()
    await serving()
"""
JTOP = """
    share = jtop_share.JtopShare()
    share.source.run = serving
    share._broadcast(b"a line")
    await share.serve(jtop_share.bind(path))
"""
ASK = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(PATIENCE_S)
    client.connect(str(path))
    return client


@pytest.mark.parametrize(
    ("server", "question", "answer"),
    [
        pytest.param(GATEWAY, ASK % b"/livez", b"HTTP/1.1 200", id="gateway"),
        pytest.param(CONTROL, ASK % b"/status", b"HTTP/1.1 200", id="control"),
        pytest.param(JTOP, b"interval 5\n", b"a line", id="jtop"),
    ],
)
def test_a_server_without_free_descriptors_answers_again_afterwards(
    server: str, question: bytes, answer: bytes, short_dir: Path
) -> None:
    path = short_dir / "s.sock"
    code = ALL % (server, DESCRIPTORS, DESCRIPTORS)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=ROOT
    )
    assert child.stdout is not None and child.stderr is not None
    clients: list[socket.socket] = []
    try:
        assert child.stdout.readline() == b"serves\n"
        clients += [connected(path) for _ in range(CLIENTS)]  # the kernel takes those that the server cannot accept
        seen = next(line for line in child.stderr if MEETS_EMFILE in line)
        for client in clients:
            client.close()
        clients.append(connected(path))
        clients[-1].sendall(question)
        assert clients[-1].recv(4096).startswith(answer)
    finally:
        for client in clients:
            client.close()
        child.kill()
        rest = child.communicate()[1]
    # asyncio tries again each second. With its own backlog one turn of the loop logs a hundred.
    assert (seen + rest).count(MEETS_EMFILE) < 50
