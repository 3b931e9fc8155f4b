"""sd_notify, with a real socket at the other end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from edge.linux.sd_notify import MOST_STATUS_CHARACTERS, Notifier


def test_a_path_and_an_abstract_address(short_dir: Path) -> None:
    abstract = f"@edgellm-test-{os.getpid()}"
    for address in (str(short_dir / "notify.sock"), abstract):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
            inbox.bind("\0" + address[1:] if address[0] == "@" else address)
            notifier = Notifier(address)
            notifier.ready("listening")
            notifier.stopping("soon", more_s=1.5)
            assert inbox.recv(4096) == b"READY=1\nSTATUS=listening"
            assert inbox.recv(4096) == b"STOPPING=1\nSTATUS=soon\nEXTEND_TIMEOUT_USEC=1500000"
            notifier.close()


def test_the_variables_are_taken_once() -> None:
    env = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    notifier = Notifier.take(env)
    assert env == {"HOME": "/"}
    assert notifier.watchdog_s == 20.0
    assert not notifier.heard


def test_another_process_is_watched_not_we() -> None:
    assert Notifier.take({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Notifier.take({"WATCHDOG_USEC": "0"}).watchdog_s is None
    for odd in ("soon", "\u00b2", "9" * 5000, "-1"):
        assert Notifier.take({"WATCHDOG_USEC": odd}).watchdog_s is None


def test_nobody_listens_and_nothing_happens(short_dir: Path) -> None:
    for address in (None, "", "vsock:2:1234", str(short_dir / "missing")):
        Notifier(address).ready("x")
    path = str(short_dir / "gone.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(path)
        notifier = Notifier(path)
    notifier.alive()  # the other end is closed
    notifier.close()


def test_a_status_is_one_line_and_bounded(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(short_dir / "n.sock"))
        notifier = Notifier(inbox.getsockname())
        notifier.status("a\nREADY=1 " + "x" * 1000)
        notifier.close()
        said = inbox.recv(4096).decode()
    assert said.startswith("STATUS=a READY=1 x")
    assert len(said) == len("STATUS=") + MOST_STATUS_CHARACTERS


def test_a_name_that_is_no_utf8_is_replaced(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(short_dir / "notify.sock"))
        notifier = Notifier(str(short_dir / "notify.sock"))
        notifier.ready("model \udcff")
        assert inbox.recv(4096) == b"READY=1\nSTATUS=model ?"
        notifier.close()


def test_a_full_queue_costs_no_ready(short_dir: Path) -> None:
    """Without READY=1 systemd ends a service that serves; WATCHDOG=1 is not sent later than it was true."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(short_dir / "n.sock"))
        inbox.setblocking(False)
        notifier = Notifier(inbox.getsockname())
        assert notifier._socket is not None
        with pytest.raises(BlockingIOError):
            while True:
                notifier._socket.send(b"STATUS=of another service", socket.MSG_DONTWAIT)
        notifier.ready("listening")
        notifier.alive()
        with pytest.raises(BlockingIOError):
            while True:
                assert b"READY" not in inbox.recv(4096)
        notifier.status("loading")
        assert inbox.recv(4096) == b"READY=1\nSTATUS=loading"
        notifier.alive()
        assert inbox.recv(4096) == b"WATCHDOG=1"
        notifier.close()
