"""The idle warm-up: its requests and its measurements."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec.structs import replace

from edge.supervisor.policy import ExpectedSpeed, SupervisorOptions
from edge.supervisor.supervisor import SupervisorCallbacks
from tests.supervisor.rig import FAST, Rig, rigged, settings

IDLE = replace(FAST, idle_before_s=0.05, second_look_s=0.1)


def asked(rig: Rig) -> list[str]:
    """Return the purpose of each request after the first."""
    names = []
    for request in rig.requests()[1:]:
        body = request["body"]
        prompt = body.get("prompt")
        if body.get("messages"):
            names.append(f"system: {body['messages'][0]['content']}")
        elif isinstance(prompt, list):
            names.append(f"{len(prompt)} tokens, {body['n_predict']} back")
    return names


async def test_speed_a_batch_all_slots_and_the_system_prompt(short_dir: Path) -> None:
    terms = SupervisorOptions(policy=IDLE, warmup_tokens=(1, 128), system_prompt="You are kind.")
    speeds: list[float] = []
    callbacks = SupervisorCallbacks(on_speed=lambda _, tokens_s: speeds.append(tokens_s))
    chosen = settings(n_ctx=4096, n_parallel=2, n_ubatch=512)
    async with rigged(short_dir, terms=terms, callbacks=callbacks, chosen=chosen, tokens_s=42.0) as rig:
        await rig.until(lambda: speeds)
        assert asked(rig) == [
            "1 tokens, 16 back",
            "system: Hello",
            "128 tokens, 1 back",
            "513 tokens, 1 back",
            "4 tokens, 2 back",
            "4 tokens, 2 back",
            "system: You are kind.",
        ]
        assert speeds == [42.0] and rig.supervisor.status().degraded == ()


async def test_a_request_ends_it_at_once(short_dir: Path) -> None:
    """The engine hangs on the second completion: the idle set's. A client that comes meanwhile does not wait for it."""
    async with rigged(short_dir, terms=SupervisorOptions(policy=IDLE), wedge_after=1) as rig:
        await rig.until(lambda: len(rig.requests()) == 2)
        with rig.supervisor.traffic.request():
            watch = rig.supervisor.watch
            assert watch is not None
            await rig.until(lambda: not watch.warming.busy)
        await asyncio.sleep(0.1)
        assert len(rig.requests()) == 2, "and it does not go on afterwards"


async def test_it_ends_after_its_time(short_dir: Path) -> None:
    terms = SupervisorOptions(policy=replace(IDLE, idle_set_s=0.2))
    async with rigged(short_dir, terms=terms, wedge_after=1) as rig:
        await rig.ready()
        watch = rig.supervisor.watch
        assert watch is not None
        await rig.until(lambda: len(rig.requests()) == 2 and not watch.warming.busy)
        assert watch.warming.idle_done == () and rig.states[-1] == "READY"


async def test_it_does_not_begin_while_somebody_asks(short_dir: Path) -> None:
    async with rigged(short_dir, terms=SupervisorOptions(policy=replace(IDLE, idle_before_s=0.5))) as rig:
        await rig.ready()
        with rig.supervisor.traffic.request():
            await asyncio.sleep(0.8)
        await asyncio.sleep(0.2)
        assert len(rig.requests()) == 1


async def test_a_speed_far_below_the_boards_is_degraded_and_serves(short_dir: Path) -> None:
    terms = SupervisorOptions(policy=IDLE, expected_speed=ExpectedSpeed(100.0, "what the board can do"))
    async with rigged(short_dir, terms=terms, tokens_s=10.0) as rig:
        await rig.until(lambda: rig.supervisor.status().degraded)
        (found,) = rig.supervisor.status().degraded
        assert (found.subject, found.got) == ("speed", "10.0 tokens/s")
        assert rig.supervisor.endpoint() is not None
        assert asked(rig).count("1 tokens, 16 back") == 2, "measured twice before it is said"


async def test_a_strict_model_is_not_refused_for_its_speed(short_dir: Path) -> None:
    terms = SupervisorOptions(policy=IDLE, expected_speed=ExpectedSpeed(100.0, "what the board can do"), strict=True)
    async with rigged(short_dir, terms=terms, tokens_s=10.0) as rig:
        await rig.until(lambda: rig.supervisor.status().degraded)
        assert rig.states[-1] == "READY"


async def test_an_engine_that_dies_of_it_is_restarted(short_dir: Path) -> None:
    death = {"at": "request", "lines": [], "code": None, "signal": 6, "request": 2, "chunk": 0}
    async with rigged(short_dir, terms=SupervisorOptions(policy=IDLE), first_starts=1, first={"death": death}) as rig:
        await rig.until(lambda: rig.supervisor.restarts == 1)
        await rig.ready()
        assert rig.kinds == ["signal_abrt"]
