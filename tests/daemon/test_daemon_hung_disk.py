"""The disk of the state folder does not answer: the supervisor, the gateway and the stop go on without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import httpx

from edge.daemon.remembered_launch import read_record
from edge.plan import start_records
from tests.daemon.served import Served, served
from tests.needs import compiler
from tests.serving import PATIENCE_S, eventually

HANGING_OPEN = Path(__file__).parents[1] / "fakes" / "hanging_open.c"


class HungDisk:
    """A folder whose files cannot be opened or removed while `hang()` holds: open(2) and unlink(2) do not return."""

    def __init__(self, folder: Path, state: Path) -> None:
        cc = compiler("opens cannot be held up")
        library, self._file = folder / "hang.so", folder / "hang"
        subprocess.run([cc, "-shared", "-fPIC", "-o", library, HANGING_OPEN, "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "HANG_PATH": f"{state}/", "HANG_FILE": str(self._file)}

    def hang(self) -> None:
        self._file.touch()

    def answer(self) -> None:
        self._file.unlink()


def livez(up: Served) -> int:
    return httpx.get(f"{up.url}/livez", timeout=PATIENCE_S).status_code


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def serve_through_a_crash(up: Served, go_on: Path) -> None:
    """READY, a kill of the engine, and READY again."""
    assert livez(up) == 200
    go_on.touch()
    former = up.ready()["pid"]
    assert up.chat().status_code == 200
    os.kill(former, signal.SIGKILL)
    eventually(lambda: up.model()["pid"] not in (None, former), lambda: f"no other engine: {up.output}")
    up.ready()
    assert (up.chat().status_code, livez(up)) == (200, 200)
    (crash,) = up.status()["crashes"]
    assert (crash["kind"], crash["state"]) == ("killed", "READY"), "what the disk lacks is shown"
    shown = httpx.get(f"{up.url}/starts", timeout=PATIENCE_S).json()["starts"]
    assert [start["outcome"] for start in shown] == ["ready", "ready"]


def test_a_state_folder_that_hangs_stops_neither_the_gateway_nor_the_stop(short_dir: Path, smollm2: Path) -> None:
    state, go_on = short_dir / "s" / "state", short_dir / "go-on"
    disk = HungDisk(short_dir, state)
    chat = f'id = "chat"\nref = "{smollm2}"'
    with served(short_dir, chat, ready=False, env=disk.env, silent_until=str(go_on)) as up:
        eventually(lambda: up.pids and up.healthz(), lambda: f"no engine, or no gateway: {up.output}")
        before = files(state)
        disk.hang()
        serve_through_a_crash(up, go_on)
        assert files(state) == before, "nothing was written: the disk hung"
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(PATIENCE_S) == 0, up.output
        assert f"{state / 'main'} did not answer in time: records of this run are lost" in up.output
        assert files(state) == before


def test_what_waited_is_written_in_order_when_the_disk_answers(short_dir: Path, smollm2: Path) -> None:
    state, go_on = short_dir / "s" / "state", short_dir / "go-on"
    disk = HungDisk(short_dir, state)
    chat = f'id = "chat"\nref = "{smollm2}"'
    with served(short_dir, chat, ready=False, env=disk.env, silent_until=str(go_on)) as up:
        eventually(lambda: up.pids and up.healthz(), lambda: f"no engine, or no gateway: {up.output}")
        disk.hang()
        serve_through_a_crash(up, go_on)
        disk.answer()
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(PATIENCE_S) == 0, up.output
    starts = start_records.read(state / "main" / "starts.jsonl")
    assert [start["outcome"] for start in starts] == ["ready", "ready"]
    (crash,) = start_records.read(state / "main" / "crashes.jsonl")
    assert crash["kind"] == "killed"
    assert read_record(state / "main" / "launch.json") is not None
    assert json.loads((state / "calibration.json").read_text())["engines"]
