"""What cannot be planned yet is planned again: late disks are waited for, every other fault is told at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from edge.config.values import Config, ModelConfig, StoreConfig
from edge.daemon.late_start import LateStart, may_come
from edge.errors import BadModelError, ConfigError, DoesNotFitError, EdgeError, ModelMissingError
from edge.plan.prepare import Prepared
from edge.supervisor.status import Failure, ModelStatus, State
from edge.supervisor.supervisor import Supervisor

PREPARED = cast(Prepared, object())
FAST = {"look_s": 0.005, "look_later_s": 0.005}


class Script:
    """Plans that fail as told, the last one each time; without one, the plan."""

    def __init__(self, *outcomes: EdgeError | None) -> None:
        self.outcomes = list(outcomes)

    def __call__(self, waited_s: float) -> Prepared:
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is not None:
            raise outcome
        return PREPARED


def late(folder: Path) -> Config:
    path = str(folder / "models/m.gguf")
    return Config(models=(ModelConfig("chat", path, aliases=("c",)),), store=StoreConfig((str(folder / "models"),)))


MISSING = ModelMissingError("no such file: m.gguf", "pull it")


async def test_fc_79_a_late_disk_is_waited_for(tmp_path: Path) -> None:
    late_start = LateStart(late(tmp_path), MISSING)
    assert late_start.patience_s == 30
    stand_in = late_start.placeholders["chat"]
    assert stand_in.aliases == ("c",)
    assert stand_in.status().state is State.STARTING
    waiting = asyncio.create_task(stand_in.ensure_ready())
    told: list[Failure] = []
    assert await late_start.until(Script(MISSING, MISSING, None), told.append, **FAST) is PREPARED
    assert told == []
    assert not waiting.done()
    stand_in.serve(cast(Supervisor, Ready()))
    assert (await waiting).state is State.READY


async def test_fc_79_patience_ends_once_and_the_disk_may_still_come(tmp_path: Path) -> None:
    late_start = LateStart(late(tmp_path), MISSING, patience_s=0.02)
    stand_in = late_start.placeholders["chat"]
    told: list[Failure] = []
    script = Script(MISSING)
    watch = asyncio.create_task(late_start.until(script, told.append, **FAST))
    status = await stand_in.ensure_ready()
    assert status.state is State.FAILED
    assert status.failure is not None
    assert str(tmp_path / "models") in status.failure.hint
    await asyncio.sleep(0.05)
    assert len(told) == 1  # however often it is looked at afterwards
    script.outcomes = [None]
    assert await watch is PREPARED


async def test_the_new_reason_is_told_when_it_changes(tmp_path: Path) -> None:
    late_start = LateStart(Config(models=(ModelConfig("chat", "NAME:Q4_0"),)), MISSING)
    assert late_start.patience_s == 0  # every folder is there: nothing is late
    assert (await late_start.placeholders["chat"].ensure_ready()).state is State.FAILED
    told: list[Failure] = []
    tight = [DoesNotFitError(f"needs {n} GiB", "a smaller one") for n in (9, 8)]
    await late_start.until(Script(MISSING, *tight, None), told.append, **FAST)
    assert [failure.kind for failure in told] == ["does_not_fit"]


@pytest.mark.parametrize(
    ("error", "may"),
    [(ConfigError("x"), False), (MISSING, True), (BadModelError("x"), True), (DoesNotFitError("x"), True)],
)
def test_what_time_can_cure(error: EdgeError, may: bool) -> None:
    assert may_come(error) is may


def test_a_closed_folder_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/m.gguf").write_bytes(b"no GGUF")
    late_start = LateStart(late(tmp_path), BadModelError("m.gguf is no model", "fetch it again"))
    assert late_start.patience_s == 0
    assert late_start.failure.kind == "bad_model"


class Ready:
    """The part of a supervisor that a handle asks here."""

    def status(self) -> ModelStatus:
        return ModelStatus("chat", State.READY)

    async def ensure_ready(self, *, first: bool = False, start: bool = True) -> ModelStatus:
        return ModelStatus("chat", State.READY)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)
