"""The sampler: one task, sources that hang or raise, and the start trace."""

import asyncio
import logging
import threading
from collections.abc import Callable

import psutil
import pytest

from edge.board.probe import probe
from edge.telemetry.host import HostSource
from edge.telemetry.sample import PowerState, Sample, Zone
from edge.telemetry.sampler import Sampler
from edge.telemetry.source import SensorSource
from edge.telemetry.sysfs import SysfsSource
from tests.fakes.fake_jetson.tree import FakeBoard
from tests.fakes.waiting import running, until


class Scripted:
    """A source that does what `script` says on each read."""

    def __init__(self, script: Callable[[int], Sample], name: str = "scripted") -> None:
        self.name, self.script, self.reads = name, script, 0

    def read(self, now: float, *, quick: bool = False) -> Sample:
        self.reads += 1
        sample = self.script(self.reads)
        return Sample(now, self.name, sample.power, zones=sample.zones)


def watts(power: float) -> Sample:
    return Sample(0.0, "", PowerState(power, "VDD_IN"))


def sampler_of(*sources: SensorSource) -> Sampler:
    return Sampler(sources, interval_s=0.02)


async def test_sources_are_merged_and_each_keeps_its_time(board: FakeBoard) -> None:
    board.set_total_power(21.0)
    sampler = sampler_of(SysfsSource(board.root, probe(board.root)), HostSource())
    async with running(sampler.run()):
        await until(lambda: sampler.latest and sampler.latest.cpu_load_ratio is not None)
    sample = sampler.latest
    assert sample.source == "sysfs"
    assert {part.name for part in sampler.parts if part.latest} == {"sysfs", "host"}
    assert sample.power_w == pytest.approx(21.0, rel=0.01)
    assert sample.memory.total_bytes == board.spec["mem_kb"] * 1024
    assert sample.disk_free_bytes > 0


async def test_a_source_that_hangs_costs_only_itself() -> None:
    """The other source goes on and the event loop turns."""
    release = threading.Event()
    hung = Scripted(lambda n: (release.wait(30), watts(1.0))[1], "hung")
    live = Scripted(lambda n: watts(float(n)), "live")
    sampler = sampler_of(hung, live)
    async with running(sampler.run()):
        await until(lambda: live.reads >= 5)
        assert hung.reads == 1
        assert {part.name for part in sampler.parts if part.latest} == {"live"}
    release.set()


async def test_fc67_a_source_that_fails_is_said_once_and_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FC-67: five good reads, then exceptions, then good again: two lines, not one a sample."""

    def script(number: int) -> Sample:
        if 5 < number <= 15:
            raise RuntimeError("reader thread died")
        return watts(float(number))

    caplog.set_level(logging.INFO, "edge.telemetry")
    source = Scripted(script)
    sampler = sampler_of(source)
    async with running(sampler.run()):
        await until(lambda: source.reads > 20)
        await until(lambda: sampler.latest.power_w > 20)
    assert [record.message for record in caplog.records] == [
        "telemetry: scripted failed: RuntimeError: reader thread died",
        "telemetry: scripted answers again",
    ]


async def test_a_trace_has_ten_points_a_second_with_real_instants() -> None:
    source = Scripted(lambda n: Sample(0.0, "", PowerState(float(n), "VDD_IN"), zones=(Zone("tj", 40.0 + n),)))
    sampler = Sampler([source], interval_s=1.0)
    async with running(sampler.run()):
        with sampler.trace() as points:
            await until(lambda: len(points) >= 12)
        count = len(points)
        reads = source.reads
        await until(lambda: source.reads > reads)
    assert len(points) == count
    instants = [point[0] for point in points]
    assert instants == sorted(instants)
    assert instants[-1] - instants[0] >= 0.1 * 8  # a busy machine may be slower, never faster
    assert points[-1][1] is not None
    assert points[-1][3] > 40.0


async def test_energy_history_and_listeners_follow_the_samples() -> None:
    seen: list[Sample] = []
    sampler = sampler_of(Scripted(lambda n: watts(10.0)))
    sampler.on_sample(seen.append)
    async with running(sampler.run()):
        await until(lambda: len(seen) >= 5)
    assert len(sampler.history.seconds) == len(seen)
    span = seen[-1].at_s - seen[0].at_s
    assert sampler.energy.total_joules == pytest.approx(10.0 * span)


async def test_no_source_at_all_is_no_sample_and_no_error() -> None:
    sampler = sampler_of()
    async with running(sampler.run()):
        await asyncio.sleep(0.05)
    assert sampler.latest is None


async def test_threads_end_with_the_task(board: FakeBoard) -> None:
    before = set(threading.enumerate())
    sampler = sampler_of(SysfsSource(board.root))
    async with running(sampler.run()):
        await until(lambda: sampler.latest)
    await until(lambda: set(threading.enumerate()) <= before)


async def test_an_answer_in_progress_is_not_0_tokens_per_second() -> None:
    sampler = sampler_of(Scripted(lambda number: watts(float(number))))
    async with running(sampler.run()):
        await until(lambda: len(sampler.history.seconds) > 2)
        assert sampler.tokens_per_s() == 0.0
        work = sampler.energy.begin(sampler.clock(), "chat")
        assert sampler.tokens_per_s() is None
        sampler.energy.request(work.start_s, sampler.clock(), 50, work)
        await until(lambda: sampler.tokens_per_s())


async def test_power_is_read_faster_while_a_request_is_open() -> None:
    """At one sample a second a request of half a second would have none."""
    source = Scripted(lambda number: watts(float(number)))
    sampler = Sampler([source], interval_s=30.0)
    async with running(sampler.run()):
        await until(lambda: source.reads == 1)
        work = sampler.energy.begin(sampler.clock(), "chat")
        await until(lambda: work.samples >= 3)
        assert sampler.energy.request(work.start_s, sampler.clock(), 5, work) is not None


@pytest.mark.parametrize(
    "broken", ["virtual_memory", "swap_memory", "cpu_percent", "disk_usage", "sensors_temperatures"]
)
def test_one_value_that_psutil_cannot_read_costs_one_value(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers hide single files of /proc; psutil raises whatever it met."""

    def fails(*_: object) -> None:
        raise KeyError("MemTotal")

    source = HostSource()
    source.read(0.0)
    monkeypatch.setattr(psutil, broken, fails)
    sample = source.read(20.0)
    lost = {"memory": sample.memory, "disk": sample.disk_free_bytes, "load": sample.cpu_load_ratio}
    expected = {"virtual_memory": {"memory"}, "cpu_percent": {"load"}, "disk_usage": {"disk"}}.get(broken, set())
    assert {name for name, value in lost.items() if value is None} == expected


async def test_the_sources_of_a_board_that_becomes_known_later_are_read_instead() -> None:
    """A driver held up the probe at the start: the sensors come with the plan, in the sampling that runs."""
    first, second = Scripted(lambda n: watts(1.0), "host"), Scripted(lambda n: watts(2.0), "sysfs")
    sampler = sampler_of(first)
    async with running(sampler.run()):
        await until(lambda: sampler.latest)
        sampler.follow(sampler_of(second))
        await until(lambda: sampler.latest.source == "sysfs")
        before = first.reads
        await until(lambda: second.reads >= 3)
        assert first.reads == before
