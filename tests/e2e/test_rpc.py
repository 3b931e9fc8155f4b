"""A model over two boards: real rpc-servers, built from the pinned source, in network namespaces joined by veth pairs.

The first board is this machine, with a limit on its memory that the model's context does not fit into. Needs root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.engine.choose import choose
from edge.engine.installed import manifest, read_selection
from edge.linux.rpc import ask_memory
from edge.paths import Folders
from tests.leftovers import began_ticks, runs
from tests.serving import ROOT, Up, alive, children, edgellm, environment, eventually

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip(8)"
    ),
]

PORT = 50052
PATIENCE_S = 180
N_CTX = 8192


def ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, (words, done.stderr)


@pytest.fixture(scope="module", autouse=True)
def no_former_boards() -> None:
    """A namespace of a run that was killed would keep its network, and ours has the same addresses."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for name in re.findall(r"^edgellm-\S+", done.stdout, re.MULTILINE):
        pid, ticks = ([*re.findall(r"\d+", name), "", ""])[:2]
        if runs(f"{pid}:{ticks}"):
            continue
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for member in inside.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(member), signal.SIGKILL)
        ip("-n", name, "link", "del", f"eb{pid}-{name[-1]}"[:15], check=False)  # and with it the end that is here
        ip("netns", "del", name)


