"""Collect real documents of a running edgellm and of its commands: the embedded engine on a fake Jetson."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.builder.installing import put
from tests.daemon.served import config_text
from tests.fakes.fake_jetson.tree import FakeBoard
from tests.serving import PATIENCE_S, ROOT, Up, environment, eventually

Documents = dict[str, list[Any]]
# Prints what each command prints, as a JSON string a line.
ALL = """
import contextlib, io, json, sys
from edge.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([*words, "--json"])
    print(json.dumps(out.getvalue()))
"""


def collect(folder: Path, board: FakeBoard, model: Path) -> Documents:
    """Return every kind of document by its name, each from a program that runs."""
    program = [str(ROOT / "tests/fakes/up_on_board.py"), str(board.root), "0.3"]
    bodies = [f'id = "chat"\nref = "{model}"', f'id = "gone"\nref = "{model}"\npreload = false\naliases = ["other"]']
    found: Documents = {}

    def add(name: str, *documents: Any) -> None:
        found.setdefault(name, []).extend(documents)

    state = folder / "s"
    (state / "config").mkdir(parents=True)
    (state / "config" / "edgellm.toml").write_text(config_text(*bodies) + '[telemetry]\njtop = "off"\n')
    put(state / "data" / "engines", "fake-cpu-1")
    with Up(state, "--engine", "embedded", "--set", "n_ctx=512", program=program) as up:
        eventually(up.healthz, "the gateway answers")
        add("/healthz", up.healthz())
        up.wait_for("ok", "degraded")
        for path in ("/livez", "/readyz", "/healthz", "/telemetry"):
            up.chat()
            add(path, httpx.get(f"{up.url}{path}", timeout=PATIENCE_S).json())
        add("/readyz/{id}", httpx.get(f"{up.url}/readyz/chat", timeout=PATIENCE_S).json())
        crash(up)
        for name, document in _answers(up.state, model):
            add(name, document)
    # What the state folder lacks at READY is written before the process ends.
    add("starts.jsonl", *_lines(up.state, "starts.jsonl"))
    add("crashes.jsonl", *_lines(up.state, "crashes.jsonl"))
    add("up", *up.events())
    return found


def crash(up: Up) -> None:
    """End the engine as the kernel would, and wait for the next."""

    def chat() -> dict[str, Any]:
        found: dict[str, Any] = up.status()["models"]["chat"]
        return found

    before = chat()["pid"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: chat()["state"] == "READY" and chat()["pid"] not in (None, before), lambda: up.output)


def commands(model: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a document's name and the command that prints it."""
    for name in ("status", "ps", "top", "timeline", "reload"):
        yield name, (name,)
    yield "chat", ("chat", "Hello", "-m", "chat", "--max-tokens", "4")
    yield "plan", ("plan",)
    yield "plan", ("plan", "--board", "agx-orin-64", "-p", "orin")
    yield "board", ("board",)
    yield "board", ("board", "--board", "orin-nano-8")
    yield "doctor", ("doctor", "--quick")
    yield "model import", ("model", "import", str(model))
    yield "model list", ("model", "list")
    yield "model show", ("model", "show", str(model))
    yield "model check", ("model", "check", str(model))
    yield "engine list", ("engine", "list")
    yield "engine show", ("engine", "show", "fake-cpu-1")
    yield "key add", ("key", "add", "laptop")
    yield "key list", ("key", "list")
    yield "profile list", ("profile", "list")
    yield "profile show", ("profile", "show", "orin")
    yield "config show", ("config", "show")
    yield "config check", ("config", "check")


def _answers(state: Path, model: Path) -> Iterator[tuple[str, Any]]:
    """Yield the documents of all commands, from one process: two dozen interpreters would take ten seconds."""
    rows = list(commands(model))
    done = subprocess.run(
        [sys.executable, "-c", ALL, json.dumps([arguments for _, arguments in rows])],
        env=environment({"EDGELLM_STATE_DIR": str(state)}),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for (name, arguments), printed in zip(rows, done.stdout.splitlines(), strict=True):
        text = json.loads(printed)
        assert text.startswith(("{", "[")), f"{arguments}: {text}{done.stderr}"
        yield name, json.loads(text)


def _lines(state: Path, name: str) -> list[Any]:
    (path,) = state.rglob(name)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
