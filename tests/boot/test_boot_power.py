"""Power on, and the endpoint answers; after a kill, a hang, a reboot or a power cut it answers again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.boot.board import UNIT, Board
from tests.boot.conftest import EDGELLM, Product

pytestmark = pytest.mark.full


def test_after_power_on_the_model_answers_and_no_connection_is_refused(new_board: Callable[..., Board]) -> None:
    with new_board() as board:
        board.power_on(wait=False)
        client = board.client()
        _, ended, status = client.chat()
        seen = client.end()
        assert status == 200
        assert seen["refused"] == []
        assert board.started_s < seen["accepted_s"] < ended
        board.wait_booted()
        assert board.run("systemctl", "is-system-running") == "running"
        assert board.show("NRestarts") == "0"
        board.until(lambda: re.fullmatch(r"\S+: ready", board.show("StatusText")), "STATUS= is ready")


def test_killed_hung_and_rebooted_it_answers_again(new_board: Callable[..., Board]) -> None:
    with new_board() as board:
        board.power_on()
        client = board.client()
        assert client.chat()[2] == 200

        killed = board.kill("KILL")
        board.until(lambda: board.main_pid() not in (0, killed), "a new process after kill -9")
        assert board.chat()[0] == 200
        assert board.show("NRestarts") == "1"

        hung = board.kill("STOP")
        board.until(lambda: board.main_pid() not in (0, hung), "a new process after the watchdog")
        assert board.chat()[0] == 200
        assert "Watchdog timeout" in board.journal()
        assert board.show("NRestarts") == "2"

        seen = client.end()
        assert seen["refused"] == []
        broken = [chat for chat in seen["chats"] if chat[2] != 200]
        assert len(broken) <= 2  # requests in flight when a process died

        board.reboot()
        assert board.chat()[0] == 200
        assert board.show("NRestarts") == "0"

        board.cut_power()
        board.power_on()
        assert board.chat()[0] == 200
        boots = board.run("journalctl", "-u", UNIT, "-o", "json", "EDGELLM_EVENT=ready").splitlines()
        assert len({json.loads(line)["_BOOT_ID"] for line in boots}) >= 2


def test_ready_target_is_reached_after_the_model_is_warm(new_board: Callable[..., Board]) -> None:
    with new_board() as board:
        app = "[Unit]\nWants=edgellm-ready.target\nAfter=edgellm-ready.target\n[Service]\nType=oneshot\n"
        app += f"RemainAfterExit=yes\nExecStart={EDGELLM} status\n[Install]\nWantedBy=multi-user.target\n"
        board.disk.write("/etc/systemd/system/app.service", app)
        board.disk.chroot("systemctl", "enable", "app.service")
        board.power_on()
        board.until(lambda: board.show("ActiveState", "app.service") == "active", "app.service runs")
        ready = json.loads(board.run("journalctl", "-u", UNIT, "-o", "json", "EDGELLM_EVENT=ready").splitlines()[-1])
        started_us = int(board.show("ExecMainStartTimestampMonotonic", "app.service"))
        assert int(ready["__MONOTONIC_TIMESTAMP"]) <= started_us
        assert "READY" in board.journal("app.service")


def test_the_group_may_look_and_only_the_owner_may_change(new_board: Callable[..., Board]) -> None:
    with new_board() as board:
        board.disk.chroot("useradd", "-m", "-G", "edgellm", "ann")
        board.disk.chroot("useradd", "-m", "bob")
        board.power_on()
        assert board.chat()[0] == 200
        as_ann, as_bob = (("setpriv", f"--reuid={n}", f"--regid={n}", "--init-groups") for n in ("ann", "bob"))
        assert "READY" in board.run(*as_ann, EDGELLM, "status")
        refused = board.execute(*as_ann, EDGELLM, "restart")
        assert refused.returncode == 69
        assert "sudo" in refused.stderr
        closed = board.execute(*as_bob, EDGELLM, "status")
        assert closed.returncode == 69
        assert "join the group edgellm" in closed.stderr
        for user in (as_ann, as_bob):
            assert board.execute(*user, "touch", "/var/lib/edgellm/planted").returncode != 0
            doctor = board.execute(*user, EDGELLM, "doctor", "--quick", "--json")
            assert json.loads(doctor.stdout)["counts"], doctor.stderr
        refused = board.execute(EDGELLM, "up", "--listen", "127.0.0.1:9000")
        assert refused.returncode == 69  # the service's lock, or its folders: root starts nothing in them
        assert board.main_pid() > 1


def test_a_second_installation_changes_nothing(product: Product, new_board: Callable[..., Board]) -> None:
    assert "+ create /opt" not in product.install_output  # /opt/edgellm was good as it was
    with new_board() as board:
        own = "/etc/systemd/system/edgellm.service.d/override.conf"
        board.disk.write(own, "[Service]\nEnvironment=NOTE=mine\n")
        board.power_on()
        assert board.chat()[0] == 200
        pid = board.main_pid()
        again = board.run(EDGELLM, "service", "install", "--offline", "/opt/offline", "-p", "cpu")
        assert "+ " not in again
        assert board.main_pid() == pid
        compared = board.execute(EDGELLM, "service", "diff")
        assert compared.returncode == 0
        assert f"{own} is the administrator's and stays" in compared.stdout

        board.run(EDGELLM, "service", "uninstall")
        assert board.run("systemctl", "list-unit-files", "edgellm*", "--no-legend", check=False) == ""
        left = board.run("find", "/etc/systemd/system/edgellm.service.d", "/var/lib/edgellm/models", "-type", "f")
        assert own in left
        assert ".gguf" in left
        board.run(EDGELLM, "service", "uninstall", "--purge")
        assert board.execute("ls", "/var/lib/edgellm").returncode != 0
        assert board.execute("id", "edgellm").returncode != 0
