"""Numbers: from systemd's start to the first connection and the first token, beside a naive unit. Printed, not judged.

What is judged holds on any machine: no connection is refused, and the naive unit, which sleeps, is slower and refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import pytest

from tests.boot.board import Board
from tests.boot.conftest import Product

pytestmark = pytest.mark.full

RUNS, NAIVE_RUNS = 5, 2
LABELS = {
    "listens_s": "edgellm.socket listens",
    "ours_s": "  since units are read",
    "accepted_s": "first connection accepted",
    "token_s": "first token of SmolLM2",
}

# What people write: wait for the network, sleep, start the server. The same engine, the same model, the same context.
NAIVE = """[Unit]
Wants=network-online.target
After=network-online.target
[Service]
ExecStartPre=/bin/sh -c 'sleep 10'
ExecStart=/opt/edgellm/bin/python /opt/naive.py
Restart=always
[Install]
WantedBy=multi-user.target
"""

SERVER = """import glob, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = glob.glob("/var/lib/edgellm/models/*/*.gguf")[0]
params.n_ctx, params.n_parallel, params.warmup = 8192, 1, False
params.hostnames, params.port = ["127.0.0.1"], 8080
server = xllamacpp.Server(params)
while True:
    time.sleep(60)
"""


class Run:
    """One power-on: seconds since systemd began."""

    def __init__(self, board: Board) -> None:
        board.power_on(wait=False)
        client = board.client()
        while (chat := client.chat())[2] != 200:  # the naive server answers 503 while it loads
            pass
        seen = client.end()
        self.listens_s, self.ours_s = _listening(board)
        self.accepted_s = seen["accepted_s"] - board.started_s
        self.token_s = chat[1] - board.started_s
        self.refused = len(seen["refused"])
        self.refused_before = seen["refused_before"]
        self.failed = sum(chat[2] != 200 for chat in seen["chats"])
        board.cut_power()


def _listening(board: Board) -> tuple[float, float]:
    """Since systemd's start, and since it had read its units: before that it starts none. Zeros: not ours."""
    show = ("systemctl", "show", "-p")
    listens_us = board.run(*show, "ActiveEnterTimestampMonotonic", "--value", "edgellm.socket")
    read_us = board.run(*show, "UnitsLoadFinishTimestampMonotonic", "--value")
    if int(listens_us) == 0:
        return 0.0, 0.0
    return int(listens_us) / 1e6 - board.started_s, (int(listens_us) - int(read_us)) / 1e6


@pytest.fixture
def naive_board(product: Product, new_board: Callable[..., Board]) -> Iterator[Board]:
    board = new_board()
    board.disk.chroot("systemctl", "disable", "edgellm.socket", "edgellm.service")
    board.disk.write("/etc/systemd/system/naive.service", NAIVE)
    board.disk.write("/opt/naive.py", SERVER)
    board.disk.chroot("systemctl", "enable", "naive.service")
    yield board


def test_numbers(
    product: Product, new_board: Callable[..., Board], naive_board: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    board = new_board()
    ours = [Run(board) for _ in range(RUNS)]
    naive = [Run(naive_board) for _ in range(NAIVE_RUNS)]
    table = [f"\n{product.suite.name}, systemd {product.suite.systemd}: seconds since systemd's start, median (all)"]
    for name, runs in (("edgellm", ours), ("naive unit", naive)):
        for what, label in LABELS.items():
            values = [getattr(run, what) for run in runs]
            if not any(values):
                continue  # the naive unit has no socket
            digits = 3 if what == "ours_s" else 2
            shown = " ".join(f"{value:.{digits}f}" for value in values)
            table.append(f"  {name:<11} {label:<26} {median(values):6.{digits}f}  ({shown})")
        refused = [run.refused + run.refused_before for run in runs]
        failed = [run.failed for run in runs]
        table.append(f"  {name:<11} connections refused {refused}, chats failed {failed}")
    with capfd.disabled():
        print("\n".join(table))
    assert [run.refused for run in ours] == [0] * RUNS
    assert [run.failed for run in ours] == [0] * RUNS
    assert all(run.refused_before for run in naive)
    assert median(run.token_s for run in ours) < median(run.token_s for run in naive)
