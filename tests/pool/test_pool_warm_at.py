"""A model with `warm_at` begins to load early enough by its last load, once a day, whatever the wall clock does."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from edge.pool.warm_at import PoolModel, warm_from, warm_now

MIDNIGHT = datetime(2026, 3, 2)
DUE = MIDNIGHT.replace(hour=8)
HOUR = timedelta(hours=1)
LOOK_S = 30.0
LATE = timedelta(milliseconds=2)  # a timer of the event loop fires a little after its time
PHASES = [step * 0.7 for step in range(44)]  # seconds past the full hour at which the daemon started


class Clock:
    """The loop of the pool without a pool: it looks, sleeps as long as it is told, and keeps what began and when."""

    def __init__(self, start: datetime, models: dict[str, PoolModel]) -> None:
        self.now = start
        self.models = models
        self.begun: set[tuple[str, datetime]] = set()
        self.log: list[tuple[str, datetime]] = []

    def until(self, end: datetime) -> None:
        while self.now < end:
            names, pause_s = warm_now(self.now, self.models, self.begun)
            assert 0 < pause_s <= LOOK_S
            self.log += [(name, self.now) for name in names]
            self.now += timedelta(seconds=pause_s) + LATE

    def times(self, name: str) -> list[datetime]:
        return [at for each, at in self.log if each == name]


@pytest.mark.parametrize("load_s", [None, 0.5, 2.0, 60.0, 600.0])
def test_each_start_begins_at_its_time_once_a_day(load_s: float | None) -> None:
    model = PoolModel(warm_at="08:00", load_s=load_s)
    begin = warm_from(DUE - 2 * HOUR, model)
    assert begin is not None
    assert DUE - begin >= timedelta(seconds=load_s or 60.0)
    for phase in PHASES:
        clock = Clock(DUE - HOUR + timedelta(seconds=phase), {"night": model, "other": PoolModel(load_s=1.0)})
        clock.until(DUE + 24 * HOUR)
        assert [name for name, _ in clock.log] == ["night", "night"]
        for day, at in enumerate(clock.times("night")):
            assert timedelta(0) <= at - begin - day * 24 * HOUR < timedelta(seconds=0.1)


def test_each_of_several_models_begins_at_its_own_time() -> None:
    models = {
        "a": PoolModel(warm_at="08:00", load_s=2.0),
        "b": PoolModel(warm_at="08:00", load_s=2.0),
        "c": PoolModel(warm_at="08:01", load_s=60.0),
        "d": PoolModel(warm_at="00:00", load_s=0.5),
    }
    for phase in PHASES:
        clock = Clock(MIDNIGHT - HOUR + timedelta(seconds=phase), models)
        clock.until(MIDNIGHT + 12 * HOUR)
        assert sorted(name for name, _ in clock.log) == ["a", "b", "c", "d"]
        for name, at in clock.log:
            begin = warm_from(at - timedelta(seconds=1), models[name])
            assert begin is not None and timedelta(0) <= at - begin < timedelta(seconds=0.1)


@pytest.mark.parametrize("load_s", [None, 0.5, 2.0, 60.0, 600.0])
@pytest.mark.parametrize("hours", [1, 3, 20])
def test_a_clock_that_is_set_back_repeats_no_start(load_s: float | None, hours: int) -> None:
    clock = Clock(DUE - HOUR, {"night": PoolModel(warm_at="08:00", load_s=load_s)})
    clock.until(DUE + HOUR / 2)
    assert len(clock.log) == 1
    clock.now -= hours * HOUR
    clock.until(DUE + 2 * HOUR)
    assert len(clock.log) == 1
    clock.until(DUE + 26 * HOUR)
    assert len(clock.log) == 2


@pytest.mark.parametrize("load_s", [None, 2.0, 600.0])
def test_a_clock_that_jumps_past_the_begin_starts_at_the_next_look(load_s: float | None) -> None:
    for phase in PHASES:
        clock = Clock(DUE - 5 * HOUR + timedelta(seconds=phase), {"night": PoolModel(warm_at="08:00", load_s=load_s)})
        clock.until(DUE - 4 * HOUR)
        clock.now = jumped = DUE - timedelta(seconds=5)
        clock.until(DUE + HOUR)
        assert clock.times("night") == [jumped]


def test_a_clock_that_jumps_past_the_due_time_waits_for_the_next_day() -> None:
    clock = Clock(DUE - 5 * HOUR, {"night": PoolModel(warm_at="08:00", load_s=60.0)})
    clock.until(DUE - 4 * HOUR)
    clock.now = DUE + timedelta(seconds=1)
    clock.until(DUE + 23 * HOUR)
    assert clock.log == []
    clock.until(DUE + 24 * HOUR)
    assert len(clock.log) == 1


def test_no_model_with_a_time_is_looked_for_later() -> None:
    assert warm_now(DUE, {"chat": PoolModel()}, set()) == ([], LOOK_S)
