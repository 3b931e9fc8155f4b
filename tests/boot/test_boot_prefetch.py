"""Numbers: the first token of a large model after a power-on, with its file read ahead early in boot and without.

    python -m tests.bench.random_model /tmp/large.gguf --gb 4.6
    BOOT_MODEL=/tmp/large.gguf python -m pytest -m full -s tests/boot/test_boot_prefetch.py

Printed, not judged: whether reading ahead helps depends on the disk and the load mode, which `bench load` measures. The
file's pages are dropped before each power-on, and both ways take turns.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from edge.linux.procfs import drop_pages
from tests.boot.board import Board
from tests.boot.conftest import EDGELLM, Product

MODEL = os.environ.get("BOOT_MODEL")

pytestmark = [pytest.mark.full, pytest.mark.skipif(MODEL is None, reason="BOOT_MODEL names no large model")]

PAIRS = int(os.environ.get("BOOT_PAIRS", "4"))
PREFETCH = "edgellm-prefetch.service"
RECORD = "var/lib/edgellm/state/main/launch.json"


def power_on(board: Board, *, ahead: bool) -> float:
    """Return the seconds from systemd's start to the first token."""
    record = board.disk.root / RECORD
    document = json.loads(record.read_text())
    for command in document["models"].values():
        command["prefetch_least_bytes"] = 0 if ahead else None
    record.write_text(json.dumps(document))
    board.disk.chroot("systemctl", "enable" if ahead else "disable", "-q", PREFETCH)
    for file in (board.disk.upper / "var/lib/edgellm/models").rglob("*.gguf"):
        drop_pages(file)
    board.power_on(wait=False)
    client = board.client()
    while (chat := client.chat())[2] != 200:
        pass
    client.end()
    if ahead:
        board.until(lambda: "MiB read ahead" in board.journal(PREFETCH), "the file was read ahead")
    board.cut_power()
    return float(chat[1]) - board.started_s


def test_reading_ahead_at_boot(
    product: Product, new_board: Callable[..., Board], capfd: pytest.CaptureFixture[str]
) -> None:
    assert MODEL is not None
    board = new_board(lowers=product.bare)
    offline = board.disk.root / "opt/offline/models"
    shutil.rmtree(offline)
    offline.mkdir()
    shutil.copy(MODEL, offline / "Large-Q8_0.gguf")
    # Of no board in particular: with it the installer adds the unit.
    choice = {"board": "any", "engine": "any", "mount": "/", "size_class": 0, "offload": "none", "mode": "mmap"}
    measured = {"schema": 1, "choices": [choice | {"seconds": 1.0, "prefetch": True}]}
    board.disk.write("/var/lib/edgellm/load_modes.json", json.dumps(measured))
    with board:
        board.power_on()
        board.run(EDGELLM, "service", "install", "--offline", "/opt/offline", "-p", "cpu")
        assert board.chat()[0] == 200
        board.until(lambda: Path(board.disk.root / RECORD).is_file(), "the launch is remembered")
        board.power_off()
        pairs = [(power_on(board, ahead=False), power_on(board, ahead=True)) for _ in range(PAIRS)]
    with capfd.disabled():
        size = f"{Path(MODEL).stat().st_size / 1e9:.2f} GB"
        print(f"\n{size}, seconds from systemd's start to the first token, {PAIRS} pairs")
        for label, values in zip(("as it is", "read ahead"), zip(*pairs, strict=True), strict=True):
            print(f"  {label:<11} {median(values):6.2f}  ({' '.join(f'{value:.2f}' for value in values)})")
        print(f"  with over without, median of the pairs: {median(ahead / plain for plain, ahead in pairs):.2f}")
