"""Saved prompts of a supervised real engine: saved while idle, and no file that it cannot read ends a start."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from edge.engine.embedded_engine import find_embedded
from edge.models.open import ModelFile
from edge.models.store import Store
from edge.plan.argv import render
from edge.plan.plan import EngineOptions, Ladder, ModelPlan, SavedPrompts
from edge.supervisor import prompt_cache
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.prompt_cache import saved_prompts
from edge.supervisor.prompt_files import PromptFiles, file_key
from edge.supervisor.status import State
from edge.supervisor.traffic import Traffic
from edge.supervisor.warmup_run import Warming
from tests.supervisor.rig import ENV, FAST, Rig, launch_plan, rigged, settings
from tests.supervisor.test_supervisor_prompt_files import slot_file

LONG = list(range(100, 800))
SOON = SupervisorOptions(policy=replace(FAST, idle_before_s=0.0, idle_set_s=0.0, save_prompts_idle_s=0.2))


@pytest.fixture
def file(smollm2: Path) -> ModelFile:
    return Store(smollm2.parent).resolve(str(smollm2))


def model(file: ModelFile, folder: Path) -> ModelPlan:
    engine = find_embedded(sys.executable)
    assert engine is not None
    chosen = settings(n_ctx=2048, load_mode="none")
    options = EngineOptions(params={"slot_save_path": f"{folder}/"})
    argv = render(chosen, engine, file, "chat", options).args
    saved = SavedPrompts(str(folder), "a key", 1 << 30)
    plan = replace(launch_plan(("x",), 0, chosen), argv=argv, env={**ENV, "HOME": "/nonexistent"}, saved_prompts=saved)
    return ModelPlan("chat", (), file, Ladder((plan,), 0))


def slots(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.slot"))


async def ask(rig: Rig) -> int:
    """Return how many tokens of the long prompt were not computed."""
    import json

    status, body = await rig.complete(prompt=LONG, cache_prompt=True)
    assert status == 200, body
    answer: dict[str, Any] = json.loads(body)
    return int(answer["timings"]["cache_n"])


async def test_a_prompt_is_saved_while_idle_once_and_survives_a_kill(short_dir: Path, file: ModelFile) -> None:
    folder = short_dir / "prompts"
    async with rigged(short_dir, model=model(file, folder), terms=SOON) as rig:
        await rig.ready()
        assert await ask(rig) == 0
        await rig.until(lambda: slots(folder))
        (first,) = slots(folder)
        written = first.stat().st_mtime_ns
        watch = rig.supervisor.watch
        assert watch is not None
        watch.child._process.kill()
        await rig.until(lambda: rig.states.count("READY") == 2)
        assert await ask(rig) > 600
        assert slots(folder)[0].stat().st_mtime_ns >= written


async def test_a_prompt_between_ready_and_the_idle_warm_up_is_saved(
    short_dir: Path, file: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle warm-up ends when the prompt was answered: then the slots are looked at for the first time."""
    folder, answered = short_dir / "prompts", asyncio.Event()

    async def idle(_: Warming, __: Traffic) -> None:
        await answered.wait()

    monkeypatch.setattr(Warming, "idle", idle)
    async with rigged(short_dir, model=model(file, folder), terms=SOON) as rig:
        await rig.ready()
        assert await ask(rig) == 0
        answered.set()
        await rig.until(lambda: slots(folder))


@pytest.mark.parametrize("key", ["a key", "another key"])
async def test_a_file_that_the_engine_refuses_is_removed(short_dir: Path, file: ModelFile, key: str) -> None:
    """Its hash is right, so that only the engine can find out. One of another key stays: it is of another model."""
    folder = short_dir / "prompts"
    files = PromptFiles(folder, 1 << 30)
    name = files.begin_write(file_key(key), 100)
    assert name is not None
    (folder / name).write_bytes(slot_file(*LONG))
    kept = files.keep(name)
    assert kept is not None
    async with rigged(short_dir, model=model(file, folder), terms=SOON) as rig:
        assert await rig.settle(State.READY, State.FAILED) is State.READY
        assert kept.exists() is (key != "a key")
        assert rig.supervisor.restarts == 0
        assert await ask(rig) == 0


async def test_prompts_are_saved_before_the_engine_sleeps(short_dir: Path, file: ModelFile) -> None:
    folder = short_dir / "prompts"
    terms = replace(SOON, policy=replace(SOON.policy, save_prompts_idle_s=600.0))
    async with rigged(short_dir, model=model(file, folder), terms=terms) as rig:
        await rig.ready()
        await ask(rig)
        assert slots(folder) == []
        rig.supervisor.sleep()
        assert await rig.settle(State.SLEEPING) is State.SLEEPING
        assert len(slots(folder)) == 1


@pytest.mark.parametrize("asked", [True, False])
async def test_a_stop_in_the_middle_of_a_restore_keeps_the_file(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """An engine that ends by itself while it reads may have died of the file: then it keeps the name for that."""
    monkeypatch.setattr(prompt_cache, "RESTORE_S", 0.0)
    files = PromptFiles(short_dir / "prompts", 1 << 30)
    name = files.begin_write(file_key("a key"), 100)
    assert name is not None
    (files.folder / name).write_bytes(slot_file(*LONG))
    kept = files.keep(name)
    assert kept is not None
    reads = asyncio.Event()

    async def post(*_: Any) -> None:
        reads.set()
        await asyncio.Event().wait()

    plan = replace(launch_plan(("x",), 0, settings()), saved_prompts=SavedPrompts(str(files.folder), "a key", 1 << 30))
    cache = saved_prompts(Mock(post=post), plan, SOON, Mock(moved_s=0.0))
    cache.look()
    await cache.restore()
    await asyncio.wait_for(reads.wait(), 30)
    cache.close(asked=asked)
    assert kept.exists() is asked
    assert kept.with_suffix(".reading").exists() is not asked
