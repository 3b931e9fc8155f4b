"""A disk or a driver does not answer: the supervisor, the gateway and the stop go on without it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from edge.daemon.remembered_launch import read_record
from edge.errors import EdgeError
from edge.plan import start_records
from tests.daemon.served import Served, config_text, served
from tests.fakes import llama_switches
from tests.needs import compiler
from tests.serving import PATIENCE_S, Up, eventually, free_port

HANGING_OPEN = Path(__file__).parents[1] / "fakes" / "hanging_open.c"


class HungDisk:
    """Files that cannot be opened or removed while `hang()` holds: open(2) and unlink(2) do not return.

    Their paths begin with `path`, and not with `spared`.
    """

    def __init__(self, folder: Path, path: str, spared: str = "/nonexistent") -> None:
        cc = compiler("opens cannot be held up")
        library, self._file = folder / "hang.so", folder / "hang"
        subprocess.run([cc, "-shared", "-fPIC", "-o", library, HANGING_OPEN, "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "HANG_PATH": path, "HANG_EXCEPT": spared, "HANG_FILE": str(self._file)}

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
    disk = HungDisk(short_dir, f"{state}/")
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
    disk = HungDisk(short_dir, f"{state}/")
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


@pytest.mark.parametrize("what", ["driver", "disk", "state"])
def test_what_hangs_before_the_plan_is_named_behind_an_open_gateway(short_dir: Path, smollm2: Path, what: str) -> None:
    """A file of the kernel, the model, or the state folder: it is named, waited for, and the model served after it."""
    model = short_dir / "disk" / "m.gguf"
    model.parent.mkdir()
    shutil.copy(smollm2, model)
    path = {"driver": "/proc/cpuinfo", "disk": str(model), "state": f"{short_dir}/s/state/"}[what]
    hung = HungDisk(short_dir, path)
    hung.hang()
    with served(short_dir, f'id = "chat"\nref = "{model}"', ready=False, env=hung.env) as up:
        eventually(up.healthz, lambda: f"no gateway: {up.process.poll()} {up.output}")
        assert livez(up) == 200
        row = up.model()
        said, evidence = f"a read of {path}", row["failure"]["evidence"]
        assert (row["state"], row["failure"]["kind"]) == (
            "STARTING",
            "device_missing" if what == "driver" else "disk_hangs",
        )
        assert said in evidence and "has not returned for 10 s" in evidence and up.pids == []
        assert what != "driver" or said in row["gates"]["driver"]["evidence"]
        hung.answer()
        up.ready()
        assert up.chat().status_code == 200


def test_a_remembered_launch_is_compared_no_longer_than_its_limit(short_dir: Path, smollm2: Path) -> None:
    """The comparison reads files of the kernel before anything else runs: it is given up, and the plan names the file.

    Once that returns, the model is served.
    """
    chat, path = f'id = "chat"\nref = "{smollm2}"', "/sys/fs/cgroup/cpu.max"
    hung = HungDisk(short_dir, path)
    (fake := short_dir / "fake").mkdir()
    (config := short_dir / "s" / "config" / "edgellm.toml").parent.mkdir(parents=True)
    config.write_text(config_text(chat))
    binary = llama_switches.write_fake(fake, kv_mib=400.0)
    port = free_port()
    with Up(short_dir / "s", "--engine", str(binary), port=port) as first:
        first.wait_for("ok")
        record = short_dir / "s" / "state" / "main" / "launch.json"
        eventually(record.exists, lambda: f"no record: {first.output}")
    hung.hang()
    with Up(short_dir / "s", "--engine", str(binary), port=port, env=hung.env) as second:
        eventually(second.healthz, lambda: f"no gateway: {second.process.poll()} {second.output}")
        assert f"a read of {path} has not returned" in second.output
        assert len(llama_switches.starts(fake)) == 1
        hung.answer()
        second.wait_for("ok")


def test_a_disk_that_hangs_before_the_plan_holds_up_no_stop(short_dir: Path, smollm2: Path) -> None:
    hung = HungDisk(short_dir, str(smollm2))
    hung.hang()
    with served(short_dir, f'id = "chat"\nref = "{smollm2}"', ready=False, env=hung.env) as up:
        eventually(up.healthz, lambda: f"no gateway: {up.process.poll()} {up.output}")
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(PATIENCE_S) == 0, up.output


def test_no_disk_is_read_on_the_event_loop_while_it_serves(short_dir: Path, smollm2: Path) -> None:
    """Every file of ours and the model's hang: answers, a crash, a look at the state, a reload, and the stop."""
    base = short_dir / "s"
    hung = HungDisk(short_dir, f"{base}/", f"{base}/run/")
    model = base / "models" / "m.gguf"
    model.parent.mkdir(parents=True)
    shutil.copy(smollm2, model)
    with served(short_dir, f'id = "chat"\nref = "{model}"', env=hung.env) as up:
        former = up.ready()["pid"]
        hung.hang()
        os.kill(former, signal.SIGKILL)
        eventually(lambda: up.model()["pid"] not in (None, former), lambda: f"no other engine: {up.output}")
        up.ready()
        for path in ("/livez", "/readyz", "/healthz", "/metrics", "/v1/models", "/api/tags", "/api/ps", "/starts", "/"):
            assert httpx.get(f"{up.url}{path}", timeout=PATIENCE_S).status_code == 200, path
        assert up.chat().status_code == 200
        reload = threading.Thread(target=lambda: suppressed(up.reload), daemon=True)
        reload.start()
        up.process.send_signal(signal.SIGHUP)  # and another reload behind it
        for _ in range(50):
            assert livez(up) == 200
        assert up.chat().status_code == 200 and reload.is_alive(), (
            "the reload waits for the disk, and nothing else does"
        )
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(PATIENCE_S) == 0, up.output


def suppressed(request: Callable[[], object]) -> None:
    """Make a request whose answer the end of the server cuts off."""
    with suppress(EdgeError, httpx.HTTPError, OSError):
        request()
