"""Every option of `edgellm service install`, in a running system: what it promises is what the service does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.boot.board import Board
from tests.boot.conftest import EDGELLM, Product

pytestmark = pytest.mark.full

NewBoard = Callable[..., Board]
OFFLINE = ("service", "install", "--offline", "/opt/offline", "-p", "cpu")

# Does what NVIDIA's nvpmodel does with `-m NUMBER`: the mode is kept in a file that outlives a power cut.
NVPMODEL = '#!/bin/sh\n[ "$1" = -m ] && printf "pmode:%04d" "$2" > /var/lib/nvpmodel/status\n'
NVPMODEL_CONF = "< POWER_MODEL ID=0 NAME=MAXN >\n< POWER_MODEL ID=1 NAME=15W >\n"


@pytest.fixture
def bare(product: Product, new_board: NewBoard) -> Board:
    """A system with edgellm in /opt/edgellm that is not installed as a service."""
    return new_board(lowers=product.bare)


def install(board: Board, *options: str) -> str:
    return board.run(EDGELLM, *OFFLINE, *options)


def get(board: Board, url: str) -> str:
    """Ask from inside the system, at any address."""
    code = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=60).status)"
    return board.run("/opt/edgellm/bin/python", "-I", "-c", code)


def test_run_as_serves_as_that_user(bare: Board) -> None:
    """A quoted `User=` was status 217/USER: the service never started with this option."""
    bare.disk.chroot("useradd", "-m", "ann")
    with bare as board:
        board.power_on()
        install(board, "--run-as", "ann")
        assert board.chat()[0] == 200
        assert board.run("ps", "-o", "user=", "-p", str(board.main_pid())) == "ann"
        assert board.run("stat", "-c", "%U %a", "/etc/edgellm/keys.toml") == "ann 600"
        board.run("systemctl", "start", "edgellm-ready.service")
        assert board.execute(EDGELLM, "service", "diff").returncode == 0
        refused = board.execute(EDGELLM, *OFFLINE, "--run-as", "no-such-user")
        assert refused.returncode == 78
        assert "no-such-user" in refused.stderr


def test_listen_moves_the_socket_and_stays_for_the_next_installation(bare: Board) -> None:
    with bare as board:
        board.power_on()
        install(board, "--listen", "127.0.0.1:9001", "--listen", "[::1]:9002")
        assert get(board, "http://127.0.0.1:9001/livez") == "200"
        assert get(board, "http://[::1]:9002/livez") == "200"
        assert ":8080" not in board.run("ss", "-ltn")
        assert "+ " not in install(board)
        assert "address" in board.execute(EDGELLM, *OFFLINE, "--listen", "%H:80").stderr


def test_model_dir_below_a_closed_home_is_served_in_place(bare: Board) -> None:
    model = next((bare.disk.root / "opt/offline/models").glob("*.gguf"))
    home = bare.disk.root / "home/ann"
    (home / "my models").mkdir(parents=True)
    (home / "my models" / model.name).write_bytes(model.read_bytes())
    home.chmod(0o700)
    with bare as board:
        board.power_on()
        options = ("--model-dir", "/home/ann/my models", "-m", f"chat=/home/ann/my models/{model.name}")
        board.run(EDGELLM, "service", "install", "-p", "cpu", *options)
        assert board.chat()[0] == 200
        assert board.run("find", "/var/lib/edgellm/models", "-type", "f", "-name", "*.gguf") == ""
        assert board.run("stat", "-c", "%a", "/home/ann") == "700"


def test_power_mode_is_set_at_boot_by_the_hardened_unit(bare: Board) -> None:
    bare.disk.write("/usr/sbin/nvpmodel", NVPMODEL, 0o755)
    bare.disk.write("/etc/nvpmodel.conf", NVPMODEL_CONF)
    bare.disk.write("/var/lib/nvpmodel/status", "pmode:0001")
    with bare as board:
        board.power_on()
        install(board, "--power-mode", "MAXN")
        assert board.show("Result", "edgellm-power.service") == "success", board.journal("edgellm-power.service")
        assert board.run("cat", "/var/lib/nvpmodel/status") == "pmode:0000"
        board.run("sh", "-c", "printf pmode:0001 > /var/lib/nvpmodel/status")
        board.reboot()
        board.until(lambda: board.show("ActiveState", "edgellm-power.service") == "active", "the power unit has run")
        assert board.run("cat", "/var/lib/nvpmodel/status") == "pmode:0000"


def test_state_dir_takes_over_the_models_of_that_instance(bare: Board) -> None:
    model = next((bare.disk.root / "opt/offline/models").glob("*.gguf"))
    bare.disk.write("/srv/mine/data/models/README", "")
    (bare.disk.root / "srv/mine/data/models" / model.name).write_bytes(model.read_bytes())
    with bare as board:
        board.power_on()
        board.run(EDGELLM, "service", "install", "-p", "cpu", "--state-dir", "/srv/mine")
        assert board.chat()[0] == 200
        assert model.name in board.run("find", "/var/lib/edgellm/models", "-type", "f")


def test_dry_run_changes_nothing(bare: Board) -> None:
    with bare as board:
        board.power_on()
        steps = json.loads(board.run(EDGELLM, *OFFLINE, "--dry-run", "--json"))["steps"]
        assert [step for step in steps if not step["done"]]
        assert board.execute("ls", "/etc/systemd/system/edgellm.service").returncode != 0
        assert not Path(bare.disk.root / "var/lib/edgellm").exists()


def test_a_bundle_installs_without_a_network(bare: Board) -> None:
    """The board has Python and nothing of edgellm; the system has no network but its loopback."""
    script = Path(__file__).resolve().parents[2] / "build/offline-install.sh"
    bare.disk.write("/opt/offline/install.sh", script.read_text(encoding="utf-8"))
    bare.disk.chroot("rm", "-r", "/opt/edgellm")
    with bare as board:
        board.power_on()
        board.run("sh", "/opt/offline/install.sh", "-p", "cpu")
        assert board.chat()[0] == 200
        assert "READY" in board.run("edgellm", "status")  # on root's PATH


def test_reading_ahead_is_installed_where_it_helps_and_runs_before_the_engine(bare: Board) -> None:
    """Two boots: the first remembers its launch, the second reads that launch's files ahead of it."""
    prefetch = "edgellm-prefetch.service"
    choice = {"board": "any", "engine": "any", "mount": "/", "size_class": 0, "offload": "none", "mode": "none"}
    measured = {"schema": 1, "choices": [choice | {"seconds": 1.0, "prefetch": True}]}
    bare.disk.write("/var/lib/edgellm/load_modes.json", json.dumps(measured))
    record = "/var/lib/edgellm/state/main/launch.json"
    with bare as board:
        board.power_on()
        install(board)
        assert board.chat()[0] == 200
        board.until(lambda: board.execute("test", "-s", record).returncode == 0, "the launch is remembered")
        # The measurement above is of no real board, so that the launch itself asks for nothing: let it ask.
        wants = f"import pathlib as p; f = p.Path({record!r}); t = f.read_text(); f.write_text(t.replace("
        wants += "'\"prefetch_least_bytes\":null', '\"prefetch_least_bytes\":0'))"
        board.run("/opt/edgellm/bin/python", "-I", "-c", wants)
        board.reboot()
        assert board.chat()[0] == 200
        assert board.show("Result", prefetch) == "success"
        assert "MiB read ahead" in board.journal(prefetch)
        began = [int(board.show("ExecMainStartTimestampMonotonic", unit)) for unit in (prefetch, "edgellm.service")]
        assert 0 < began[0] < began[1]
        assert board.execute(EDGELLM, "service", "diff").returncode == 0
