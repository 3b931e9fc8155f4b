"""Open requests are blamed for the deaths of an engine: twice there, and a request is refused for a while."""

from __future__ import annotations

import gc
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import aiohttp
import pytest

from edge.plan.plan import Images, Settings
from edge.supervisor import warmup
from edge.supervisor.policy import Policy, SupervisorOptions
from edge.supervisor.status import State
from edge.supervisor.traffic import BLAMED_S, DEATHS_S, REFUSED_S, REMEMBERED, Traffic
from edge.supervisor.warmup_run import EngineClient, Warming
from tests.supervisor.rig import rigged


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def same(text: str | None = "poison") -> str | None:
    return text


def die_with(traffic: Traffic, *texts: str | None) -> None:
    """Let the engine die with requests of these fingerprints open; the proxies see their connections end."""
    contexts = [traffic.request(lambda text=text: text) for text in texts]  # type: ignore[misc]
    for context in contexts:
        context.__enter__()
    traffic.engine_died()
    for context in contexts:
        context.__exit__(None, None, None)


async def test_two_deaths_refuse_and_time_forgives() -> None:
    clock = Clock()
    traffic = Traffic(clock=clock)
    die_with(traffic, "poison", "bystander")
    assert not traffic.kills(same)
    die_with(traffic, "poison", None)
    assert traffic.kills(same)
    assert not traffic.kills(lambda: "bystander") and not traffic.kills(lambda: None)
    clock.now += REFUSED_S
    assert not traffic.kills(same)


async def test_a_death_long_ago_is_not_added_to_todays() -> None:
    """Monitoring sends the same request each minute: it is in flight at every death, and the cause of none."""
    clock = Clock()
    traffic = Traffic(clock=clock)
    for _ in range(3):
        die_with(traffic, "poison")
        clock.now += DEATHS_S
    assert not traffic.kills(same)


async def test_a_request_whose_connection_broke_before_the_exit_was_seen_is_blamed() -> None:
    clock = Clock()
    traffic = Traffic(clock=clock)
    for _ in range(2):
        with pytest.raises(ConnectionError), traffic.request(same):
            raise ConnectionError
        clock.now += BLAMED_S / 2
        traffic.engine_died()
    assert traffic.kills(same)


async def test_a_request_that_was_answered_is_not_blamed() -> None:
    traffic = Traffic()
    for _ in range(2):
        with traffic.request(same):
            pass
        traffic.engine_died()
    assert not traffic.kills(same)


async def test_a_fingerprint_is_computed_only_when_it_is_needed() -> None:
    def never() -> str | None:
        raise AssertionError("computed for a healthy engine")

    traffic = Traffic()
    with traffic.request(never):
        assert not traffic.kills(never)


class Body:
    text = "poison"


async def test_a_request_that_broke_leaves_its_body_behind() -> None:
    """Its fingerprint is kept, not the function: with a large image in it, ten seconds of them filled a board."""
    traffic = Traffic()
    body = Body()
    seen = ref(body)
    with pytest.raises(ConnectionError), traffic.request(partial(getattr, body, "text")):
        raise ConnectionError
    del body
    gc.collect()
    assert seen() is None
    traffic.engine_died()
    assert traffic._deaths.keys() == {"poison"}


async def test_a_warm_up_request_that_ended_long_ago_is_not_blamed() -> None:
    clock = Clock()
    traffic = Traffic(clock=clock)
    for after_s, blamed in ((BLAMED_S, set()), (0.0, {"speed"})):
        traffic.unanswered, traffic.unanswered_s = "speed", clock.now
        clock.now += after_s
        traffic.engine_died()
        assert traffic.fatal_warmups == blamed


async def test_memory_for_fingerprints_is_bounded() -> None:
    traffic = Traffic()
    for number in range(REMEMBERED * 2):
        die_with(traffic, str(number))
    assert len(traffic._deaths) == REMEMBERED


