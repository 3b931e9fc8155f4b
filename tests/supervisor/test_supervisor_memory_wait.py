"""A model that failed for want of memory names who holds it and starts again when memory is back."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.supervisor import memory_wait
from edge.supervisor.memory_wait import HOLDER_BYTES, MemoryHolder, MemoryWait, find_holders
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.status import State
from edge.supervisor.supervisor import SupervisorCallbacks
from edge.units import GIB
from tests.fakes.llama_switches import Death
from tests.fakes.waiting import until
from tests.supervisor.rig import FAST, rigged

HOLD = f"import sys; held = b'x' * {HOLDER_BYTES + (32 << 20)}; print('held', flush=True); sys.stdin.read()"


@asynccontextmanager
async def holder() -> AsyncIterator[Process]:
    """A process with 160 MiB."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", HOLD, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_model_that_found_no_memory_starts_when_a_holder_ends(short_dir: Path) -> None:
    terms = SupervisorOptions(policy=replace(FAST, allocation_pauses_s=(0.01,)))
    death = Death("loading", ["cudaMalloc failed: out of memory"], code=1)
    holders: list[MemoryHolder] = []
    callbacks = SupervisorCallbacks(gpu_holders=lambda: holders)
    async with holder() as process, rigged(short_dir, terms=terms, callbacks=callbacks, death=death) as rig:
        holders.append(MemoryHolder(process.pid, "python", 64 * GIB))  # other processes of this machine come after it
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        await rig.until(lambda: f"(pid {process.pid})" in str(rig.supervisor.status().failure))
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "out_of_memory" and "pid" not in failure.hint
        rig.change(death=None)
        process.kill()
        await rig.until(lambda: rig.states[-1] == "READY")


async def test_another_failure_waits_for_no_memory(short_dir: Path) -> None:
    death = Death("line", ["error: invalid argument: --nonsense"], code=1)
    async with holder() as process, rigged(short_dir, death=death) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        process.kill()
        await process.wait()
        rig.supervisor.memory_back()
        await asyncio.sleep(0)
        assert "memory is held" not in str(rig.supervisor.status().failure)
        assert len(rig.pids) == 1


async def test_a_wait_that_ends_early_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    async with holder():
        wait = MemoryWait(lambda: None)
        wait.begin()
        await until(lambda: wait.holders)
        wait.end()
        await until(lambda: asyncio.all_tasks() == before)
        assert wait.sentence == ""


class Looks:
    """A wait on a machine whose memory the test sets, without holders."""

    def __init__(self) -> None:
        self.bytes, self.gpu_bytes, self.calls, self.freed = 0, 0, 0, asyncio.Event()
        self.wait = MemoryWait(self.freed.set, self.gpu, look_s=0.001, available=self.available)

    def available(self) -> int:
        self.calls += 1
        return self.bytes

    def gpu(self) -> list[MemoryHolder]:
        return [MemoryHolder(os.getpid(), "python", self.gpu_bytes)]

    async def begin(self) -> None:
        """Wait for more memory than there is now."""
        self.freed.clear()
        self.wait.follow(short=False, served=False)
        self.wait.follow(short=True, served=False)
        await self.looked()

    async def looked(self) -> None:
        """Let it look twice."""
        before = self.calls
        await until(lambda: self.calls >= before + 3 or self.freed.is_set())


@pytest.fixture
async def looks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Looks]:
    monkeypatch.setattr(memory_wait, "find_holders", lambda _: ())  # one of this machine may end meanwhile
    found = Looks()
    yield found
    found.wait.end()


async def test_memory_that_a_living_process_gives_back_is_found_by_a_look(looks: Looks) -> None:
    """A holder that frees its memory and lives on, or none that could be found."""
    await looks.begin()
    looks.bytes += HOLDER_BYTES - 1
    await looks.looked()
    assert not looks.freed.is_set(), "less than a start is worth"
    looks.bytes += 1
    await looks.freed.wait()


async def test_each_start_in_vain_requires_twice_as_much_until_a_model_served(looks: Looks) -> None:
    await looks.begin()
    looks.bytes += HOLDER_BYTES
    await looks.freed.wait()
    await looks.begin()
    looks.bytes += HOLDER_BYTES
    await looks.looked()
    assert not looks.freed.is_set()
    looks.bytes += HOLDER_BYTES
    await looks.freed.wait()
    looks.wait.follow(short=False, served=True)
    await looks.begin()
    looks.bytes += HOLDER_BYTES
    await looks.freed.wait()


async def test_a_start_that_was_not_granted_is_followed_by_further_looks(looks: Looks) -> None:
    """Beside other models there may be no room for it: memory that comes back later is seen as well."""
    await looks.begin()
    looks.bytes += HOLDER_BYTES
    await looks.freed.wait()
    looks.freed.clear()
    await looks.looked()
    looks.bytes += 2 * HOLDER_BYTES
    await until(looks.freed.is_set)


async def test_memory_of_a_gpu_that_is_given_back_counts_in_a_look(looks: Looks) -> None:
    looks.gpu_bytes = 2 * HOLDER_BYTES
    await looks.begin()
    looks.gpu_bytes = HOLDER_BYTES
    await looks.freed.wait()


async def test_a_model_starts_when_a_look_finds_memory(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Looks()
    monkeypatch.setattr(memory_wait, "available_bytes", machine.available)
    monkeypatch.setattr(memory_wait, "find_holders", lambda _: ())
    monkeypatch.setattr(memory_wait, "LOOK_S", 0.01)
    terms = SupervisorOptions(policy=replace(FAST, allocation_pauses_s=(0.01,)))
    death = Death("loading", ["cudaMalloc failed: out of memory"], code=1)
    async with rigged(short_dir, terms=terms, death=death) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        await machine.looked()
        rig.change(death=None)
        machine.bytes = GIB
        await rig.until(lambda: rig.states[-1] == "READY")


async def test_holders_are_the_largest_and_never_this_process() -> None:
    async with holder() as process:
        gpu = [MemoryHolder(process.pid, "python", 3 * GIB), MemoryHolder(1, "small", 1)]
        found = find_holders(gpu)
        assert found[0] == MemoryHolder(process.pid, "python", 3 * GIB), "memory of the GPU counts"
        assert os.getpid() not in {each.pid for each in found}
        assert [each.bytes for each in found] == sorted((each.bytes for each in found), reverse=True)
