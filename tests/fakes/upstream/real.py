"""The real engine for tests: llama.cpp's server out of the xllamacpp wheel, in a child, on a unix socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

READY_S = 120.0

# Dotted names reach into nested parameters. The death signal ends it with the test run, whatever happens to that.
_CHILD = """
import ctypes, functools, json, signal, sys, threading
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from xllamacpp import CommonParams, Server
params = CommonParams()
for name, value in json.loads(sys.argv[1]).items():
    *path, last = name.split(".")
    setattr(functools.reduce(getattr, path, params), last, value)
server = Server(params)
threading.Event().wait()
"""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(socket_path: Path, target: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    """One request straight to the engine."""
    connection = _UnixConnection(str(socket_path))
    try:
        connection.request(method, target, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextlib.contextmanager
def real_engine(
    model: Path, socket_path: Path, env: Mapping[str, str] | None = None, **params: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Started and healthy; its log is beside its socket. Raises RuntimeError with the log's end when it dies."""
    chosen = {
        "hostnames": [str(socket_path)],
        "model.path": str(model),
        "n_ctx": 4096,
        "n_parallel": 2,
        "warmup": False,
        "fit_params": False,
        "cache_ram_mib": 0,
        "endpoint_slots": True,
        "endpoint_props": True,
        "endpoint_metrics": True,
        "cpuparams.n_threads": 2,
        "cpuparams_batch.n_threads": 2,
        **params,
    }
    log = socket_path.with_suffix(".log")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OMP_WAIT_POLICY": "passive"}
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(chosen)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment | dict(env or {}),
            start_new_session=True,
        )
    try:
        _until_healthy(child, socket_path, log)
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGKILL)
        child.wait()


def _until_healthy(child: subprocess.Popen[bytes], socket_path: Path, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(socket_path, "/health")[0] == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the engine is not up: {log.read_text(errors='replace')[-2000:]}")
