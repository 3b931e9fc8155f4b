"""edgellm-rpc.service in a real systemd: one board only lends its memory, another one serves a model with it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from edge.paths import Folders
from tests.boot.board import Board
from tests.boot.conftest import EDGELLM, Product

pytestmark = pytest.mark.full

NewBoard = Callable[..., Board]
UNIT = "edgellm-rpc.service"
LENDER, FIRST, PORT = "10.213.7.2", "10.213.7.1", 50052
INSTALL = ("service", "install", "-p", "cpu", "--state-dir", "/srv/mine")
LENDS = (*INSTALL, "--rpc-only", "--rpc-interface", "eth1", "--rpc-listen")
# The model's context does not fit into the memory of the first board (tests/e2e/test_rpc.py has the same figures).
CONFIG = f"""
schema = 1
[memory]
limit = "300MiB"
[restart]
device_attempts = 1
wedge_s = 5
backoff_s = [0, 0.5]
[set]
n_ctx = 8192
n_ctx_min = 512
kv_type_min = "f16"
cache_ram = 0
flash_attention = "on"
[[device]]
rpc = "{LENDER}:{PORT}"
interface = "eth1"
memory = "1GiB"
absent = "wait"
"""


@pytest.fixture
def boards(product: Product, new_board: NewBoard, built_rpc: Folders) -> tuple[Board, Board]:
    """Two systems that are off, each with the engine of `edgellm build --rpc`, neither with edgellm as a service."""
    pair = new_board(lowers=product.bare), new_board(lowers=product.bare)
    for board in pair:
        shutil.copytree(built_rpc.engines, board.disk.root / "srv/mine/data/engines")
    pair[1].disk.write("/srv/mine/config/edgellm.toml", CONFIG)
    return pair


def link(lender: Board, first: Board) -> None:
    """Join the boards by a veth pair. The former one went with the network of a board that lost its power."""
    first.execute("ip", "link", "del", "eth1")
    ends = ["netns", str(lender.leader), "type", "veth", "peer", "name", "eth1", "netns", str(first.leader)]
    subprocess.run(["ip", "link", "add", "eth1", *ends], check=True)
    for board, address in ((lender, LENDER), (first, FIRST)):
        board.run("ip", "addr", "add", f"{address}/24", "dev", "eth1")
        board.run("ip", "link", "set", "eth1", "up")


def lends(board: Board) -> bool:
    return board.show("ActiveState", UNIT) == "active"


def serves_on_both(board: Board) -> bool:
    done = board.execute(EDGELLM, "status", "--json")
    if done.returncode:
        return False
    (model,) = json.loads(done.stdout)["models"].values()
    devices: dict[str, Any] = model["gates"].get("weights", {}).get("devices", {})
    return model["state"] == "READY" and not model["degraded"] and devices.get("RPC0", {}).get("ready", False)


def test_a_board_that_only_lends_serves_another_one_and_does_so_again_after_a_power_cut(
    boards: tuple[Board, Board],
) -> None:
    lender, first = boards
    with lender, first:
        lender.power_on()
        first.power_on()
        link(lender, first)
        lender.run(EDGELLM, *LENDS, f"{LENDER}:{PORT}")
        assert lends(lender), lender.journal(UNIT)
        pid = lender.main_pid(UNIT)
        assert lender.run("ps", "-o", "user=", "-p", str(pid)) == "edgellm"
        assert lender.execute("systemctl", "cat", "edgellm.service").returncode != 0, "it serves no model"

        # A public address is refused by the installer and by the command of the unit; what runs is left alone.
        for address in (f"203.0.113.9:{PORT}", f"0.0.0.0:{PORT}"):
            refused = lender.execute(EDGELLM, *LENDS, address)
            assert refused.returncode == 78 and "RPC" in refused.stderr, refused.stderr
            assert lender.execute(EDGELLM, "rpc", "serve", "--listen", address).returncode == 78
        assert lender.main_pid(UNIT) == pid

        first.run(EDGELLM, *INSTALL, "-m", f"chat={_model(first)}")
        first.until(lambda: serves_on_both(first), "the model is READY with layers on both boards")
        assert first.chat()[0] == 200
        assert "an engine is connected" in lender.journal(UNIT)

        lender.cut_power()
        lender.power_on()
        lender.until(lambda: int(lender.show("NRestarts", UNIT)) > 0, "its interface is late, and is waited for")
        link(lender, first)
        lender.until(lambda: lends(lender), "it lends again")
        first.until(lambda: first.chat()[0] == 200 and serves_on_both(first), "the model serves on both boards again")

        # A board that serves may lend as well, until an installation takes it back.
        first.run(EDGELLM, *INSTALL, "--rpc-listen", "127.0.0.1:50053")
        assert lends(first), first.journal(UNIT)
        assert "127.0.0.1:50053" in first.run("ss", "-ltn")
        first.run(EDGELLM, *INSTALL, "--rpc-listen", "")
        assert first.execute("systemctl", "cat", UNIT).returncode != 0


def _model(board: Board) -> str:
    found = next((board.disk.root / "opt/offline/models").glob("*.gguf"))
    return f"/opt/offline/models/{found.name}"
