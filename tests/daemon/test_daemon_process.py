"""The processes of an edgellm: none outlives it, none of others is killed, all appear in `status`."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from edge.daemon.lock import held
from edge.plan import start_records
from tests.daemon.served import Served, served
from tests.fakes.llama_switches import Death, change
from tests.serving import alive, children, edgellm, eventually, free_port


@pytest.fixture(scope="module")
def chat(smollm2: Path) -> str:
    return f'id = "chat"\nref = "{smollm2}"'


@pytest.fixture(scope="module")
def up(chat: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("p"), chat, top="[restart]\nbackoff_s = [0]") as running:
        yield running


def test_fc32_sigkill_of_the_supervisor_leaves_nothing_alive_or_locked(short_dir: Path, chat: str) -> None:
    with served(short_dir, chat) as up:
        child = up.model()["pid"]
        run = Path(up.status()["folders"]["run"])
        up.process.kill()
        up.process.wait()
        eventually(lambda: not alive(child), "the engine dies with it")
        assert not held(run / "lock")
        with Served(up.state, "--engine", str(up.fake / "llama-server"), port=up.port) as again:
            again.wait_for("ok")  # the sockets that were left behind are no obstacle
            assert again.chat().status_code == 200


def test_fc32_a_stale_pid_is_nobodys(short_dir: Path, chat: str) -> None:
    """The lock file names a pid that now belongs to another process: only the lock counts."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        run = short_dir / "s" / "run" / "main"
        run.mkdir(parents=True)
        (run / "lock").write_text(json.dumps({"schema": 1, "pid": stranger.pid, "urls": []}))
        (run / "chat.sock").write_text("not even a socket")
        with served(short_dir, chat) as up:
            assert up.chat().status_code == 200
            up.cli("stop")
            eventually(lambda: up.process.poll() is not None, "it stops")
        assert stranger.poll() is None, "a process that is not ours was killed"
        stranger.kill()


def test_fc32_two_with_two_state_folders_live_side_by_side(up: Served, short_dir: Path, chat: str) -> None:
    first = up.model()["pid"]
    with served(short_dir, chat) as second:
        assert alive(first) and second.model()["pid"] != first
        second.cli("stop")
        second.process.wait(60)
    assert alive(first) and up.chat().status_code == 200


def test_a_second_up_in_the_same_folder_names_the_first(up: Served) -> None:
    done = edgellm("up", "--state-dir", str(up.state), "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode == 69
    assert str(up.process.pid) in done.stderr and up.url in done.stderr


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_fc34_a_busy_port_is_said_before_anything_is_loaded(short_dir: Path, chat: str, family: int) -> None:
    """Also a listener on :: only, which is never taken for our own."""
    with socket.socket(family) as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind(("::" if family == socket.AF_INET6 else "127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        with served(short_dir, chat, ready=False) as up:
            up.process.kill()
            up.process.wait()
            before = len(up.pids)
            done = edgellm("up", "--state-dir", str(up.state), "--listen", f"127.0.0.1:{port}")
            assert done.returncode == 69, done.stderr
            assert "is taken by" in done.stderr and str(port) in done.stderr
            assert f"pid {os.getpid()}" in done.stderr, "the owner is named"
            assert len(up.pids) == before, "no engine was started for it"


def test_fc34_a_port_in_time_wait_is_free(short_dir: Path, chat: str) -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first keeps TIME_WAIT
            assert client.recv(1) == b""
    with served(short_dir, chat, ready=False) as up:
        up.process.kill()
        up.process.wait()
        with Served(up.state, "--engine", str(up.fake / "llama-server"), port=port) as again:
            again.wait_for("ok")


def test_a_child_has_a_session_a_mask_and_an_oom_score_of_its_own(up: Served) -> None:
    pid = up.model()["pid"]
    assert os.getsid(pid) == pid
    fields = Path(f"/proc/{pid}/status").read_text()
    assert "Umask:\t0077" in fields
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) > int(
        Path(f"/proc/{up.process.pid}/oom_score_adj").read_text()
    )
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"LC_ALL=C" in environment
    assert not any(entry.startswith((b"LLAMA_ARG", b"EDGELLM", b"PYTHON", b"NO_COLOR")) for entry in environment)
    assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")


def test_nice_and_processors_come_from_the_configuration(short_dir: Path, chat: str) -> None:
    cpu = min(os.sched_getaffinity(0))
    with served(short_dir, f"{chat}\nset = {{ nice = 5, cpus = [{cpu}] }}") as up:
        pid, nice = up.model()["pid"], min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)  # the tests may be niced
        assert os.getpriority(os.PRIO_PROCESS, pid) == nice
        assert os.sched_getaffinity(pid) == {cpu}
        os.kill(pid, signal.SIGKILL)
        again = eventually(lambda: (m := up.model())["state"] == "READY" and m["pid"] != pid and m["pid"], "it is back")
        assert os.getpriority(os.PRIO_PROCESS, again) == nice


def test_no_zombie_and_no_descriptor_is_left_by_restarts(up: Served) -> None:
    up.client.restart()
    up.ready()
    before = len(list(Path(f"/proc/{up.process.pid}/fd").iterdir()))
    for _ in range(5):
        killed = up.model()["pid"]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda former=killed: up.ready()["pid"] != former, "it is back")
    eventually(lambda: len(children(up.process.pid)) == 1, "one child")
    eventually(
        lambda: len(list(Path(f"/proc/{up.process.pid}/fd").iterdir())) <= before + 2, "descriptors are given back"
    )


