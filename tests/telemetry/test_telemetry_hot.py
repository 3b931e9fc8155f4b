"""While the board is at CRITICAL no engine starts, for any cause; when it is cool, all do."""

from pathlib import Path

import pytest

from tests.daemon.served import Served, served
from tests.fakes.fake_jetson.tree import FakeBoard
from tests.serving import ROOT, eventually

pytestmark = pytest.mark.e2e


def stopped(up: Served, *names: str) -> bool:
    models = up.status()["models"]
    return all(
        models.get(name, {}).get("state") == "STOPPED" and models[name]["failure"]["kind"] == "too_hot"
        for name in names
    )


def test_restarted_reloaded_and_added_while_it_is_too_hot(board: FakeBoard, short_dir: Path, smollm2: Path) -> None:
    chat, other = f'id = "chat"\nref = "{smollm2}"', f'id = "other"\nref = "{smollm2}"'
    board.set_all_temps(50)
    program = [str(ROOT / "tests/fakes/up_on_board.py"), str(board.root), "0.3", "--act"]
    with served(short_dir, chat, program=program) as up:
        board.set_all_temps(104)
        eventually(lambda: stopped(up, "chat"), lambda: str(up.status()))
        spawned = up.model()["restarts"]

        up.cli("restart")
        eventually(lambda: up.model()["restarts"] > spawned and stopped(up, "chat"), lambda: str(up.status()))
        up.configure(f"{chat}\nset = {{ n_ctx = 2048 }}", other)
        assert up.reload()["models"] == {"chat": "after", "other": "added"}
        eventually(lambda: stopped(up, "chat", "other"), lambda: str(up.status()))
        up.configure(f"{chat}\nset = {{ n_ctx = 2048 }}")
        assert up.reload()["models"] == {"chat": "kept", "other": "removed"}
        assert up.healthz()["status"] == "starting"
        assert up.model()["pid"] is None

        board.set_all_temps(50)
        up.ready()
        assert list(up.status()["models"]) == ["chat"]
        assert up.chat().status_code == 200
        argv = Path(f"/proc/{up.model()['pid']}/cmdline").read_text().split("\0")
        assert argv[argv.index("--ctx-size") + 1] == "2048"