class Board:
    """Another board: a network namespace with its own `edgellm rpc serve`, and the interface here that leads to it."""

    def __init__(self, built: Folders, folder: Path, number: int) -> None:
        self.name = f"edgellm-{os.getpid()}-{began_ticks(os.getpid())}-{number}"
        self.here, self.there = f"ea{os.getpid()}-{number}"[:15], f"eb{os.getpid()}-{number}"[:15]
        net = f"10.213.{100 + number}"
        self.address = f"{net}.2"
        self.endpoint = f"{self.address}:{PORT}"
        self.built = built
        self.log = folder / f"board-{number}.log"
        self.process: subprocess.Popen[bytes] | None = None
        ip("netns", "add", self.name)
        ip("link", "add", self.here, "type", "veth", "peer", "name", self.there, "netns", self.name)
        ip("addr", "add", f"{net}.1/24", "dev", self.here)
        ip("link", "set", self.here, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", self.there),
            ("link", "set", self.there, "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", self.name, *words)

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.name}", sys.executable, "-m", "edge", *words]

    def serve(self, *more: str) -> None:
        words = ("rpc", "serve", "--listen", self.endpoint, "--interface", self.there, "--threads", "1", *more)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command(*words, "--state-dir", str(self.built.data.parent)),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
        eventually(lambda: self.said(" free") > 0, lambda: self.log.read_text(), PATIENCE_S)

    def said(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(f"rpc-server at {self.endpoint}") if text == " free" else 0

    @property
    def server_pid(self) -> int:
        assert self.process is not None
        (pid,) = children(self.process.pid)
        return pid

    def end(self) -> int | None:
        if self.process is None:
            return None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self.process = None
        self.log.write_text("")
        return code

    def close(self) -> None:
        self.end()
        ip("link", "del", self.here, check=False)
        ip("netns", "del", self.name, check=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a unix socket's name has 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="edgellm-rpc-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def board(built_rpc: Folders, folder: Path) -> Iterator[Board]:
    one = Board(built_rpc, folder, 1)
    try:
        yield one
    finally:
        one.close()


def configure(built: Folders, state: Path, *boards: Board, absent: str, limit: str = "300MiB", more: str = "") -> None:
    """Write edgellm.toml of the first board, which uses the same engine."""
    (state / "config").mkdir(parents=True)
    (state / "data").mkdir()
    (state / "data" / "engines").symlink_to(built.engines)
    tables = [
        f'[[device]]\nrpc = "{each.endpoint}"\ninterface = "{each.here}"\nmemory = "1GiB"\nabsent = "{absent}"\n'
        for each in boards
    ]
    head = f'[memory]\nlimit = "{limit}"\n[restart]\ndevice_attempts = 1\nwedge_s = 5\nbackoff_s = [0, 0.5]\n'
    settings = f'[set]\nn_ctx = {N_CTX}\nn_ctx_min = 512\nkv_type_min = "f16"\ncache_ram = 0\nflash_attention = "on"\n'
    (state / "config" / "edgellm.toml").write_text(head + more + settings + "\n".join(tables))


def model(up: Up) -> dict[str, Any]:
    """The status of the model; without a state before the control socket answers."""
    assert up.process.poll() is None, f"edgellm ended with {up.process.returncode}:\n{up.output}"
    done = edgellm("status", "--json", "--state-dir", str(up.state))
    if done.returncode:
        return {"state": None}
    (found,) = json.loads(done.stdout)["models"].values()
    return dict(found)


def ready(up: Up, accepts: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = model(up)
        return found if found["state"] == "READY" and accepts(found) else None

    found: dict[str, Any] = eventually(look, lambda: f"{model(up)}\n{up.output[-3000:]}", PATIENCE_S)
    return found


def start(state: Path, smollm2: Path) -> Up:
    return Up(state, "-p", "cpu", "-m", f"chat={smollm2}")


def answer(up: Up) -> str:
    got = up.chat("The capital of France is", max_tokens=12, timeout=PATIENCE_S)
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["message"]["content"])


class Story(threading.Thread):
    """A long answer in a stream. `broken`: the connection ended before the answer did."""

    def __init__(self, up: Up) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.broken = False
        self._url = f"{up.url}/v1/chat/completions"
        self.start()

    def run(self) -> None:
        messages = [{"role": "user", "content": "Tell a long story"}]
        body = {"messages": messages, "max_tokens": 2000, "stream": True, "temperature": 0}
        try:
            with httpx.stream("POST", self._url, json=body, timeout=PATIENCE_S) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
        except httpx.RemoteProtocolError:
            self.broken = True


def test_the_build_has_the_server_and_says_that_it_has_rpc(built_rpc: Folders) -> None:
    current = read_selection(built_rpc.engines).current
    assert current is not None and "-cpu-rpc-" in current
    document = manifest(built_rpc.engines, current)
    assert "bin/ggml-rpc-server" in document["files"] and document["rpc"] is True
    assert document["unknown_options"] == []
    assert choose(built_rpc, None, needs_gpu=False).rpc


def test_layers_on_another_board_and_a_killed_server(
    built_rpc: Folders, board: Board, folder: Path, smollm2: Path
) -> None:
    """Both boards compute one answer; a killed rpc-server is named, comes back, and the model serves again."""
    board.serve()
    assert ask_memory(board.address, PORT)[0].total_bytes > 1 << 30
    state = folder / "s"
    configure(built_rpc, state, board, absent="wait")
    with start(state, smollm2) as up:
        found = ready(up, lambda it: True)
        weights, context = found["gates"]["weights"], found["gates"]["context"]
        assert weights["devices"]["RPC0"]["ready"] and context["devices"]["RPC0"]["ready"]
        assert board.endpoint in context["devices"]["RPC0"]["evidence"]
        assert found["degraded"] == []
        before = answer(up)
        os.kill(board.server_pid, signal.SIGKILL)
        eventually(lambda: "remote_lost" in up.output, lambda: up.output, PATIENCE_S)
        ready(up, lambda it: it["restarts"] > 0)
        assert answer(up) == before
        assert board.process is not None and board.process.poll() is None, "`edgellm rpc serve` started it again"
    assert board.end() == 0


def test_a_server_killed_while_it_computes_fails_the_request_by_name(
    built_rpc: Folders, board: Board, folder: Path, smollm2: Path
) -> None:
    board.serve()
    state = folder / "s"
    configure(built_rpc, state, board, absent="without")
    with start(state, smollm2) as up:
        ready(up, lambda it: not it["degraded"])
        story = Story(up)
        eventually(lambda: len(story.lines) > 2, "tokens arrive", PATIENCE_S)
        assert board.process is not None
        server, supervisor = board.server_pid, board.process.pid
        os.kill(supervisor, signal.SIGKILL)  # the whole board goes: its rpc-server dies with its supervisor
        board.process.wait()
        board.process = None
        eventually(lambda: not alive(server), "the parent-death signal ends the rpc-server")
        story.join(PATIENCE_S)
        text = "\n".join(story.lines)
        assert "[DONE]" not in text and ("error" in text or story.broken), "no answer is cut off silently"
        # A smaller plan without the board, named, and back when it returns.
        alone = ready(up, lambda it: any(each["subject"] == "rpc" for each in it["degraded"]))
        assert "remote_" in next(each["because"] for each in alone["degraded"] if each["subject"] == "rpc")
        assert answer(up)
        board.serve()
        ready(up, lambda it: not it["degraded"])
        assert answer(up)


def test_a_board_whose_link_is_down_is_no_plain_hang(
    built_rpc: Folders, board: Board, folder: Path, smollm2: Path
) -> None:
    """No connection is closed where a board loses power: the engine waits for its answer without end."""
    board.serve()
    state = folder / "s"
    configure(built_rpc, state, board, absent="without", more="stall_s = 5\n")
    with start(state, smollm2) as up:
        ready(up, lambda it: not it["degraded"])
        ip("link", "set", board.here, "down")
        asking = threading.Thread(target=lambda: up.chat("Hello", max_tokens=8, timeout=PATIENCE_S))
        asking.start()
        alone = ready(up, lambda it: any(each["subject"] == "rpc" for each in it["degraded"]))
        asking.join(PATIENCE_S)
        assert "remote_lost" in up.output
        assert alone["restarts"] > 0
        assert answer(up)
        # As after a loss of power here: nothing closes the connection over there, which the server still reads.
        subprocess.run(["ss", "-K", "dst", board.address], capture_output=True, check=False)
        ip("link", "set", board.here, "up")
        ready(up, lambda it: not it["degraded"])
        assert answer(up)


def test_a_board_that_is_absent_at_the_start_is_waited_for(
    built_rpc: Folders, board: Board, folder: Path, smollm2: Path
) -> None:
    state = folder / "s"
    configure(built_rpc, state, board, absent="wait")
    planned = edgellm("plan", "-p", "cpu", "-m", f"chat={smollm2}", "--state-dir", str(state))
    assert planned.returncode == 0 and "planned without the rpc-server" in planned.stdout
    with start(state, smollm2) as up:
        eventually(lambda: "remote_missing" in up.output or board.endpoint in up.output, lambda: up.output, PATIENCE_S)
        board.serve()
        found = ready(up, lambda it: not it["degraded"])
        assert found["gates"]["weights"]["devices"]["RPC0"]["ready"]


def test_two_boards_hold_a_model_together(built_rpc: Folders, board: Board, folder: Path, smollm2: Path) -> None:
    second = Board(built_rpc, folder, 2)
    try:
        board.serve()
        second.serve()
        state = folder / "s"
        configure(built_rpc, state, board, second, absent="wait", limit="180MiB")
        text = (state / "config" / "edgellm.toml").read_text().replace('memory = "1GiB"', 'memory = "190MiB"')
        (state / "config" / "edgellm.toml").write_text(text)
        with start(state, smollm2) as up:
            found = ready(up, lambda it: True)
            assert set(found["gates"]["weights"]["devices"]) == {"RPC0", "RPC1"}
            assert answer(up)
    finally:
        second.close()


def test_the_doctor_asks_the_other_board(built_rpc: Folders, board: Board, folder: Path, smollm2: Path) -> None:
    state = folder / "s"
    configure(built_rpc, state, board, absent="wait")

    def checked() -> dict[str, Any]:
        done = edgellm("doctor", "--json", "-p", "cpu", "--state-dir", str(state), timeout=PATIENCE_S)
        (found,) = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "config.device"]
        return dict(found)

    absent = checked()
    assert absent["verdict"] == "bad" and board.endpoint in absent["says"]
    assert "edgellm rpc serve" in absent["next"]
    board.serve()
    lends = checked()
    assert (lends["verdict"], lends["says"]) == ("ok", f"the rpc-server at {board.endpoint} lends 1.0 GiB")
    with start(state, smollm2) as up:
        before = ready(up, lambda it: True)
        assert "serves an engine of this board" in checked()["says"]
        assert answer(up)
        assert model(up)["restarts"] == before["restarts"], "the question did not disturb the engine"


def test_the_cache_of_a_server_is_used_and_bounded(
    built_rpc: Folders, board: Board, folder: Path, smollm2: Path
) -> None:
    """The one tensor of this model above 10 MiB is its output; smaller ones are always sent."""
    cache = built_rpc.cache / "llama.cpp" / "rpc"
    shutil.rmtree(cache, ignore_errors=True)
    state = folder / "s"
    configure(built_rpc, state, board, absent="wait")
    board.serve("--cache")
    with start(state, smollm2) as up:
        ready(up, lambda it: True)
        before = answer(up)
    kept = sorted(cache.iterdir())
    assert kept and all(path.stat().st_size > 10 << 20 for path in kept)
    board.end()
    board.serve("--cache", "--cache-limit", "1MiB")
    assert list(cache.iterdir()) == []
    with start(state, smollm2) as up:
        ready(up, lambda it: True)
        assert answer(up) == before
        eventually(lambda: list(cache.iterdir()) == [], "what this load left goes too", PATIENCE_S)
