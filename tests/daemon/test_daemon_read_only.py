"""Folders on a file system that is read-only: what needs none serves, what has to write names the folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from edge.cli import _explained
from tests.fakes import llama_switches
from tests.serving import Up, edgellm, environment, eventually

MOUNT = 'for each in $FOLDERS; do mount --bind "$each" "$each" && mount -o remount,ro,bind "$each" || exit 9; done\n'
CLOSED = "read-only file system" if os.geteuid() == 0 else "permission denied"


class ReadOnly:
    """Folders that a command cannot write in: for root by a mount that only the command sees, else by their mode."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755 if os.geteuid() == 0 else 0o555)

    @property
    def program(self) -> Sequence[str]:
        """Arguments of Python that start `edge`."""
        if os.geteuid() != 0:
            return ("-m", "edge")
        inner = ["unshare", "-m", "sh", "-c", MOUNT + 'exec "$@"', "sh", sys.executable, "-m", "edge"]
        return ("-c", f"import os, sys; os.execvp('unshare', {inner} + sys.argv[1:])")

    @property
    def env(self) -> dict[str, str]:
        return {"FOLDERS": " ".join(map(str, self.folders))}


@pytest.fixture
def state(short_dir: Path) -> Iterator[Path]:
    yield short_dir / "state"
    for folder in (short_dir / "state", *(short_dir / "state").glob("*/")):
        folder.chmod(0o755)


def engine(folder: Path) -> Path:
    return llama_switches.write_fake(folder, load_s=0.05)


def run(closed: ReadOnly, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *closed.program, *arguments],
        env=environment(closed.env),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_up_serves_with_everything_read_only_but_its_run_folder(state: Path, short_dir: Path, smollm2: Path) -> None:
    closed = ReadOnly(*(state / name for name in ("data", "cache", "config", "state")))
    program = (*closed.program, "up")
    arguments = ("-p", "cpu", "-m", f"demo={smollm2}", "--engine", str(engine(short_dir / "engine")))
    with Up(state, *arguments, env=closed.env, program=program) as up:
        up.wait_for("ok", "degraded")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        assert edgellm("status", "--json", "--state-dir", str(state)).returncode == 0
    notes = [event["text"] for event in up.events() if event["event"] == "note"]
    assert [text for text in notes if "starts and crashes are not kept" in text], "what is lost is named, once"
    assert "Traceback" not in up.output and up.process.returncode == 0
    assert [list(folder.iterdir()) for folder in closed.folders] == [[]] * 4


def test_a_disk_that_turns_read_only_costs_the_model_that_dies_and_no_other(
    state: Path, short_dir: Path, smollm2: Path
) -> None:
    """errors=remount-ro on a failing SD card: the dead engine's socket cannot be removed, which ended `up`."""
    closed = ReadOnly()
    arguments = ("-p", "cpu", "-m", f"a={smollm2}", "-m", f"b={smollm2}", "--engine", str(engine(short_dir / "engine")))
    with Up(state, *arguments, env=closed.env, program=(*closed.program, "up")) as up:
        up.wait_for("ok", "degraded")
        run_folder = state / "run/main"
        if os.geteuid() == 0:
            enter = ("nsenter", "-t", str(up.process.pid), "-m", "mount")
            subprocess.run([*enter, "--bind", run_folder, run_folder], check=True)
            subprocess.run([*enter, "-o", "remount,ro,bind", run_folder], check=True)
        else:
            run_folder.chmod(0o555)
        status = json.loads(edgellm("status", "--json", "--state-dir", str(state)).stdout)
        os.kill(status["models"]["a"]["pid"], signal.SIGSEGV)
        eventually(lambda: "FAILED" in httpx.get(f"{up.url}/readyz/a").text, lambda: up.output)
        body = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    run_folder.chmod(0o755)
    assert "Traceback" not in up.output and up.process.returncode == 1, "1: a model has failed"


def test_commands_without_a_folder_to_write_in(state: Path, short_dir: Path, smollm2: Path) -> None:
    closed = ReadOnly(state)
    where = ("--state-dir", str(state))
    model = ("-p", "cpu", "-m", f"demo={smollm2}", "--engine", str(engine(short_dir / "engine")))
    for words, code, what in (
        (("up", *model, "--listen", "127.0.0.1:0"), 69, f"cannot use the run folder {state}/run/main: "),
        (("key", "add", "laptop"), 78, f"{state}/config"),
        (("model", "import", str(smollm2)), None, str(state / "data")),
        (("engine", "import", str(engine(short_dir / "other"))), None, str(state / "data")),
    ):
        found, text = run(closed, *words, *where)
        assert found not in (0, 70) and (code is None or found == code), (words, text)
        assert what in text and CLOSED in text.lower(), (words, text)
        assert "Traceback" not in text and "this is a bug" not in text, (words, text)
    for words in (("plan", *model), ("model", "list"), ("engine", "list"), ("config", "show"), ("key", "list")):
        found, text = run(closed, *words, *where)
        assert found == 0, (words, text)
    assert list(state.iterdir()) == []


def test_a_read_only_file_system_is_named_as_such() -> None:
    """`sudo` helps against another owner, not against a mount."""
    _, hint = _explained(OSError(errno.EROFS, "Read-only file system", "/srv/x"))
    assert hint is not None and "read-only" in hint and "sudo" not in hint
