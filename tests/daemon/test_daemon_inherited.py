"""Behind an inherited socket the supervisor starts a model whose first spawn failed in the launcher."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from tests.serving import PATIENCE_S, environment, eventually

# systemd's part (LISTEN_PID is ours), and one spawn that fails: the engine is busy being replaced, say.
PROGRAM = """
import os, sys
from edge.daemon import launch
from edge.errors import UnavailableError

def fails(*_):
    raise UnavailableError("text file busy", "try again")

launch.spawn = fails
os.dup2(int(sys.argv.pop(1)), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
sys.exit(launch.up(sys.argv[1:]))
"""


def test_a_first_spawn_that_failed_is_tried_again(tmp_path: Path, smollm2: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = ["-p", "cpu", "-m", f"chat={smollm2}", "--set", "n_ctx=512", "--set", "n_threads=1", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(listener.fileno()), *options, "--state-dir", str(tmp_path)],
            env=environment(),
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
        )
    try:

        def answered() -> bool:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            try:
                return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).status_code == 200
            except httpx.HTTPError:
                return False

        eventually(answered, "the model is started and answers")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
