"""The pool over supervisors without tasks: memory of mapped weights, and turns of models that are never idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.board.memory import MemorySnapshot
from edge.plan.plan import ColdStart, DomainBudget, ModelPlan, Settings
from edge.pool import pool as pool_module
from edge.pool.pool import Pool
from edge.pool.read_ahead import ReadAhead, Sleeper
from edge.pool.schedule import PoolPolicy
from edge.pool.warm_at import PoolModel
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.state import Restart, Sleep, StartRequested
from edge.supervisor.status import State
from edge.supervisor.supervisor import Supervisor
from edge.telemetry.governor import AdmissionLimit
from edge.units import GIB, MIB
from tests.fakes.waiting import running, until
from tests.supervisor.rig import FILE, PATTERNS, gpu_settings, model_plan, settings

WEIGHTS = FILE.bytes
CACHE = 100 * MIB
NEED = WEIGHTS + CACHE
MAPPED, READ = settings(load_mode="mmap"), settings(load_mode="none")


def planned(name: str, chosen: Settings, domain: str) -> ModelPlan:
    plan = model_plan(("x",), 1, chosen)
    budget = {domain: DomainBudget(8 * GIB, GIB, weights_bytes=WEIGHTS, kv_bytes=CACHE)}
    plans = tuple(replace(each, budget=budget) for each in plan.ladder.plans)
    return replace(plan, id=name, ladder=replace(plan.ladder, plans=plans))


class Posted(Supervisor):
    """A supervisor without a task: it keeps what it is asked to do."""

    def __init__(self, name: str, chosen: Settings, domain: str, state: State, folder: Path) -> None:
        super().__init__(planned(name, chosen, domain), folder / f"{name}.sock", PATTERNS, asleep=True)
        self.machine = replace(self.machine, state=state)
        self.posted: list[object] = []

    def post(self, event: object) -> None:
        self.posted.append(event)


class Dozing(Posted):
    """One whose engine sleeps by itself until a request wakes it."""

    asleep = True


async def asked(
    folder: Path, chosen: Settings, available: int, *, domain: str = "host", state: State = State.READY
) -> tuple[Posted, Posted]:
    """Return a resident and a newcomer after the decision for the newcomer's first request."""
    resident = Posted("resident", chosen, domain, state, folder)
    newcomer = Posted("newcomer", chosen, domain, State.SLEEPING, folder)
    handles = {each.model_id: ModelHandle(each.model_id, supervisor=each) for each in (resident, newcomer)}
    pool = Pool(handles, lambda: MemorySnapshot({domain: 8 * GIB}, {domain: available}), lambda _: PoolModel())
    waiting = asyncio.create_task(pool.admit(handles["newcomer"]))
    await asyncio.sleep(0)
    await pool._decide()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return resident, newcomer


@pytest.mark.parametrize(
    ("chosen", "domain", "mapped"),
    [
        (MAPPED, "host", True),
        (READ, "host", False),
        (MAPPED, "unified", True),
        (gpu_settings(load_mode="mmap"), "unified", False),  # copied into CUDA's memory: missing from MemAvailable
        (gpu_settings(load_mode="mmap"), "host", True),
    ],
)
async def test_mapped_weights_of_a_resident_are_not_free(
    short_dir: Path, chosen: Settings, domain: str, mapped: bool
) -> None:
    enough = GIB + NEED  # the reserve and the newcomer
    resident, newcomer = await asked(short_dir, chosen, enough, domain=domain)
    if mapped:
        assert [type(each) for each in resident.posted] == [Sleep]
        assert newcomer.posted == []
        resident, newcomer = await asked(short_dir, chosen, enough + WEIGHTS, domain=domain)
    assert [type(each) for each in newcomer.posted] == [StartRequested]
    assert resident.posted == []


@pytest.mark.parametrize("state", [State.DRAINING, State.STOPPING])
async def test_an_engine_that_ends_keeps_its_mapped_weights_until_then(short_dir: Path, state: State) -> None:
    _, newcomer = await asked(short_dir, MAPPED, GIB + NEED, state=state)
    assert newcomer.posted == []
    _, newcomer = await asked(short_dir, MAPPED, GIB + NEED + WEIGHTS, state=state)
    assert [type(each) for each in newcomer.posted] == [StartRequested]


async def test_a_loading_model_is_counted_once(short_dir: Path) -> None:
    _, newcomer = await asked(short_dir, MAPPED, GIB + 2 * NEED, state=State.LOADING)
    assert [type(each) for each in newcomer.posted] == [StartRequested]
    _, newcomer = await asked(short_dir, MAPPED, GIB + 2 * NEED - 1, state=State.LOADING)
    assert newcomer.posted == []


