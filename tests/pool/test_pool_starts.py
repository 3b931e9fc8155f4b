"""Every start takes its memory from the one budget: after a failure, by a reload, on a larger rung, beside the old."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from edge.board.memory import MemorySnapshot
from edge.daemon.device_recovery import recover_servers
from edge.daemon.fleet import Fleet
from edge.daemon.reload import Reload, in_place
from edge.plan.plan import DomainBudget
from edge.pool.pool import Pool
from edge.pool.schedule import PoolPolicy
from edge.pool.warm_at import PoolModel
from edge.supervisor.events import MemoryBack, Restart, Sleep, StartRequested, Stop
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.state import AfterExit
from edge.supervisor.status import Failure, State
from edge.telemetry.governor import AdmissionLimit
from edge.units import GIB
from tests.fakes.waiting import running, until
from tests.pool.test_pool_room import NEED, READ, Posted

FULL = Failure("oom", "cudaMalloc failed: out of memory", "a smaller model")


class Large(Posted):
    """One that needs the memory of two."""

    @property
    def needs_bytes(self) -> dict[str, int]:
        return {"host": 2 * NEED}


class Board:
    """Models of equal size on a board where `room` of them fit, none of which has a task."""

    def __init__(self, folder: Path, room: int, **states: State) -> None:
        self.folder = folder
        self.available = GIB + room * NEED
        self.supervisors = {name: Posted(name, READ, "host", state, folder) for name, state in states.items()}
        self.handles = {name: ModelHandle(name, supervisor=each) for name, each in self.supervisors.items()}
        self.pinned: set[str] = set()
        self.pool = Pool(
            self.handles,
            lambda: MemorySnapshot({"host": 8 * GIB}, {"host": self.available}),
            lambda name: PoolModel(pin=name in self.pinned),
            policy=PoolPolicy(idle_s=0.01, back_s=0.01),
        )
        for handle in self.handles.values():
            handle.admission = self.pool

    def posted(self, name: str) -> list[type]:
        return [type(each) for each in self.supervisors[name].posted]

    def ends(self, name: str) -> None:
        """Let the engine end that was put to sleep, and give its memory back."""
        supervisor = self.supervisors[name]
        supervisor.machine = replace(supervisor.machine, state=State.SLEEPING)
        self.available += NEED
        self.pool.became(supervisor, State.SLEEPING)


def failed(board: Board, name: str, *, short: bool) -> ModelHandle:
    supervisor = board.supervisors[name]
    supervisor.machine = replace(supervisor.machine, failure=FULL, short_of_memory=short)
    return board.handles[name]


@pytest.mark.parametrize(("asks", "event"), [("memory_back", StartRequested), ("restart", Restart)])
async def test_a_failed_model_is_started_again_once_another_made_room(short_dir: Path, asks: str, event: type) -> None:
    board = Board(short_dir, 0, resident=State.READY, failed=State.FAILED)
    handle = failed(board, "failed", short=True)
    async with running(board.pool.run()):
        getattr(handle, asks)()
        if asks == "memory_back":
            handle.memory_back()  # of another holder, while the first start waits
        await until(lambda: board.posted("resident"))
        assert (board.posted("resident"), board.posted("failed")) == ([Sleep], []), "no memory, no start"
        board.ends("resident")
        await until(lambda: board.posted("failed"))
    assert board.posted("failed") == [event]


async def test_a_failed_model_beside_a_pinned_one_is_not_started(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board(short_dir, 0, resident=State.READY, failed=State.FAILED)
    board.pinned = {"resident"}
    handle = failed(board, "failed", short=True)
    async with running(board.pool.run()):
        handle.memory_back()
        await until(lambda: "failed was not started: no_room" in caplog.text)
    assert (board.posted("resident"), board.posted("failed")) == ([], [])


async def test_a_model_that_was_stopped_for_heat_starts_within_the_budget(short_dir: Path) -> None:
    """Another process may have taken memory meanwhile: not both are started into what is left."""
    board = Board(short_dir, 1, one=State.READY, two=State.READY)
    for name, handle in board.handles.items():
        handle.supervisor_changed(board.supervisors[name], State.READY)
        handle.limit_admission(AdmissionLimit(0.5, hold_new=True, drain=True), "95 °C")
        assert board.posted(name) == [Stop]
        board.supervisors[name].machine = replace(board.supervisors[name].machine, state=State.STOPPED)
    for handle in board.handles.values():
        handle.limit_admission(AdmissionLimit(), "60 °C")
    async with running(board.pool.run()):
        await until(lambda: StartRequested in board.posted("one") + board.posted("two"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert sum(StartRequested in board.posted(name) for name in board.handles) == 1
    pinned = Board(short_dir, 0, resident=State.READY, cool=State.STOPPED)
    pinned.pinned = {"resident"}
    async with running(pinned.pool.run()):
        pinned.handles["cool"].start()
        await until(lambda: pinned.posted("cool"))
    assert pinned.posted("cool") == [Sleep], "its requests are refused by name, and not held in vain"


async def test_a_model_that_is_unloaded_while_it_is_hot_stays_asleep(short_dir: Path) -> None:
    board = Board(short_dir, 0, one=State.READY)
    handle, supervisor = board.handles["one"], board.supervisors["one"]
    handle.supervisor_changed(supervisor, State.READY)
    handle.limit_admission(AdmissionLimit(0.5, hold_new=True, drain=True), "95 °C")
    supervisor.machine = replace(supervisor.machine, state=State.SLEEPING)
    handle.limit_admission(AdmissionLimit(), "60 °C")
    assert board.posted("one") == [Stop]


async def test_a_model_that_failed_for_another_reason_does_not_wait_for_memory(short_dir: Path) -> None:
    board = Board(short_dir, 1, failed=State.FAILED)
    failed(board, "failed", short=False).memory_back()
    await asyncio.sleep(0)
    assert board.pool._waiters == []


@pytest.mark.parametrize(("asks", "event"), [("memory_back", StartRequested), ("restart", Restart)])
async def test_a_start_that_waits_is_of_the_engine_that_is_there_then(short_dir: Path, asks: str, event: type) -> None:
    """A reload may replace the supervisor meanwhile: that of before has no task any more."""
    board = Board(short_dir, 1, failed=State.FAILED)
    handle = failed(board, "failed", short=True)
    getattr(handle, asks)()
    await asyncio.sleep(0)
    new = Posted("failed", READ, "host", State.SLEEPING, short_dir / "new")
    handle.serve(new)
    await board.pool._decide()
    assert ([type(each) for each in new.posted], board.posted("failed")) == ([event], [])


async def test_of_several_starts_of_one_model_the_last_is_carried_out(short_dir: Path) -> None:
    """A reload replaces a failed model whose start waited already: it has to see its new engine start."""
    board = Board(short_dir, 1, failed=State.FAILED)
    begun: list[str] = []
    starts = [
        asyncio.create_task(board.pool.start(board.handles["failed"], lambda name=name: begun.append(name)))
        for name in ("memory is back", "reload")
    ]
    await asyncio.sleep(0)
    await board.pool._decide()
    assert await asyncio.gather(*starts) == [None, None] and begun == ["reload"]


async def test_a_start_that_waits_ends_with_its_model(short_dir: Path) -> None:
    board = Board(short_dir, 0, resident=State.READY, failed=State.FAILED)
    board.pinned = {"resident"}
    starting = asyncio.create_task(board.pool.start(board.handles["failed"], lambda: None))
    await asyncio.sleep(0)
    del board.handles["failed"]
    await board.pool._decide()
    assert await starting is None and board.posted("failed") == []


async def test_a_pool_that_cannot_decide_starts_what_waits(short_dir: Path) -> None:
    board = Board(short_dir, 1, failed=State.FAILED)
    board.pool._model = cast(Any, None)
    async with running(board.pool.run()):
        board.handles["failed"].restart()
        await until(lambda: board.posted("failed"))
    assert board.posted("failed") == [Restart]


@pytest.mark.parametrize(
    ("room", "other", "grows"),
    [
        (0, State.READY, False),
        (1, State.READY, True),
        (1, State.LOADING, False),
        (0, State.SLEEPING, True),  # alone: its own ladder decides
    ],
)
async def test_an_engine_returns_to_its_planned_rung_only_if_what_that_needs_more_is_free(
    short_dir: Path, room: int, other: State, grows: bool
) -> None:
    board = Board(short_dir, room, smaller=State.READY, other=other)
    supervisor = board.supervisors["smaller"]
    supervisor.machine = replace(supervisor.machine, rung_lost=True)
    ladder = supervisor.model.ladder  # of the rung that it runs on; the planned one needs twice that
    home = replace(ladder.plans[0], budget={"host": DomainBudget(8 * GIB, GIB, weights_bytes=2 * NEED)})
    supervisor.model = replace(supervisor.model, ladder=replace(ladder, plans=(home, *ladder.plans[1:])))
    handle = board.handles["smaller"]
    handle.memory_back()
    await until(lambda: not handle._waking)
    assert board.posted("smaller") == ([MemoryBack] if grows else [])


async def test_a_second_engine_beside_the_old_one_is_counted_while_it_loads(short_dir: Path) -> None:
    """A blue/green reload and a first request for another model must not be given the same memory."""
    board = Board(short_dir, 1, chat=State.READY, other=State.SLEEPING)
    new = Posted("chat", READ, "host", State.STOPPED, short_dir / "new")
    with board.supervisors["chat"].traffic.request():
        async with board.pool.beside(new) as fits:
            assert fits
            asking = asyncio.create_task(board.pool.admit(board.handles["other"]))
            await asyncio.sleep(0)
            await board.pool._decide()
            assert board.posted("other") == [], "its memory is the new engine's"
            new.machine = replace(new.machine, state=State.READY)
            board.available -= NEED
        board.available += NEED
        await board.pool._decide()
        assert board.posted("other") == [StartRequested] and await asking is None


async def test_a_second_engine_does_not_take_what_a_loading_model_was_given(short_dir: Path) -> None:
    board = Board(short_dir, 1, chat=State.READY, other=State.LOADING)
    new = Posted("chat", READ, "host", State.STOPPED, short_dir / "new")
    async with board.pool.beside(new) as fits:
        assert not fits, "MemAvailable shows its memory as free still"
    assert len(board.pool._residents()) == 2


async def test_a_model_that_a_reload_adds_asks_for_room(short_dir: Path) -> None:
    board = Board(short_dir, 0, resident=State.READY, added=State.STOPPED)
    supervisor = board.supervisors["added"]
    handle = board.handles["added"]
    handle.admission = None

    class Few:
        def add(self, *_: object) -> tuple[ModelHandle, Posted]:
            return handle, supervisor

        def run(self, _: object) -> None:
            """It has no task."""

    def admitted(each: ModelHandle) -> None:
        each.admission = board.pool

    supervisor.terms = SupervisorOptions(preload=True)
    nothing = cast(Any, None)
    await Reload(cast(Fleet, Few()), board.pool)._add(nothing, nothing, admitted)
    async with running(board.pool.run()):
        await until(lambda: board.posted("resident"))
        assert (board.posted("resident"), board.posted("added")) == ([Sleep], [])
        board.ends("resident")
        await until(lambda: board.posted("added"))
    assert board.posted("added") == [StartRequested]


@pytest.mark.parametrize("state", [State.SLEEPING, State.DRAINING, State.STOPPING])
async def test_a_model_that_leaves_its_memory_is_replaced_asleep(short_dir: Path, state: State) -> None:
    """Started in its place the new engine would take what another model waits for."""
    board = Board(short_dir, 0, leaves=state)
    old, handle = board.supervisors["leaves"], board.handles["leaves"]
    old.machine = replace(old.machine, then=AfterExit.SLEEP)
    new = Posted("leaves", READ, "host", State.SLEEPING, short_dir / "new")
    made: list[bool] = []

    class Few:
        handles = board.handles

        def make(self, *_: object, asleep: bool) -> Posted:
            made.append(asleep)
            return new

        def run(self, _: object) -> None:
            """It has no task."""

        async def dismiss(self, _: object) -> None:
            """It has no task."""

    async with running(board.pool.run()):
        changing = asyncio.create_task(Reload(cast(Fleet, Few()), board.pool)._change(cast(Any, None), old.model))
        await until(lambda: old.posted)
        old.machine = replace(old.machine, state=State.STOPPED)
        old._changed.set()
        turned = await changing
    assert (turned.how, made, new.posted, handle.supervisor) == ("asleep", [True], [], new)


async def test_a_replacement_that_has_no_room_beside_a_pinned_model_is_refused(short_dir: Path) -> None:
    """The larger plan would take what a pinned model holds: the old engine is started again."""
    board = Board(short_dir, 1, pinned=State.READY, chat=State.STOPPED)
    board.pinned = {"pinned"}
    old, handle = board.supervisors["chat"], board.handles["chat"]
    new = Large("chat", READ, "host", State.STOPPED, short_dir / "new")
    async with running(board.pool.run()):
        turning = asyncio.create_task(in_place(handle, old, new))
        await until(lambda: StartRequested in board.posted("chat"))
        assert new.posted == [] and handle.supervisor is old
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)


async def test_a_model_whose_rpc_server_is_back_asks_for_room(short_dir: Path) -> None:
    board = Board(short_dir, 0, resident=State.READY, failed=State.FAILED)
    supervisor = board.supervisors["failed"]
    gone = Failure("remote_missing", "10.0.0.2:50052 does not answer", "start `edgellm rpc serve` there")
    supervisor.machine = replace(supervisor.machine, failure=gone)
    ladder = supervisor.model.ladder
    remote = replace(ladder.plans[0], settings=replace(READ, rpc=("10.0.0.2:50052",)))
    supervisor.model = replace(supervisor.model, ladder=replace(ladder, plans=(remote, *ladder.plans[1:])))

    class Few:
        handles = board.handles

        def supervisors(self) -> list[Posted]:
            return list(board.supervisors.values())

    async def no_plan() -> None:
        """Nothing was planned without it."""

    recovering = recover_servers(lambda: None, cast(Fleet, Few()), no_plan, answers=lambda _: True, pauses_s=(0.01,))
    async with running(board.pool.run()), running(recovering):
        await until(lambda: board.posted("resident"))
        assert (board.posted("resident"), board.posted("failed")) == ([Sleep], [])
        board.ends("resident")
        await until(lambda: board.posted("failed"))
    assert set(board.posted("failed")) == {StartRequested}
