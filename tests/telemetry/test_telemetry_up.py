"""The real engine on a fake board: what requests see as it heats up, and jtop dying again and again under them."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.fake_jetson.service import JtopService
from tests.fakes.fake_jetson.tree import FakeBoard
from tests.serving import PATIENCE_S, ROOT, Up, alive, edgellm, eventually, stopped

pytestmark = pytest.mark.e2e


@contextmanager
def up_on(board: FakeBoard, state: Path, model: Path, *more: str, dwell_s: float = 0.3) -> Iterator[Up]:
    program = [str(ROOT / "tests/fakes/up_on_board.py"), str(board.root), str(dwell_s), *more]
    options = ["-p", "cpu", "-m", f"chat={model}", "--set", "n_parallel=2", "--set", "n_ctx=8192"]
    with Up(state, *options, program=program) as up:
        up.wait_for("ok", "degraded")
        yield up


def level_of(up: Up) -> str:
    level: str = up.healthz()["telemetry"]["thermal"]
    return level


def heat(board: FakeBoard, up: Up, celsius: float, level: str) -> None:
    board.set_all_temps(celsius)
    eventually(lambda: level_of(up) == level, lambda: f"{level} at {celsius} °C: {up.healthz()}")


def requests_now(up: Up, *places: str) -> int:
    """Return how many requests are in these places: `in_flight`, `queued`, `waiting`."""
    activity = httpx.get(f"{up.url}/telemetry", timeout=10, verify=False).json()["gateway"]
    return sum(model[place] for model in activity.values() for place in places)


def in_flight(up: Up) -> int:
    return requests_now(up, "in_flight")


class Stream(threading.Thread):
    """A long answer, read in a thread of its own."""

    def __init__(self, up: Up) -> None:
        super().__init__(daemon=True)
        self.up, self.text = up, ""
        self.start()
        eventually(lambda: self.text, "the stream has begun")

    def run(self) -> None:
        messages = [{"role": "user", "content": "Count."}]
        body = {"messages": messages, "max_tokens": 200, "stream": True, "ignore_eos": True}
        url = f"{self.up.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                self.text += line + "\n"

    @property
    def ended(self) -> bool:
        return not self.is_alive()

    @property
    def whole(self) -> bool:
        """All of its tokens, and the end that belongs to them."""
        self.join(PATIENCE_S)
        return '"finish_reason":"length"' in self.text and self.text.rstrip().endswith("data: [DONE]")


def test_heating_to_104_and_back_with_act_on_the_real_engine(board: FakeBoard, short_dir: Path, smollm2: Path) -> None:
    """Each level once each way, and requests as promised at each of them. The start's record has its power and heat."""
    board.set_all_temps(50)
    board.set_total_power(20.0)
    with up_on(board, short_dir, smollm2, "--act") as up, ThreadPoolExecutor(8) as pool:
        assert up.chat().status_code == 200

        heat(board, up, 91, "PASSIVE")  # half of two slots
        pid = up.child_pid()
        with stopped(pid):  # none of them is answered before all are there
            several = [pool.submit(up.chat, max_tokens=12) for _ in range(4)]
            eventually(lambda: requests_now(up, "in_flight", "queued", "waiting") == 4, "four requests")
            assert in_flight(up) == 1
        assert [each.result().status_code for each in several] == [200] * 4

        stream = Stream(up)
        os.kill(pid, signal.SIGSTOP)  # it is in the middle of that answer until we say so
        heat(board, up, 97, "HOT")  # what runs goes on, what is new waits
        refused = httpx.post(f"{up.url}/v1/chat/completions", json={}, headers={"Edgellm-Max-Wait": "0.3"}, timeout=30)
        assert (refused.status_code, int(refused.headers["Retry-After"])) == (503, 30)
        patient: Future[httpx.Response] = pool.submit(up.chat)

        heat(board, up, 104, "CRITICAL")  # the engine finishes what it has, and is stopped
        eventually(lambda: up.healthz()["models"]["chat"]["state"] == "DRAINING", lambda: str(up.healthz()))
        assert not stream.ended
        os.kill(pid, signal.SIGCONT)
        assert stream.whole
        eventually(lambda: up.healthz()["models"]["chat"]["state"] == "STOPPED", lambda: str(up.healthz()))
        eventually(lambda: not alive(pid), "the engine's process is gone")
        for probe in ("healthz", "readyz", "readyz/chat"):
            answer = httpx.get(f"{up.url}/{probe}", timeout=10)
            assert (answer.status_code, int(answer.headers["Retry-After"])) == (503, 30), answer.text
        assert up.healthz()["status"] == "starting"
        assert up.healthz()["models"]["chat"]["failure"]["kind"] == "too_hot"
        assert re.search(r"too_hot\n +\| .* 104\.0 °C", edgellm("status", "--state-dir", str(short_dir)).stdout)
        heat(board, up, 97, "HOT")  # and not started again while it is merely hot
        assert up.healthz()["models"]["chat"]["state"] == "STOPPED"
        assert not patient.done()

        heat(board, up, 91, "PASSIVE")
        assert patient.result(PATIENCE_S).status_code == 200
        heat(board, up, 50, "NOMINAL")
        assert up.chat().status_code == 200
        text = httpx.get(f"{up.url}/metrics", timeout=10).text
        document = httpx.get(f"{up.url}/telemetry", timeout=10, verify=False).json()
        said = edgellm("status", "--state-dir", str(short_dir)).stdout
        news = [event["text"] for event in up.events() if event["event"] == "note"]
        levels = [match[1] for text in news if (match := re.match(r"thermal: ([A-Z]+): ", text))]
    assert any(text.startswith("power mode MODE_30W, GPU at most ") for text in news), news
    assert levels == ["PASSIVE", "HOT", "CRITICAL", "HOT", "PASSIVE", "NOMINAL"]
    assert "20.0 W (sum of rails) · 50 °C · thermal NOMINAL" in said
    assert 'edgellm_power_watts{rail="sum of rails"} 20.0' in text
    assert document["energy"]["models"]["chat"]["tokens_per_joule"] > 0
    first = json.loads((short_dir / "state/main/starts.jsonl").read_text().splitlines()[0])
    assert first["samples"]
    assert all(row[1:2] + row[3:] == [pytest.approx(20.0, rel=0.01), 50.0] for row in first["samples"])
    assert 0 < first["samples"][-1][0] <= first["ready_s"] + 0.5


