"""`edgellm rpc serve` over a program that speaks llama.cpp's RPC protocol and can fail on demand."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge.config.devices import rpc_address
from edge.errors import ConfigError
from edge.supervisor.policy import Policy
from edge.supervisor.rpc_server import RpcRequest, RpcServer, trim_cache
from edge.units import GIB, MIB
from tests.serving import alive, eventually, free_port
from tests.supervisor.rig import TABLE

FAST = Policy(backoff_s=(0, 0.05), jitter=0, term_s=2)
# As tools/rpc/rpc-server.cpp: the list of devices waits in the pipe's buffer for the first connection.
PROGRAM = """#!{python}
import os, socket, struct, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
folder = os.path.dirname(os.path.abspath(__file__))
with open(folder + "/starts", "a") as file:
    file.write(str(os.getpid()) + "\\n")
mode = open(folder + "/mode").read()
if mode == "unknown device":
    sys.exit(print("error: unknown device: CUDA7", file=sys.stderr))
if mode == "taken":
    sys.exit(print("Failed to create server socket", file=sys.stderr))
listener = socket.create_server(("127.0.0.1", port))
print("Starting RPC server v7.0.0\\nDevices:\\n  {device} (8000 MiB, 6000 MiB free)")
while True:
    client, _ = listener.accept()
    print("Accepted client connection", flush=True)
    while header := client.recv(9, socket.MSG_WAITALL):
        command, length = struct.unpack("<BQ", header)
        client.recv(length, socket.MSG_WAITALL) if length else b""
        memory = struct.pack("<QQ", 6 << 30, 8 << 30)
        reply = {{14: bytes([7, 0, 0, 0]) + bytes(24), 15: struct.pack("<I", 1), 11: memory}}
        client.sendall(struct.pack("<Q", len(reply[command])) + reply[command])
    client.close()
    print("Client connection closed", flush=True)
