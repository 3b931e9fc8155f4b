"""Engines that misbehave in ways llama.cpp does not: real processes, each judged once and ended with all it started."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.supervisor import diagnose, watch
from edge.supervisor.log_patterns import Patterns
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.process_io import LINE_BYTES_MAX
from edge.supervisor.status import State
from tests.fakes.llama_switches import Death
from tests.supervisor.rig import FAST, Rig, rigged
from tests.supervisor.test_supervisor_session import gone, script

HASTY = SupervisorOptions(policy=replace(FAST, stall_s=0.6, wedge_s=0.6))
NULS = '(head -c 100000000 /dev/zero >&2) \n"$@"\n'
NO_LINE_END = '(head -c 100000000 /dev/zero | tr "\\0" x >&2)\n"$@"\n'
# A flood that goes on while the engine serves.
FLOOD = '(while :; do head -c 1000000 /dev/zero | tr "\\0" x; done >&2) &\n"$@"\n'
CLOSED = 'exec "$@" >/dev/null 2>&1\n'
SHUT = 'exec "$@" >&- 2>&-\n'


def kind(rig: Rig) -> str:
    failure = rig.supervisor.status().failure
    assert failure is not None
    return failure.kind


@pytest.mark.parametrize("body", [CLOSED, SHUT], ids=["redirected", "closed"])
async def test_an_engine_that_closes_its_output_is_found_by_its_probe(short_dir: Path, body: str) -> None:
    async with rigged(short_dir, argv=script(short_dir, body)) as rig:
        await rig.ready()
        assert (await rig.complete())[0] == 200
        assert len(rig.pids) == 1


@pytest.mark.parametrize("body", [NULS, NO_LINE_END], ids=["NULs", "no line end"])
async def test_100_mb_without_a_line_end_are_cut_and_the_engine_behind_them_serves(short_dir: Path, body: str) -> None:
    async with rigged(short_dir, argv=script(short_dir, body)) as rig:
        await rig.ready()
        assert max(map(len, rig.lines)) <= LINE_BYTES_MAX
        assert (await rig.complete())[0] == 200


async def test_a_flood_without_line_ends_does_not_end_with_the_start(short_dir: Path) -> None:
    async with rigged(short_dir, argv=script(short_dir, FLOOD)) as rig:
        await rig.ready()
        for _ in range(5):
            assert (await rig.complete())[0] == 200
        rig.supervisor.stop()
        await rig.settle(State.STOPPED)
        assert gone(rig.pids[-1])


async def test_a_model_that_is_cut_while_it_is_mapped_is_named_after_eight_starts(
    short_dir: Path,
) -> None:
    """SIGBUS: the pages behind the end of the file. No remedy makes the file whole again."""
    async with rigged(short_dir, death=Death(at="loading", signal=signal.SIGBUS)) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "signal_bus" and "became shorter" in failure.hint
        assert len(rig.pids) == 8


@pytest.mark.parametrize("line", ["terminate called after throwing: ", "llama_model_load: error writing: "])
async def test_a_disk_that_is_full_is_named(short_dir: Path, line: str) -> None:
    death = Death(at="loading", lines=[f"{line}No space left on device"], code=1)
    async with rigged(short_dir, death=death) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert kind(rig) == "disk_full"


@pytest.mark.parametrize("status", [500, 502])
async def test_completions_that_fail_without_end_end_the_starts(short_dir: Path, status: int) -> None:
    """/health answers 200 all the time."""
    async with rigged(short_dir, refuse_warm_up=status) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert (kind(rig), len(rig.pids)) == ("warm_up_failed", 3)


async def test_the_log_of_a_dead_engine_is_searched_off_the_event_loop(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 different lines of 4 kB take 60 signatures more than a second."""
    lines = [f"{number} {'CUDA error ' * 400}"[:4096] for number in range(400)]
    threads: list[threading.Thread] = []

    def noted(death: diagnose.Death, patterns: Patterns) -> diagnose.Diagnosis:
        threads.append(threading.current_thread())
        return diagnose.diagnose(death, patterns)

    monkeypatch.setattr(watch, "diagnose", noted)
    async with rigged(short_dir, death=Death(at="loading", lines=lines, code=1)) as rig:
        await rig.until(lambda: rig.kinds)
    assert threads and threading.main_thread() not in threads


async def test_slots_that_never_answer_hold_up_no_judgement(short_dir: Path) -> None:
    async with rigged(short_dir, terms=HASTY, slow_s=30.0, slots_hang=True) as rig:
        await rig.ready()
        request = asyncio.create_task(rig.complete())
        await rig.until(lambda: len(rig.pids) == 2)
        assert rig.kinds == ["wedged"]
        await asyncio.gather(request, return_exceptions=True)


@pytest.mark.parametrize("number", [0, 3])
async def test_an_engine_that_only_exits_is_started_a_bounded_number_of_times(short_dir: Path, number: int) -> None:
    path = short_dir / "engine.sh"
    path.write_text(f'#!/bin/sh\necho $$ >>"{short_dir}/pids"\nexit {number}\n')
    path.chmod(0o755)
    async with rigged(short_dir, argv=(str(path),)) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert kind(rig) == "exited"
        pids = (short_dir / "pids").read_text().split()
        assert len(pids) == 8 and all(gone(int(pid)) for pid in pids)


async def test_a_child_that_stops_itself_while_it_loads_is_a_hang(short_dir: Path) -> None:
    """SIGSTOP, as a debugger or a job control of a wrapper sends it."""
    path = short_dir / "engine.sh"
    path.write_text(f'#!/bin/sh\necho $$ >>"{short_dir}/pids"\nkill -STOP $$\n')
    path.chmod(0o755)
    async with rigged(short_dir, terms=HASTY, argv=(str(path),)) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert kind(rig) == "stalled"
        assert all(gone(int(pid)) for pid in (short_dir / "pids").read_text().split())
