"""`edgellm top`: what fits on 80 × 24, and a terminal that is left as it was found."""

import asyncio
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ, tcgetattr
from typing import Any
from unittest.mock import Mock

import pytest

from edge.board.probe import probe
from edge.cli.top import Past, plain, screen
from edge.config.values import TelemetryConfig
from edge.daemon.control import Control
from edge.daemon.lock import acquire
from edge.paths import folders
from edge.telemetry.telemetry import Telemetry
from tests.fakes.fake_jetson.tree import FakeBoard
from tests.fakes.waiting import running, until

BOARDS = ["agx-orin-64", "orin-nano-8", "agx-thor"]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def status(*models: str) -> dict[str, Any]:
    rows = {model: {"state": "READY", "rung": 0, "gates": {}, "degraded": [], "progress": None} for model in models}
    urls = ["http://127.0.0.1:8080"]
    return {"version": "0.1.0", "status": "ok", "uptime_s": 7384.0, "urls": urls, "models": rows}


async def document(board: FakeBoard) -> dict[str, Any]:
    board.set_total_power(23.4)
    board.set_all_temps(91.5)
    board.set_gpu(load=87, mhz=918)
    board.set_cooling("gpu-throttle-alert", 1)
    board.set_overcurrent(3, 4)
    telemetry = Telemetry.of(probe(board.root), TelemetryConfig(jtop="off", interval_s=0.02), root=board.root)
    work = telemetry.energy.begin(telemetry.sampler.clock(), "chat")
    work.tokens = 40
    async with running(telemetry.run()):
        await until(lambda: telemetry.latest and telemetry.latest.cpu_load_ratio is not None)
        await until(lambda: telemetry.energy.by_model)
        board.set_overcurrent(3, 9)
        await until(lambda: telemetry.latest.overcurrent["oc3"] == 5)
        return json.loads(json.dumps(telemetry.document(history=False)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("board", BOARDS, indirect=True)
async def test_it_fits_80_by_24_and_shows_what_it_knows(board: FakeBoard) -> None:
    telemetry, past = await document(board), Past()
    for _ in range(100):
        past.add(telemetry)
    lines = list(plain(screen(status("chat"), telemetry, past, 80, 24), 80))
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for word in ("READY", "tj", "91.5", f"{board.spec['trips'][0] / 1000:.0f}", "CPU", "memory", "rpm", "oc3 5"):
        assert word in text, word
    assert telemetry["power"]["rail"] in text
    assert "23.4" in text
    assert "throttled by the board: gpu-throttle-alert" in text
    assert ("87%" in text) == (board.name != "agx-thor")


async def test_many_models_leave_room_for_all_of_them(board: FakeBoard) -> None:
    telemetry = await document(board)
    names = [f"model-{n}" for n in range(6)]
    lines = list(plain(screen(status(*names), telemetry, Past(), 80, 24), 80))
    assert len(lines) <= 24
    assert all(any(name in line for line in lines) for name in names)


async def test_a_machine_without_sensors_shows_dashes_not_zeros(tmp_path: Path) -> None:
    telemetry = Telemetry.of(probe(tmp_path), TelemetryConfig(jtop="off", interval_s=0.02), root=tmp_path)
    async with running(telemetry.run()):
        await until(lambda: telemetry.latest)
        known = telemetry.document(history=False)
    text = "\n".join(plain(screen(status("chat"), known, Past(), 80), 80))
    assert "no sensor" in text
    assert "not measured" in text
    assert "0.0 °C" not in text
    assert list(plain(screen(status("chat"), {"source": "none"}, Past(), 80), 80))


@contextmanager
def terminal(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """The command on a terminal of 80 × 24: (process, our end, its end)."""
    ours, its = pty.openpty()
    ioctl(its, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=env)
    try:
        yield process, ours, its
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(its)


def read(ours: int, until_frames: int) -> str:
    """What was written until so many frames have begun."""
    text = b""
    while text.count(b"\x1b[H") < until_frames:
        ready, _, _ = select.select([ours], [], [], 30)
        assert ready, f"nothing for 30 s after {text!r}"
        text += os.read(ours, 65536)
    return text.decode()


async def test_on_a_terminal_it_draws_over_itself_and_leaves_it_as_it_was(short_dir: Path, board: FakeBoard) -> None:
    """No frame clears the screen (that is what flickers), each has 24 lines of 80, and q restores everything."""
    telemetry = await document(board)
    places = folders({}, short_dir)
    lock = acquire(places)
    operations = Mock(status=lambda: status("chat"), telemetry=lambda: telemetry)
    control = Control(places.control_socket, operations)
    await control.start()
    try:
        with terminal(sys.executable, "-m", "edge", "top", "--state-dir", str(short_dir)) as (process, ours, its):
            before = tcgetattr(its)
            text = await asyncio.to_thread(read, ours, 4)
            os.write(ours, b"q")
            rest = await asyncio.to_thread(_drain, ours, process)
            assert process.returncode == 0, rest
            assert tcgetattr(its) == before
    finally:
        await control.close()
        lock.release()
    frames = text.split("\x1b[H")[1:-1]
    assert text.count("\x1b[?1049h") == 1
    assert "\x1b[?1049l" in rest
    assert all("\x1b[2J" not in frame and "\x1b[K" not in frame for frame in frames[1:])
    lines = ESCAPES.sub("", frames[-1]).split("\n")
    assert len(lines) == 24
    assert max(len(line.rstrip("\r")) for line in lines) <= 80


def in_another_session(*command: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command on a terminal that is not its controlling one, and the only other end of that terminal."""
    ours, its = pty.openpty()
    ioctl(its, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.PIPE, env=env, start_new_session=True)
    os.close(its)
    return process, ours


async def test_a_terminal_that_went_away_ends_it_with_a_sentence(short_dir: Path, board: FakeBoard) -> None:
    """Without a SIGHUP, as under nohup or another session: the next frame cannot be written."""
    telemetry = await document(board)
    places = folders({}, short_dir)
    lock = acquire(places)
    control = Control(places.control_socket, Mock(status=lambda: status("chat"), telemetry=lambda: telemetry))
    await control.start()
    process, ours = in_another_session(sys.executable, "-m", "edge", "top", "--state-dir", str(short_dir))
    try:
        await asyncio.to_thread(read, ours, 1)
        os.close(ours)
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    finally:
        process.kill()
        process.wait()
        await control.close()
        lock.release()
    assert process.returncode == 74, said
    assert b"Traceback" not in said and b"the output could not be written: Input/output error" in said


def _drain(ours: int, process: subprocess.Popen[bytes]) -> str:
    text = b""
    while process.poll() is None:
        ready, _, _ = select.select([ours], [], [], 0.1)
        if ready:
            text += os.read(ours, 65536)
    while select.select([ours], [], [], 0)[0]:
        text += os.read(ours, 65536)
    return text.decode()


def test_without_an_instance_it_says_so(short_dir: Path) -> None:
    command = [sys.executable, "-m", "edge", "top", "--state-dir", str(short_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 69
    assert "no edgellm is running" in done.stderr