"""


class Lender:
    """A running RpcServer. `said`: its sentences."""

    def __init__(self, folder: Path, *, device: str = "CPU: AMD EPYC", mode: str = "", **changes: Any) -> None:
        self.program = folder / "ggml-rpc-server"
        self.program.write_text(PROGRAM.format(python=sys.executable, device=device))
        self.program.chmod(0o755)
        (folder / "mode").write_text(mode)
        self.port = free_port()
        self.said: list[str] = []
        self.ready: list[str] = []
        env = {"PATH": os.environ["PATH"]}
        request = RpcRequest(self.program, rpc_address(f"127.0.0.1:{self.port}"), env, policy=FAST)
        self.server = RpcServer(replace(request, **changes), TABLE, self.said.append, on_ready=self.ready.append)

    @property
    def pids(self) -> list[int]:
        starts = self.program.with_name("starts")
        return [int(line) for line in starts.read_text().split()] if starts.exists() else []

    @property
    def command(self) -> list[str]:
        return Path(f"/proc/{self.pids[-1]}/cmdline").read_text().split("\0")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.server.run())
        try:
            yield task
        finally:
            self.server.stop()
            await asyncio.gather(task, return_exceptions=True)
            assert not [pid for pid in self.pids if alive(pid)], "a server outlived its supervisor"


async def until(true: Any, because: object) -> None:
    await asyncio.to_thread(eventually, true, lambda: str(because))


async def test_it_is_ready_once_it_answers_the_protocol_and_its_gates_say_so(tmp_path: Path) -> None:
    lender = Lender(tmp_path)
    async with lender.running():
        await until(lambda: lender.ready, lender.said)
        gates = lender.server.gates.as_status()
        assert [name for name in ("driver", "context", "backend") if not gates[name].ready] == []
        assert gates["context"].evidence == "CPU AMD EPYC"
        assert not gates["weights"].ready, "the engine that uses the server reports them"
        assert "6.00 GiB free" in lender.ready[0] or "6.0 GiB free" in lender.ready[0]


async def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    lender = Lender(tmp_path)
    async with lender.running():
        await until(lambda: lender.ready, lender.said)
        os.kill(lender.pids[0], signal.SIGKILL)
        await until(lambda: len(lender.ready) == 2, lender.said)
        assert lender.server.restarts == 1 and any(sentence.startswith("killed") for sentence in lender.said)


async def test_a_gpu_build_that_lends_its_cpu_is_ended(tmp_path: Path) -> None:
    lender = Lender(tmp_path, wants_gpu=True)
    async with lender.running():
        await until(lambda: len(lender.pids) >= 2, lender.said)
        assert lender.ready == [] and any("cpu_only" in sentence for sentence in lender.said)


async def test_a_gpu_counts_as_one(tmp_path: Path) -> None:
    lender = Lender(tmp_path, device="CUDA0: Orin", wants_gpu=True, driver="/dev/nvmap opens")
    async with lender.running():
        await until(lambda: lender.ready, lender.said)
        assert lender.server.gates.as_status()["driver"].evidence == "/dev/nvmap opens"


async def test_a_device_that_it_does_not_know_ends_it(tmp_path: Path) -> None:
    lender = Lender(tmp_path, mode="unknown device", devices=("CUDA7",))
    async with lender.running() as task:
        with pytest.raises(ConfigError, match=r"bad_flag.*unknown device: CUDA7"):
            await asyncio.wait_for(task, 30)
    assert len(lender.pids) == 1


async def test_an_address_that_is_taken_is_named_and_tried_again(tmp_path: Path) -> None:
    """rpc-server exits with 0 then: its log is the evidence."""
    lender = Lender(tmp_path, mode="taken")
    async with lender.running():
        await until(lambda: any("socket_busy" in sentence for sentence in lender.said), lender.said)
        (tmp_path / "mode").write_text("")
        await until(lambda: lender.ready, lender.said)


async def test_a_connection_of_a_board_that_lost_its_power_does_not_block_it(tmp_path: Path) -> None:
    """No FIN comes: the server reads from the dead connection without end, until the same board asks anew."""
    lender = Lender(tmp_path, look_s=0.2)
    async with lender.running():
        await until(lambda: lender.ready, lender.said)
        dead = socket.create_connection(("127.0.0.1", lender.port))
        await until(lambda: lender.server.clients == 1, lender.said)
        await asyncio.sleep(0.8)
        assert lender.server.restarts == 0, "an idle engine is left alone"
        with socket.create_connection(("127.0.0.1", lender.port)):
            await until(lambda: len(lender.ready) == 2, lender.said)
        assert any(sentence.startswith("peer_gone") for sentence in lender.said)
        dead.close()


def tensors(folder: Path, **used_s: int) -> None:
    """Files of one MiB as rpc-server names them, last used at these times."""
    folder.mkdir(parents=True, exist_ok=True)
    for letter, at_s in used_s.items():
        path = folder / (letter * 16)
        path.write_bytes(os.urandom(MIB))
        os.utime(path, (at_s, at_s))


def test_the_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    tensors(tmp_path, a=1000, b=4000, c=3000, d=2000)
    os.utime(tmp_path / ("a" * 16), (5000, 1000))  # read since it was written
    (tmp_path / "notes.txt").write_bytes(bytes(9 * MIB))
    assert trim_cache(tmp_path, 5 * MIB // 2) == 2
    assert {path.name[0] for path in tmp_path.iterdir()} == {"a", "b", "n"}
    assert trim_cache(tmp_path, 5 * MIB // 2) == 0
    assert trim_cache(tmp_path / "absent", 0) == 0


def test_the_cache_leaves_the_disk_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors(tmp_path, a=1000, b=2000)
    disk = os.statvfs(tmp_path)
    free = 2 * GIB - MIB  # with one file less the disk has its 2 GiB
    fields = [*disk[:4], free // disk.f_frsize, *disk[5:]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert trim_cache(tmp_path, GIB) == 1
    assert [path.name[0] for path in tmp_path.iterdir()] == ["b"]


async def test_the_cache_is_trimmed_before_each_start_and_while_it_serves(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "rpc"
    tensors(folder, a=1000, b=2000)
    env = {"PATH": os.environ["PATH"], "LLAMA_CACHE": str(tmp_path / "cache")}
    lender = Lender(tmp_path, look_s=0.05, env=env, cache_bytes=3 * MIB // 2)
    async with lender.running():
        await until(lambda: lender.ready, lender.said)
        assert [path.name[0] for path in folder.iterdir()] == ["b"]
        assert "--cache" in lender.command
        tensors(folder, c=3000)
        await until(lambda: [path.name[0] for path in folder.iterdir()] == ["c"], lender.said)


async def test_without_the_option_no_file_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "rpc"
    tensors(folder, a=1000)
    env = {"PATH": os.environ["PATH"], "LLAMA_CACHE": str(tmp_path / "cache")}
    lender = Lender(tmp_path, env=env)
    async with lender.running():
        await until(lambda: lender.ready, lender.said)
        assert "--cache" not in lender.command
    assert (folder / ("a" * 16)).exists()


async def test_stop_ends_it_before_it_is_ready(tmp_path: Path) -> None:
    lender = Lender(tmp_path)
    async with lender.running():
        await until(lambda: lender.pids, lender.said)