@pytest.mark.full
def test_by_default_heat_never_stops_a_request(board: FakeBoard, short_dir: Path, smollm2: Path) -> None:
    """act = false: observed, reported, fewer at once."""
    with up_on(board, short_dir, smollm2) as up:
        heat(board, up, 104, "CRITICAL")
        assert up.chat(max_tokens=30).status_code == 200
        document = httpx.get(f"{up.url}/telemetry", timeout=10, verify=False).json()
    limit = {"fraction": 0.5, "hold_new": False, "drain": False, "cause": "heat"}
    assert document["governor"]["limit"] == limit
    assert document["energy"]["models"]["chat"]["tokens"] == 30


class Load:
    """Requests without a pause until told to stop; every answer is kept."""

    def __init__(self, up: Up, at_once: int) -> None:
        self.answers: list[int | str] = []
        self._up, self._stop = up, threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(at_once)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(self._up.chat(max_tokens=8).status_code)
            except httpx.HTTPError as error:
                self.answers.append(repr(error))

    def end(self) -> list[int | str]:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return self.answers


def readers(up: Up) -> list[psutil.Process]:
    return [p for p in psutil.Process(up.process.pid).children() if any("jtop_reader" in word for word in p.cmdline())]


def jtop_state(up: Up) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(f"{up.url}/telemetry", timeout=10, verify=False).json()["sources"]["jtop"]
    return state


