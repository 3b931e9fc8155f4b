"""When a new engine gives way to the former one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.engine.choose import EngineStart, fallback, rules, starts_from_records
from edge.resources import data_dir, load_toml

TABLE = load_toml(data_dir("build") / "llama-server.toml")
RULES = rules(TABLE)
GOOD = EngineStart("old", ready=True)
DEAD = EngineStart("new", ready=False)


def _fallback(*starts: EngineStart, previous: str | None = "old"):  # type: ignore[no-untyped-def]
    return fallback("new", previous, starts, RULES)


def test_three_starts_without_ready() -> None:
    assert _fallback(GOOD, DEAD, DEAD) is None
    found = _fallback(GOOD, DEAD, DEAD, DEAD)
    assert found is not None
    assert (found.engine, found.instead_of) == ("old", "new")
    assert "3 starts" in found.because


def test_once_when_it_failed_for_good_by_its_own_fault() -> None:
    found = _fallback(GOOD, EngineStart("new", False, "wrong_architecture"))
    assert found is not None and "wrong_architecture" in found.because


def test_a_bad_model_or_too_little_memory_is_no_reason() -> None:
    assert _fallback(GOOD, *[EngineStart("new", False, "bad_model")] * 9) is None
    assert _fallback(GOOD, *[EngineStart("new", False, "out_of_memory")] * 9) is None
    assert _fallback(GOOD, *[EngineStart("new", False, "nvmap_refused")] * 9) is None


def test_a_crash_counts_as_one_start() -> None:
    crash = EngineStart("new", False, "gpu_fault")
    assert _fallback(GOOD, crash, crash) is None
    assert _fallback(GOOD, crash, crash, crash) is not None


def test_every_memory_signature_is_innocent_and_every_rule_is_a_kind() -> None:
    kinds = {signature["kind"] for signature in TABLE["signatures"]}
    assert {signature["kind"] for signature in TABLE["signatures"] if signature["oom"]} <= RULES.innocent
    assert not RULES.at_once & RULES.innocent
    assert RULES.at_once - kinds <= {"engine_broken"} and set(TABLE["rollback"]["innocent"]) <= kinds


def test_an_engine_that_was_ready_once_stays() -> None:
    assert _fallback(GOOD, EngineStart("new", True), DEAD, DEAD, DEAD, EngineStart("new", False, "gpu_fault")) is None


def test_nothing_to_go_back_to() -> None:
    assert _fallback(DEAD, DEAD, DEAD, previous=None) is None
    assert _fallback(DEAD, DEAD, DEAD, EngineStart("old", False)) is None, "the former one never was ready"
    assert _fallback(GOOD, DEAD, DEAD, DEAD, previous="new") is None


_STARTS = st.builds(
    EngineStart,
    st.sampled_from(["old", "new", "other"]),
    st.booleans(),
    st.none() | st.sampled_from(sorted(RULES.at_once | RULES.innocent | {"gpu_fault"})),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(_STARTS))
def test_it_never_goes_back_from_an_engine_that_worked_nor_to_one_that_did_not(starts: list[EngineStart]) -> None:
    found = fallback("new", "old", starts, RULES)
    if found is not None:
        assert not any(start.ready for start in starts if start.engine == "new")
        assert any(start.ready for start in starts if start.engine == "old")


def test_records_are_read_as_the_supervisor_writes_them() -> None:
    records = [
        {"engine": "old", "ready_s": 3.2, "outcome": "ready"},
        {"engine": "new", "ready_s": None, "outcome": "failed: out_of_memory"},
        {"engine": "new", "outcome": "failed: bad_flag"},
        {"engine": "new", "outcome": "stopped"},
        {"nonsense": 1},
        {"engine": 3, "outcome": "ready"},
    ]
    assert starts_from_records(records) == [
        EngineStart("old", True),
        EngineStart("new", False, "out_of_memory"),
        EngineStart("new", False, "bad_flag"),
        EngineStart("new", False),
    ]
