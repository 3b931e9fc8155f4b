"""Clients inside a board's network: tests/boot/prober.py, run with this machine's Python."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PATIENCE_S = 150.0


def _prober(leader: int | None, *arguments: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("prober.py")
    return subprocess.Popen(
        ["nsenter", "-t", str(leader), "-n", sys.executable, "-I", str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def once(leader: int | None, method: str, path: str, body: str | None, timeout: float) -> dict[str, Any]:
    """→ {"status", "body"} or {"error"}."""
    asker = _prober(leader, "once", method, path, str(timeout), *([body] if body is not None else []))
    try:
        out, _ = asker.communicate(timeout=timeout + 30)
    except subprocess.TimeoutExpired:
        asker.kill()
        out, _ = asker.communicate()
    answer: dict[str, Any] = json.loads(out)
    return answer


class Client:
    """Connects and chats without a pause until `end()`, which returns the record."""

    def __init__(self, leader: int | None) -> None:
        self._process = _prober(leader, "watch")
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def _next(self) -> dict[str, Any]:
        line = self._lines.get(timeout=PATIENCE_S)
        assert line is not None, "the client ended"
        return line

    def chat(self) -> list[Any]:
        """Return the first good chat or the next failure: [began, ended, status or error]."""
        chat: list[Any] = self._next()["chat"]
        return chat

    def end(self) -> dict[str, Any]:
        """{"accepted_s", "refused", "refused_before", "chats"}"""
        assert self._process.stdin is not None
        self._process.stdin.close()
        while "chats" not in (line := self._next()):
            pass
        self.close()
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