@pytest.mark.full
def test_killing_freezing_and_restarting_jtop_20_times_under_load(
    board: FakeBoard, service: JtopService, short_dir: Path, smollm2: Path
) -> None:
    """No request is lost, no process leaked. How fast /healthz is meanwhile is `tests/bench/telemetry.py`'s matter."""
    slowest_s, oldest_s = 0.0, 0.0

    def look() -> None:
        nonlocal slowest_s, oldest_s
        answer = httpx.get(f"{up.url}/healthz", timeout=10, verify=False)
        slowest_s = max(slowest_s, answer.elapsed.total_seconds())
        oldest_s = max(oldest_s, answer.json()["telemetry"]["age_s"])

    def looking(true: Callable[[], object]) -> Callable[[], object]:
        return lambda: (look(), true())[1]

    with up_on(board, short_dir, smollm2, dwell_s=1.0) as up:
        eventually(lambda: jtop_state(up)["state"] == "ok", lambda: str(jtop_state(up)))
        files = psutil.Process(up.process.pid).num_fds()
        load = Load(up, 2)
        for number in range(20):
            if number % 3 == 0:
                service.kill()
            elif number % 3 == 1:
                service.freeze()
            else:
                service.stop()
            gone = looking(lambda: jtop_state(up)["state"] == "unavailable")
            eventually(gone, lambda n=number: f"{n}: {jtop_state(up)}")
            service.thaw()
            service.kill()
            service.clean()
            service.start()
            eventually(looking(lambda: jtop_state(up)["state"] == "ok"), lambda n=number: f"{n}: {jtop_state(up)}")
        answers = load.end()
        assert len(readers(up)) == 1
        assert psutil.Process(up.process.pid).num_fds() <= files + 8
        me = psutil.Process(up.process.pid)
        assert all(child.status() != psutil.STATUS_ZOMBIE for child in me.children())
        reader = readers(up)[0]
    assert set(answers) == {200}
    assert len(answers) > 20
    assert not reader.is_running()
    print(f"{len(answers)} requests; slowest /healthz {slowest_s * 1000:.0f} ms, oldest sample {oldest_s:.2f} s")


@pytest.mark.full
def test_max_watts_pauses_requests_of_the_real_engine_and_lets_them_go_on(
    board: FakeBoard, short_dir: Path, smollm2: Path
) -> None:
    """One request draws 24 W, the limit is 18 W and the idle board draws 4 W; `act` is off."""
    ended = threading.Event()

    def plant(up: Up) -> None:
        while not ended.wait(0.1):
            board.set_total_power(4.0 + 20.0 * in_flight(up))

    board.set_all_temps(50)
    board.set_total_power(4.0)
    with up_on(board, short_dir, smollm2, "--watts=18") as up, ThreadPoolExecutor(2) as pool:
        pool.submit(plant, up)
        statuses: list[int] = []

        def paused() -> bool:
            """Ask until a request that may not wait is told of the pause."""
            url, body = f"{up.url}/v1/chat/completions", {"messages": [{"role": "user", "content": "Count."}]}
            answer = httpx.post(url, json={**body, "max_tokens": 24}, headers={"Edgellm-Max-Wait": "0"}, timeout=60)
            statuses.append(answer.status_code)
            return answer.status_code == 503 and answer.json()["error"]["kind"] == "power_limit"

        try:
            eventually(paused, lambda: f"a pause: {statuses}", patience_s=120)
            governor = httpx.get(f"{up.url}/telemetry", timeout=10, verify=False).json()["governor"]
            assert governor["limit"]["hold_new"] and governor["limit"]["cause"] == "power"
            assert "limit 18 W" in governor["because"] and governor["warning"] is None
            assert up.chat().status_code == 200, "it waits for the end of the pause"
            assert 200 in statuses and up.healthz()["models"]["chat"]["state"] == "READY"
        finally:
            ended.set()