async def test_new_requests_of_a_busy_model_wait_once_another_has_waited_for_its_turn(short_dir: Path) -> None:
    """A model whose requests overlap is never idle: without a hold the other one would wait without end."""
    busy, other = (
        Posted(name, READ, "host", state, short_dir)
        for name, state in (("busy", State.READY), ("other", State.SLEEPING))
    )
    handles = {each.model_id: ModelHandle(each.model_id, supervisor=each) for each in (busy, other)}
    memory = MemorySnapshot({"host": 8 * GIB}, {"host": GIB})
    pool = Pool(handles, lambda: memory, lambda _: PoolModel(), policy=PoolPolicy(turn_s=0.0, idle_s=0.01))
    for handle in handles.values():
        handle.admission = pool
    deciding = asyncio.create_task(pool.run())
    with busy.traffic.request():
        assert not handles["busy"].held
        turn = asyncio.create_task(pool.admit(handles["other"]))
        await until(lambda: handles["busy"].held)
        late = asyncio.create_task(pool.admit(handles["busy"]))
        await asyncio.sleep(0)
        assert not late.done() and busy.posted == []
        turn.cancel()  # its client left: nothing waits for the memory any more
        assert await late is None and not handles["busy"].held
        turn = asyncio.create_task(pool.admit(handles["other"]))
        await until(lambda: handles["busy"].held)
    await until(lambda: busy.posted)
    assert isinstance(busy.posted[0], Sleep)
    deciding.cancel()
    turn.cancel()
    await asyncio.gather(deciding, turn, return_exceptions=True)


async def test_an_engine_that_sleeps_by_itself_is_asked_for_room_before_a_request_wakes_it(short_dir: Path) -> None:
    dozing = Dozing("dozing", MAPPED, "host", State.READY, short_dir)
    handle = ModelHandle("dozing", supervisor=dozing)
    memory = MemorySnapshot({"host": 8 * GIB}, {"host": GIB + NEED})
    pool = handle.admission = Pool({"dozing": handle}, lambda: memory, lambda _: PoolModel())
    assert handle.held, "its requests ask the pool first"
    asking = asyncio.create_task(pool.admit(handle))
    await asyncio.sleep(0)
    await pool._decide()
    assert await asking is None
    assert dozing.posted == [] and not handle.held, "the request wakes it"
    pool._waking["dozing"] -= 60.0  # its client left before the request was sent
    assert handle.held
    with dozing.traffic.request():
        assert not handle.held
    (resident,) = pool._residents()
    assert (resident.loading, resident.needs) == (False, {})
    with dozing.traffic.request():
        (resident,) = pool._residents()
    assert (resident.loading, resident.needs) == (True, {"host": NEED})


async def test_mapped_weights_of_an_engine_that_sleeps_by_itself_are_free(short_dir: Path) -> None:
    dozing = Dozing("dozing", MAPPED, "host", State.READY, short_dir)
    newcomer = Posted("newcomer", MAPPED, "host", State.SLEEPING, short_dir)
    handles = {each.model_id: ModelHandle(each.model_id, supervisor=each) for each in (dozing, newcomer)}
    pool = Pool(handles, lambda: MemorySnapshot({"host": 8 * GIB}, {"host": GIB + NEED}), lambda _: PoolModel())
    asking = asyncio.create_task(pool.admit(handles["newcomer"]))
    await asyncio.sleep(0)
    await pool._decide()
    assert await asking is None
    assert ([type(each) for each in newcomer.posted], dozing.posted) == ([StartRequested], [])


async def test_a_restart_of_a_sleeping_model_asks_for_room(short_dir: Path) -> None:
    """`edgellm restart ID` and the admin route: beside the resident model there is no memory for it."""
    resident = Posted("resident", READ, "host", State.READY, short_dir)
    sleeper = Posted("sleeper", READ, "host", State.SLEEPING, short_dir)
    handles = {each.model_id: ModelHandle(each.model_id, supervisor=each) for each in (resident, sleeper)}
    available = {"host": GIB}
    pool = Pool(handles, lambda: MemorySnapshot({"host": 8 * GIB}, available), lambda _: PoolModel())
    for handle in handles.values():
        handle.admission = pool
    handles["sleeper"].restart()
    await asyncio.sleep(0)
    await pool._decide()
    assert ([type(each) for each in resident.posted], sleeper.posted) == ([Sleep], [])
    available["host"] += NEED
    await pool._decide()
    assert [type(each) for each in sleeper.posted] == [StartRequested]
    handles["resident"].restart()
    assert [type(each) for each in resident.posted] == [Sleep, Restart]


