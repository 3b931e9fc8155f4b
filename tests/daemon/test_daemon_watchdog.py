"""What systemd hears: real datagrams; a sign of life only while every loop turns."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.daemon.watchdog import Watchdog, describe
from edge.linux.sd_notify import Notifier
from edge.supervisor.status import Degraded, Failure, Gate, ModelStatus, State


@pytest.fixture
def systemd(short_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(short_dir / "notify.sock"))
        inbox.setblocking(False)
        yield inbox


@pytest.fixture
def notifier(systemd: socket.socket) -> Iterator[Notifier]:
    one = Notifier(systemd.getsockname(), 0.08)
    yield one
    one.close()


def heard(inbox: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(inbox.recv(4096).decode())
        except BlockingIOError:
            return messages


class Loop:
    def __init__(self) -> None:
        self.iterations = 0
        self.stuck = False

    def ping(self) -> None:
        self.iterations += not self.stuck


def loading(progress: float) -> ModelStatus:
    gates = {"driver": Gate(True), "weights": Gate(), "warm": Gate(blocked_by="weights")}
    return ModelStatus("chat", State.LOADING, gates=gates, progress=progress)


def test_no_sign_of_life_while_one_loop_stands_still(systemd: socket.socket, notifier: Notifier) -> None:
    loops = [Loop(), Loop()]
    watchdog = Watchdog(notifier, list)
    watchdog.watch(loops)
    watchdog.beat()
    watchdog.beat()
    assert heard(systemd) == ["WATCHDOG=1", "WATCHDOG=1"]
    loops[1].stuck = True
    watchdog.beat()  # the ping before was still answered
    watchdog.beat()
    watchdog.beat()
    assert heard(systemd) == ["WATCHDOG=1"]
    assert not watchdog.alive
    loops[1].stuck = False
    watchdog.beat()
    watchdog.beat()
    assert watchdog.alive
    assert heard(systemd) == ["WATCHDOG=1"]


def test_a_load_that_moves_asks_for_more_time_and_one_that_stands_does_not(
    systemd: socket.socket, notifier: Notifier
) -> None:
    status = [loading(0.625)]
    watchdog = Watchdog(notifier, lambda: status)
    assert watchdog.notify()
    assert heard(systemd) == ["STATUS=chat: weights 62 %\nEXTEND_TIMEOUT_USEC=60000000"]
    watchdog.notify()
    assert heard(systemd) == []
    status[0] = loading(0.63)
    watchdog.notify()
    assert heard(systemd) == ["STATUS=chat: weights 63 %\nEXTEND_TIMEOUT_USEC=60000000"]
    status[0] = ModelStatus("chat", State.READY)
    assert not watchdog.notify()
    assert heard(systemd) == ["STATUS=chat: ready"]


def test_a_status_has_no_control_characters() -> None:
    """`systemctl status` sends it to root's terminal as it is."""
    failure = Failure("model_missing", "", "no such file: \x1b]52;c;QUJD\x07\u202e\nREADY=1")
    said = describe([ModelStatus("chat", State.FAILED, failure=failure)])
    assert said == "chat: failed: model_missing; no such file: \\x1b]52;c;QUJD\\x07\\u202e\\nREADY=1"


async def test_it_beats_by_itself_until_cancelled(systemd: socket.socket, notifier: Notifier) -> None:
    watchdog = Watchdog(notifier, list)
    task = asyncio.create_task(watchdog.run())
    seen: list[str] = []
    while seen.count("WATCHDOG=1") < 3:
        await asyncio.sleep(0.01)
        seen += heard(systemd)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_words() -> None:
    failure = Failure("bad_flag", "error: …", "remove it")
    worse = (Degraded("n_ctx", "8192", "4096", "memory"),)
    assert describe([]) == "no model"
    assert describe([ModelStatus("a", State.READY), loading(0.5)]) == "a: ready; chat: weights 50 %"
    assert describe([ModelStatus("a", State.READY, degraded=worse)]) == "a: ready, degraded: n_ctx 4096 instead of 8192"
    assert describe([ModelStatus("a", State.FAILED, failure=failure)]) == "a: failed: bad_flag; remove it"
    assert describe([ModelStatus("a", State.BACKOFF, failure=failure)]) == "a: restarts after bad_flag"
    assert describe([ModelStatus("a", State.STOPPED, failure=failure)]) == "a: stopped: bad_flag"
    assert describe([ModelStatus("a", State.STOPPED)]) == "a: stopped"
    assert describe([ModelStatus("a", State.SLEEPING)]) == "a: sleeping"
