"""The pool's decisions: named histories, and random ones in which no request is stranded and no memory given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.pool.schedule import Arrival, PoolPolicy, Resident, cheapest, decide
from edge.resources import load_toml
from edge.units import GIB
from tests.pool.simulation import Model, Simulation

HISTORIES = load_toml(Path(__file__).parent / "histories.toml")["history"]


@pytest.mark.parametrize("history", HISTORIES, ids=[each["name"] for each in HISTORIES])
def test_history(history: dict[str, Any]) -> None:
    models = {name: Model(**fields) for name, fields in history["models"].items()}
    pool = Simulation(models, history.get("budget", 10))
    pool.play(history["script"])
    assert (" · ".join(pool.log), " · ".join(pool.outcomes)) == (history["decided"], history["answered"])


def test_there_are_sixty_histories() -> None:
    assert len({each["name"] for each in HISTORIES}) == len(HISTORIES) >= 60


MODELS = st.dictionaries(
    st.sampled_from("abcde"),
    st.builds(
        Model,
        needs=st.integers(0, 10),
        priority=st.integers(0, 2),
        pin=st.sampled_from([False, False, False, True]),
        load_s=st.none() | st.floats(0.1, 90),
        keeps=st.integers(0, 2),
    ),
    min_size=1,
)


@settings(max_examples=400, deadline=None)
@given(MODELS, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=60))
def test_no_request_is_stranded_and_no_memory_is_given_twice(
    models: dict[str, Model], choices: list[tuple[int, int]]
) -> None:
    pool = Simulation(models, 10)
    asked = 0
    for which, how in choices:
        events = _possible(pool)
        event = events[(which * 61 + how) % len(events)]
        asked += event in pool.models
        if event.endswith("-"):
            asked -= 1
        _checked(pool, event)
    for _ in range(300):
        if not any(model.waiting or model.open or model.again_s for model in pool.models.values()):
            break
        for event in _progress(pool):
            _checked(pool, event)
        _checked(pool, "+6")
    assert not any(model.waiting or model.again_s for model in pool.models.values()), pool.log
    assert len(pool.outcomes) == asked


def _possible(pool: Simulation) -> list[str]:
    events = ["+0.1", "+1", "+12"]
    for name, model in pool.models.items():
        events += [name, name]
        events += [f"{name}-"] if model.waiting else []
        events += [f"{name}x"] if model.state in ("loading", "ready") else []
        events += [f"{name}z", f"{name}s"] if model.state == "ready" else []
        events += [f"{name}f"] if model.state == "loading" else []
        events += [f"{name}r"] if model.state == "failed" else []
    return events + _progress(pool)


def _progress(pool: Simulation) -> list[str]:
    events = []
    for name, model in pool.models.items():
        events += [f"{name}."] * model.open
        events += [f"{name}!"] if model.state == "loading" else []
        events += [f"{name}~"] if model.state == "leaving" else []
    return events


def _checked(pool: Simulation, event: str) -> None:
    """Play one event. Victims have to be idle and not pinned, and a start has to find room, or be alone."""
    name, what = event[0], event[1:]
    if what == "." and not pool.models[name].open:
        return  # ended by an earlier event of the same round
    if (what == "!" and pool.models[name].state != "loading") or (what == "~" and pool.models[name].state != "leaving"):
        return
    before = len(pool.log)
    pool.play(event)
    for line in pool.log[before:]:
        verb, _, subject = line.partition(" ")
        if verb == "sleep":
            assert pool.models[subject].open == 0 and not pool.models[subject].pin, line
    held = [m.holds for m in pool.models.values() if m.holds]
    assert sum(held) <= pool.budget or len(held) == 1, pool.log


def _idle(name: str, needs: int, load_s: float | None = None, domain: str = "host") -> Resident:
    return Resident(name, {domain: needs}, idle_s=9.0, load_s=load_s)


def test_a_victim_has_to_hold_the_domain_that_lacks() -> None:
    on_gpu, on_host = _idle("gpu", 5, 60, "GPU-1"), _idle("host", 5, 1)
    assert cheapest([on_gpu, on_host], {"GPU-1": 3}) == ("gpu",)
    assert cheapest([on_host], {"GPU-1": 3}) is None


def test_more_models_than_can_be_tried_in_all_combinations() -> None:
    many = [_idle(f"m{n:02}", 1, load_s=100 - n) for n in range(40)]
    assert cheapest(many, {"host": 3}) == ("m39", "m38", "m37")
    assert cheapest(many, {"host": 41}) is None


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 99)), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_no_victim_is_taken_that_is_not_needed(models: list[tuple[int, float]], lack: int) -> None:
    idle = [_idle(f"m{n}", needs, load_s) for n, (needs, load_s) in enumerate(models)]
    taken = cheapest(idle, {"host": lack})
    if taken is None:
        assert sum(needs for needs, _ in models) < lack
        return
    freed = {each.id: each.needs["host"] for each in idle if each.id in taken}
    assert sum(freed.values()) >= lack
    assert all(sum(freed.values()) - bytes_ < lack for bytes_ in freed.values())


def test_a_domain_that_cannot_be_measured_is_not_held_against_a_model() -> None:
    arrival = Arrival("a", {"host": 1, "GPU-unknown": 99})
    assert decide([_idle("b", 1)], [arrival], {"host": 5}, {"host": 6}, PoolPolicy()).start == "a"


def test_a_model_that_comes_back_takes_free_memory_only() -> None:
    small, free = Arrival("small", {"host": 4}), {"host": 3}
    big = Resident("big", {"host": 8}, idle_s=60.0)
    assert decide([big], [small], {"host": 4}, {"host": 12}, evict=False).start == "small"
    assert decide([], [small], free, free, evict=False).start == "small"
    being_freed = decide([big], [small], free, {"host": 11}, since_freed_s=0.1, evict=False)
    assert being_freed.again_s is not None
    none = decide([big], [small], free, {"host": 11}, evict=False)
    assert (none.start, none.sleep, none.again_s) == (None, (), None)
    assert decide([big], [small], free, {"host": 11}).sleep == ("big",)


def test_a_refusal_states_the_domains_that_are_too_small() -> None:
    pinned = Resident("a", {"host": GIB, "gpu0": 3 * GIB}, pin=True)
    refused = decide(
        [pinned], [Arrival("b", {"host": GIB, "gpu0": 2 * GIB})], {"gpu0": 0}, {"host": 8 * GIB, "gpu0": 4 * GIB}
    )
    assert refused.refuse == "b"
    assert refused.because == (
        "it does not fit beside a, which is pinned: 2.0 GiB of gpu0 memory are needed and 1.0 GiB free"
    )