async def test_a_restart_ends_an_engine_that_sleeps_by_itself_first(short_dir: Path) -> None:
    dozing = Dozing("dozing", READ, "host", State.READY, short_dir)
    handle = ModelHandle("dozing", supervisor=dozing)
    pool = handle.admission = Pool({"dozing": handle}, lambda: MemorySnapshot({}, {}), lambda _: PoolModel())
    assert handle.sleeps
    handle.restart()
    await asyncio.sleep(0)
    assert [type(each) for each in dozing.posted] == [Sleep]
    assert len(pool._waiters) == 1, "the next engine waits for room"


class Morning(datetime):
    """A wall clock that stands at one minute to eight."""

    @classmethod
    def now(cls, tz: object = None) -> Morning:
        return cls(2026, 3, 2, 7, 59)


@pytest.mark.parametrize(("warm_at", "begins"), [("08:00", True), ("08:10", False)])
async def test_the_start_for_a_time_of_day_asks_for_room(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, warm_at: str, begins: bool
) -> None:
    monkeypatch.setattr(pool_module, "datetime", Morning)
    resident = Posted("resident", READ, "host", State.READY, short_dir)
    night = Posted("night", READ, "host", State.SLEEPING, short_dir)
    handles = {each.model_id: ModelHandle(each.model_id, supervisor=each) for each in (resident, night)}
    looks: list[MemorySnapshot] = []

    def measure() -> MemorySnapshot:
        looks.append(MemorySnapshot({"host": 8 * GIB}, {"host": GIB}))
        return looks[-1]

    pool = Pool(handles, measure, lambda name: PoolModel(warm_at=warm_at if name == "night" else "", load_s=60.0))
    async with running(pool.run()):
        await until(lambda: resident.posted if begins else looks)  # what reads ahead measures where nothing begins
        assert {type(each) for each in resident.posted} == ({Sleep} if begins else set())
        assert ([each.handle.model_id for each in pool._waiters], night.posted) == (["night"] if begins else [], [])


class Looked(ReadAhead):
    """It keeps what it is given and reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[list[str], int, int]] = []

    async def look(self, asleep: Iterable[Sleeper], spare_bytes: int, least_bytes: int) -> None:
        self.given.append(([each.id for each in asleep], spare_bytes, least_bytes))


@pytest.mark.parametrize(
    ("what", "state"),
    [
        ("calm", State.READY),
        ("a request is open", State.READY),
        ("limited", State.READY),
        ("a request waits", State.READY),
        *(("loads", state) for state in (State.STARTING, State.LOADING, State.WARMING, State.BACKOFF)),
        *(("ends", state) for state in (State.DRAINING, State.STOPPING)),
    ],
)
async def test_the_next_model_is_read_ahead_only_while_nothing_else_needs_disk_or_memory(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, what: str, state: State
) -> None:
    resident = Posted("resident", MAPPED, "host", state, short_dir)
    sleeper = Posted("sleeper", MAPPED, "host", State.SLEEPING, short_dir)
    handles = {each.model_id: ModelHandle(each.model_id, supervisor=each) for each in (resident, sleeper)}
    memory = MemorySnapshot({"host": 8 * GIB}, {"host": 4 * GIB})
    pool, looked = Pool(handles, lambda: memory, lambda _: PoolModel()), Looked()
    monkeypatch.setattr(pool, "_ahead", looked)
    if what == "limited":
        handles["resident"].limit_admission(AdmissionLimit(fraction=0.5), "80 °C")
    waiting = asyncio.create_task(pool.admit(handles["sleeper"])) if what == "a request waits" else None
    await asyncio.sleep(0)
    with resident.traffic.request() if what == "a request is open" else nullcontext():
        await pool._read_ahead(datetime.now())
    if waiting is not None:
        waiting.cancel()
    reads = what in ("calm", "a request is open")
    # The mapped weights of the resident are page cache that must stay.
    assert looked.given == ([(["sleeper"], 3 * GIB - WEIGHTS, GIB)] if reads else [])


@pytest.mark.parametrize("cold", [True, False])
async def test_a_ready_model_is_read_ahead_where_its_cold_start_read_past_the_page_cache(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    """A restart of its engine is warm then. Models that sleep come first: their start is nearer."""
    ready = Posted("ready", MAPPED, "host", State.READY, short_dir)
    rung = ready.model.ladder.plans[0]
    rung = replace(rung, cold=ColdStart("dio", ("dio",), 0.2) if cold else None)
    monkeypatch.setattr(Posted, "plan", property(lambda _: rung))
    handles = {"ready": ModelHandle("ready", supervisor=ready)}
    pool, looked = (
        Pool(handles, lambda: MemorySnapshot({"host": 8 * GIB}, {"host": 4 * GIB}), lambda _: PoolModel()),
        Looked(),
    )
    monkeypatch.setattr(pool, "_ahead", looked)
    await pool._read_ahead(datetime.now())
    assert [ids for ids, _, _ in looked.given] == ([["ready"]] if cold else [])