def test_the_control_socket_is_the_owners(up: Served) -> None:
    path = up.client.folders.control_socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    model = up.client.folders.model_socket("chat")
    assert stat.S_IMODE(model.stat().st_mode) & 0o077 == 0


def test_logs_tell_our_lines_and_the_engines_and_follow(up: Served) -> None:
    assert "READY" in up.cli("logs")
    engine = up.cli("logs", "--engine")
    assert "llama_server: model loaded" in engine and '"event"' not in engine
    follow = subprocess.Popen(
        [sys.executable, "-m", "edge", "logs", "-f", "--engine", "--state-dir", str(up.state)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert follow.stdout is not None
        for line in follow.stdout:
            if "listening on" in line:
                break
        up.client.restart()
        seen = next(line for line in follow.stdout if "initializing" in line)
        assert seen
    finally:
        follow.kill()
        follow.wait()
        assert follow.stdout is not None
        follow.stdout.close()


def test_status_watch_goes_on_until_it_is_interrupted(up: Served) -> None:
    watch = subprocess.Popen(
        [sys.executable, "-m", "edge", "status", "--watch", "--json", "--state-dir", str(up.state)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert watch.stdout is not None
        documents = [json.loads(watch.stdout.readline()) for _ in range(2)]
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 130
    finally:
        watch.kill()
        watch.communicate()
    assert [document["status"] for document in documents] == ["ok", "ok"]


def test_fc40_a_crash_is_in_the_history_and_the_stream_says_so(short_dir: Path, chat: str) -> None:
    death = Death("request", ["CUDA error: an illegal memory access was encountered"], None, signal.SIGABRT, 5, 3)
    with served(short_dir, chat) as up:
        change(up.fake, death=death, tokens_s=0.0)  # no rate: nothing else is asked while idle
        up.client.restart()
        up.ready()
        text, cut = "", False
        for _ in range(5):
            if not cut:
                text, cut = stream(up)
        assert cut and "error" in text and "[DONE]" not in text, "no client takes this for the end of the text"
        up.ready()
        crashes = eventually(lambda: start_records.read(up.client.folders.crashes), "the crash is recorded")
        assert {"kind": "gpu_fault", "state": "READY", "rung": 0}.items() <= crashes[-1].items()
        assert "SIGABRT" in crashes[-1]["evidence"]
        assert "chat in READY on rung 0: gpu_fault" in up.cli("status"), "the history can be seen"
        assert up.chat().status_code == 200


def test_the_kill_of_one_model_leaves_an_open_stream_of_another_alone(
    short_dir: Path, chat: str, smollm2: Path
) -> None:
    with served(short_dir, chat, f'id = "other"\nref = "{smollm2}"') as up:
        pid, killed = up.ready()["pid"], up.ready("other")["pid"]
        go_on = short_dir / "go-on"
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
        body["hold_until"] = str(go_on)
        with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=60) as answer:
            parts = answer.iter_text()
            text = next(parts)
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: up.model("other")["pid"] not in (killed, None), "another engine")
            up.ready("other")
            assert "[DONE]" not in text, "the stream is open"
            go_on.touch()
            text += "".join(parts)
        assert (text.count('"delta"'), "[DONE]" in text) == (8, True)
        assert (up.model()["pid"], up.model()["state"]) == (pid, "READY")
        assert up.chat(model="other").status_code == 200


def stream(up: Served) -> tuple[str, bool]:
    """Return the text received, and whether the stream was cut."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stream": True}
    text = ""
    try:
        with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=60) as answer:
            for part in answer.iter_text():
                text += part
    except httpx.RemoteProtocolError:
        return text, True
    return text, False


def test_stop_ends_it_and_gives_everything_back(short_dir: Path, chat: str) -> None:
    with served(short_dir, chat) as up:
        child = up.model()["pid"]
        up.cli("stop")
        assert up.process.wait(60) == 0
        assert not alive(child) and not up.client.folders.control_socket.exists()
        assert "no edgellm is running" in up.cli("status", rc=69)
