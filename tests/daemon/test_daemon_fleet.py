"""The end of several models in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.daemon.fleet import Fleet
from edge.daemon.kept_by_model import SpeedBaseline
from edge.paths import folders
from edge.supervisor.memory_wait import MemoryHolder
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.status import State
from edge.supervisor.supervisor import Supervisor
from edge.telemetry.sample import GpuProcess, GpuState, Sample
from tests.supervisor.rig import PATTERNS, model_plan

PATIENCE_S = 20


class Broken(Supervisor):
    async def run(self) -> None:
        raise RuntimeError("a bug")


async def test_an_owner_that_breaks_is_told_and_holds_nobody_up(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its machine never reaches STOPPED any more, so waiting for that would not end."""
    places = folders({}, short_dir)
    fleet = Fleet(places, lambda *_: None, SpeedBaseline(places))
    broken = Broken(model_plan(("x",), 1, None, 0), short_dir / "m.sock", PATTERNS)
    broken.machine = replace(broken.machine, state=State.READY, alive=True)
    fleet.handles["chat"] = ModelHandle("chat", supervisor=broken)
    fleet.run(broken)
    await asyncio.wait_for(fleet.broke.wait(), PATIENCE_S)
    assert "a bug" in capsys.readouterr().err
    await asyncio.wait_for(fleet.stop(now=True), PATIENCE_S)
    await asyncio.wait_for(fleet.close(), PATIENCE_S)


def test_the_supervisors_see_load_and_processes_of_the_latest_sample(short_dir: Path) -> None:
    places = folders({}, short_dir)
    latest: list[Sample | None] = [None]
    fleet = Fleet(places, lambda *_: None, SpeedBaseline(places), lambda: latest[0])
    assert fleet._gpu_load() is None and fleet._gpu_holders() == []
    latest[0] = Sample(1.0, "nvml")
    assert fleet._gpu_load() is None and fleet._gpu_holders() == []
    busy = (GpuState("GPU0", load_ratio=0.2), GpuState("GPU1", load_ratio=0.9), GpuState("GPU2"))
    rows = (GpuProcess(7, "python", 3 << 30), GpuProcess(8, "Xorg"))
    latest[0] = Sample(2.0, "nvml", gpus=busy, gpu_processes=rows)
    assert fleet._gpu_load() == 0.9
    assert fleet._gpu_holders() == [MemoryHolder(7, "python", 3 << 30), MemoryHolder(8, "Xorg", 0)]