async def test_a_request_that_kills_engines_costs_no_rung_and_is_refused(short_dir: Path) -> None:
    """Its text holds an allocator's message: sixteen such requests moved a model down all rungs to FAILED."""
    async with rigged(short_dir, rungs=3, poison="fatal grammar") as rig:
        await rig.ready()
        for number in (2, 3):
            with pytest.raises((aiohttp.ClientError, OSError)), rig.supervisor.traffic.request(same):
                await rig.complete(grammar="fatal grammar")
            await rig.until(lambda number=number: len(rig.pids) == number)  # type: ignore[misc]
            await rig.ready()
        assert rig.supervisor.traffic.kills(same)
        assert rig.supervisor.machine.rung == 0 and rig.supervisor.status().state is State.READY
        assert set(rig.kinds) == {"signal_segv"}


async def test_the_first_request_of_an_engine_is_blamed_and_what_waits_for_the_next_is_not(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine died before it was READY, so that its death counted for nothing."""
    monkeypatch.setattr("edge.supervisor.watch.HEAD_START_S", 60.0)  # no probe of its own makes it READY before
    async with rigged(short_dir, poison="fatal grammar") as rig:
        await rig.until(lambda: rig.supervisor.machine.alive)
        assert (await rig.supervisor.ensure_ready(first=True)).state is State.WARMING
        with pytest.raises((aiohttp.ClientError, OSError)), rig.supervisor.traffic.request(same):
            await rig.complete(grammar="fatal grammar")
        await rig.until(lambda: len(rig.pids) == 2)
        await rig.ready()
        rig.change(first_starts=9, first={"death": {"at": "line", "lines": [], "code": 1}})
        with rig.supervisor.traffic.request(lambda: "waits"):
            os.kill(rig.pids[-1], signal.SIGKILL)
            await rig.until(lambda: len(rig.pids) >= 5)
            rig.change(first_starts=0)
            await rig.ready()
        assert not rig.supervisor.traffic.kills(lambda: "waits") and not rig.supervisor.traffic.kills(same)
        with pytest.raises((aiohttp.ClientError, OSError)), rig.supervisor.traffic.request(same):
            await rig.complete(grammar="fatal grammar")
        await rig.until(lambda: rig.supervisor.traffic.kills(same))


async def test_an_engine_that_another_process_kills_blames_no_request(short_dir: Path) -> None:
    async with rigged(short_dir) as rig:
        await rig.ready()
        for number in (2, 3, 4):
            with rig.supervisor.traffic.request(same):
                os.kill(rig.pids[-1], signal.SIGKILL)
                await rig.until(lambda number=number: len(rig.pids) == number)  # type: ignore[misc]
            await rig.ready()
        assert rig.kinds == ["killed"] and not rig.supervisor.traffic.kills(same)


async def test_a_warm_up_request_that_killed_the_engine_is_not_sent_again() -> None:
    """An engine that aborts at an image of the warm-up would otherwise die at each start."""
    traffic, sent = Traffic(), []

    class Engine(EngineClient):
        def __init__(self) -> None:
            """Without a connection."""

        async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            sent.append(body)
            if "messages" in body and isinstance(body["messages"][0]["content"], list):
                raise ConnectionResetError
            return 200, {"tokens_predicted": 1, "timings": {}, "usage": {"completion_tokens": 1}}

    images = Images(compute_bytes=1, max_tokens=None, warmup_px=8, like_tokens=1)
    chosen = Settings(4096, 2, 0, "f16", "f16", "on", "mmap", 1, 0, images=images)
    options = SupervisorOptions(policy=Policy(idle_before_s=0.0, idle_set_s=600.0))
    first = Warming(Engine(), chosen, True, options)
    await first.idle(traffic)
    assert first.idle_done[-1] != "all slots" and traffic.unanswered == warmup.AN_IMAGE
    traffic.engine_died()
    before, second = len(sent), Warming(Engine(), chosen, True, options)
    await second.idle(traffic)
    assert second.idle_done[-1] == "all slots" and traffic.fatal_warmups == {warmup.AN_IMAGE}
    assert not any(isinstance(body.get("messages", [{}])[0].get("content"), list) for body in sent[before:])
