"""Surroundings of boards in the field: no HOME, an unknown locale, a drop-in that hides the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.boot.board import PATIENCE_S, UNIT, Board
from tests.boot.conftest import EDGELLM
from tests.boot.journal import entries

pytestmark = pytest.mark.full

NewBoard = Callable[..., Board]
OWN = f"/etc/systemd/system/{UNIT}.d/override.conf"
LOCALE = (
    "[Service]\nUnsetEnvironment=HOME USER LOGNAME SHELL\nEnvironment=LANG=xx_YY.UTF-8 LC_ALL=xx_YY.UTF-8 LANGUAGE=xx\n"
)


def test_without_a_home_and_with_an_unknown_locale(new_board: NewBoard) -> None:
    with new_board() as board:
        board.disk.write(OWN, LOCALE)
        board.power_on()
        assert board.chat()[0] == 200
        environment = board.run("cat", f"/proc/{board.main_pid()}/environ").split("\0")
        assert "LANG=xx_YY.UTF-8" in environment
        assert not [each for each in environment if each.startswith("HOME=")]
        assert entries(board, "-p", "warning", "SYSLOG_IDENTIFIER=edgellm") == []
        assert board.show("NRestarts") == "0"
        assert "READY" in board.run("env", "-u", "HOME", "LC_ALL=xx_YY.UTF-8", EDGELLM, "status")


def test_fc_76_a_drop_in_that_hides_the_gpu_is_named_at_start(new_board: NewBoard, tmp_path: Path) -> None:
    """The board is a Jetson by its device tree; the profile may fall back to the CPU, so only a warning shows it."""
    tmp_path.chmod(0o755)
    (tmp_path / "model").write_text("NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0")
    (tmp_path / "compatible").write_text("nvidia,p3768-0000+p3767-0000\0nvidia,p3767-0000\0nvidia,tegra234\0")
    with new_board(f"--bind-ro={tmp_path}:/sys/firmware/devicetree/base") as board:
        # A container shows the uptime of its host, and only soon after boot does a start wait for the GPU.
        board.disk.write("/etc/uptime", "20.00 20.00\n")
        board.disk.write(OWN, "[Service]\nPrivateDevices=yes\nBindReadOnlyPaths=/etc/uptime:/proc/uptime\n")
        text = 'schema = 1\nprofile = "orin"\n[set]\nfallback = "cpu"\n'
        board.disk.write("/etc/edgellm/edgellm.toml", text)
        board.power_on()
        assert board.chat(2 * PATIENCE_S)[0] == 200  # it waits a minute for the GPU, then it loads the model
        said = f"{OWN}: PrivateDevices=yes hides the GPU's device nodes"
        warned = [each["MESSAGE"] for each in entries(board, "-p", "warning", "SYSLOG_IDENTIFIER=edgellm")]
        assert said in warned
        assert any("waits up to" in each and said in each for each in warned)
        status = board.run(EDGELLM, "status")
        assert f"warning: {said}" in status
        assert "degraded: device" in status
        assert board.show("NRestarts") == "0"
