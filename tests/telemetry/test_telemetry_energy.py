"""Joules: the trapezoid, gaps, sharing, and what each model used."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.telemetry.energy import GAP_S, KEEP_POINTS, EnergyMeter, MeteredRequest, ModelEnergy


def fed(watts: list[float], step_s: float = 1.0, meter: EnergyMeter | None = None) -> EnergyMeter:
    meter = meter or EnergyMeter()
    for number, power in enumerate(watts):
        meter.add(number * step_s, power)
    return meter


def test_a_ramp_is_integrated_exactly() -> None:
    meter = fed([0.0, 10.0, 20.0, 30.0])
    assert meter.total_joules == 45.0
    assert meter.request(0.0, 3.0, 9) == pytest.approx(45.0)


def test_ends_between_samples_are_interpolated() -> None:
    assert fed([0.0, 10.0, 20.0, 30.0, 40.0]).request(0.5, 3.5, 1) == pytest.approx(60.0)


def test_timestamps_are_real_not_assumed() -> None:
    meter = EnergyMeter()
    for at, power in [(0.0, 10.0), (0.5, 10.0), (3.5, 10.0), (3.6, 10.0)]:
        meter.add(at, power)
    assert meter.request(0.0, 3.6, 1) == pytest.approx(36.0)


@pytest.mark.parametrize("end_s", [0.4, 1.0, 1.9])
def test_fewer_than_three_samples_is_null(end_s: float) -> None:
    assert fed([10.0] * 10).request(0.1, end_s, 5) is None


def test_the_tail_after_the_last_sample_is_held_for_a_moment_only() -> None:
    assert fed([10.0] * 4).request(0.0, 3.8, 5) == pytest.approx(38.0)
    assert fed([10.0] * 4).request(0.0, 3.0 + GAP_S + 1, 5) is None


def test_power_from_jtop_alone_is_no_gap() -> None:
    """Every five seconds and a little, one of them late: measured, not unknown."""
    meter = EnergyMeter()
    for at_s in (0.0, 5.02, 10.04, 15.06, 25.1):
        meter.add(at_s, 10.0)
    assert (meter.total_joules, meter.gap_s) == (pytest.approx(251.0), 0.0)
    assert meter.request(0.0, 20.0, 5) == pytest.approx(200.0)


def test_fc44_readings_that_stop_for_30_s_are_a_gap_not_a_guess() -> None:
    """FC-44: the request's figure is null, the total leaves the gap out and says how long it was."""
    meter = EnergyMeter()
    for at in [0.0, 1.0, 2.0, 32.0, 33.0]:
        meter.add(at, 20.0)
    assert meter.request(0.0, 33.0, 100) is None
    assert (meter.total_joules, meter.gap_s) == (60.0, 30.0)


def test_overlapping_requests_share_by_generated_tokens() -> None:
    meter = EnergyMeter()
    first, second = meter.begin(0.0, "chat"), meter.begin(0.0, "chat")
    first.tokens, second.tokens = 300, 100
    fed([40.0] * 11, meter=meter)
    assert meter.request(0.0, 10.0, 300, first) == pytest.approx(300.0)
    assert meter.request(0.0, 10.0, 100, second) == pytest.approx(100.0)


def test_an_open_request_without_tokens_counts_like_me() -> None:
    meter = EnergyMeter()
    mine, _other = meter.begin(0.0), meter.begin(5.0)
    fed([10.0] * 11, meter=meter)
    assert meter.request(0.0, 10.0, 50, mine) == pytest.approx(50.0 + 25.0)


def test_energy_goes_to_models_and_idling_and_hours() -> None:
    meter = EnergyMeter()
    for at in range(5):
        meter.add(float(at), 8.0, unix_s=7195.0 + at)
    work = meter.begin(4.0, "chat")
    for at in range(5, 9):
        meter.add(float(at), 20.0, unix_s=7195.0 + at)
    meter.request(4.0, 8.0, 40, work)
    assert meter.idle_w == 8.0
    assert meter.by_model["chat"] == ModelEnergy(joules=pytest.approx(74.0), tokens=40, requests=1)  # type: ignore[arg-type]
    assert meter.tokens_per_joule("chat") == pytest.approx(40 / 74)
    assert sum(meter.by_hour.values()) == pytest.approx(meter.total_joules)
    assert set(meter.by_hour) == {1, 2}


def test_tokens_of_unmeasured_time_leave_the_ratio() -> None:
    """65 s without a readable rail in a request of 100 s: both sides of the ratio lose them."""
    meter = EnergyMeter()
    work = meter.begin(0.0, "chat", lambda: round(4 * meter._points[-1].at_s))
    for at in [*range(20), *range(85, 101)]:
        meter.add(float(at), 10.0)
    assert meter.tokens_per_joule("chat") == pytest.approx(0.4, rel=0.01)
    assert meter.request(0.0, 100.0, 400, work) is None
    assert meter.tokens_per_joule("chat") == pytest.approx(0.4, rel=0.01)
    for at in range(101, 2000):
        meter.add(float(at), 10.0)
    assert meter._work == [], "counted when it was forgotten"
    assert meter.tokens_per_joule("chat") == pytest.approx(0.4, rel=0.01)


@pytest.mark.parametrize("length_s", [0.3, 1.0])
def test_short_requests_do_not_flatter(length_s: float) -> None:
    """8 W idle, 26 W with a request, one sample a second: null, or true within its error."""
    for step_s in (1.0, 0.1):
        meter, tokens, joules = EnergyMeter(), 0, 0.0
        events = [(n * step_s, 0, 0.0) for n in range(round(600 / step_s))]
        starts = [n * 4.07 for n in range(1, 140)]
        events += [(start, 1, start) for start in starts] + [(start + length_s, 2, start) for start in starts]
        work = None
        for at_s, kind, start_s in sorted(events):
            if kind == 1:
                work = meter.begin(start_s, "chat")
            elif kind == 2:
                assert work is not None
                meter.request(start_s, at_s, 10, work)
                tokens, joules, work = tokens + 10, joules + 26.0 * length_s, None
            else:
                meter.add(at_s, 8.0 if work is None else 26.0)
        found, error = meter.tokens_per_joule("chat"), meter.error_ratio("chat")
        if found is None:
            assert step_s == 1.0 and error is None
        else:
            assert error is not None
            assert abs(1 / found - joules / tokens) <= error / found + 1e-9


def test_a_request_longer_than_the_kept_samples_still_has_its_joules() -> None:
    meter = EnergyMeter()
    work = meter.begin(0.0, "chat")
    for number in range(KEEP_POINTS + 500):
        meter.add(number / 10, 20.0)
    end_s = (KEEP_POINTS + 499) / 10
    assert meter.request(0.0, end_s, 100, work) == pytest.approx(20.0 * end_s)


def test_short_requests_count_for_their_model_though_their_own_figure_is_null() -> None:
    meter = EnergyMeter()
    meter.add(0.0, 10.0)
    work = meter.begin(0.2, "chat")
    assert meter.request(0.2, 0.7, 5, work) is None
    meter.add(1.0, 10.0)
    assert meter.by_model["chat"].joules == pytest.approx(5.0)
    assert meter.idle_joules == pytest.approx(5.0)


def test_a_cancelled_request_shares_until_it_left() -> None:
    meter = EnergyMeter()
    mine, gone = meter.begin(0.0), meter.begin(0.0)
    meter.cancel(gone, 5.0)
    fed([10.0] * 11, meter=meter)
    assert meter.request(0.0, 10.0, 50, mine) == pytest.approx(25.0 + 50.0)
    assert meter.open() == 0


def test_samples_that_go_back_in_time_are_ignored() -> None:
    meter = fed([10.0, 10.0])
    meter.add(0.5, 1000.0)
    assert meter.total_joules == 10.0


def test_memory_is_bounded_over_days_and_many_requests() -> None:
    meter = EnergyMeter()
    for at in range(2 * KEEP_POINTS):
        work = meter.begin(at + 0.1, "chat")
        meter.add(float(at), 10.0, unix_s=3600.0 * at)
        meter.request(at + 0.1, at + 0.2, 1, work)
    assert len(meter._points) < 1000
    assert len(meter._work) < 10
    assert len(meter.by_hour) == 48


spans = st.lists(st.tuples(st.floats(0, 19), st.floats(0.5, 20), st.integers(1, 500)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(spans, st.lists(st.floats(0, 60), min_size=41, max_size=41))
def test_models_and_idling_add_up_to_the_total(requests: list[tuple[float, float, int]], watts: list[float]) -> None:
    """No joule is lost or invented, however requests overlap."""
    meter = EnergyMeter()
    works = []
    for number, (start, length, tokens) in enumerate(requests):
        work = meter.begin(start, f"model-{number % 2}")
        work.tokens, work.end_s = tokens, start + length
        works.append((work, start, start + length, tokens))
    fed(watts, meter=meter)
    used = sum(use.joules for use in meter.by_model.values())
    assert used + meter.idle_joules == pytest.approx(meter.total_joules, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(spans, st.floats(1, 60))
def test_shares_of_requests_add_up_to_what_was_drawn_while_any_ran(
    requests: list[tuple[float, float, int]], watts: float
) -> None:
    """Events in their order, ten samples a second, tokens that flow evenly."""
    meter = EnergyMeter()
    open_work: dict[int, MeteredRequest] = {}
    events = [(start, 1, n) for n, (start, _, _) in enumerate(requests)]
    events += [(start + length, 2, n) for n, (start, length, _) in enumerate(requests)]
    events += [(at / 10, 0, -1) for at in range(410)]
    drawn = 0.0
    for now, kind, number in sorted(events):
        if kind == 0:
            meter.add(now, watts)
        elif kind == 1:
            open_work[number] = meter.begin(now)
        else:
            for other, work in open_work.items():
                start, length, tokens = requests[other]
                work.tokens = tokens * (now - start) / length  # type: ignore[assignment]
            start, _, tokens = requests[number]
            part = meter.request(start, now, tokens, open_work.pop(number))
            assert part is not None
            drawn += part
    edges = sorted({edge for start, length, _ in requests for edge in (start, start + length)})
    busy = sum(b - a for a, b in pairwise(edges) if any(s <= a and b <= s + length for s, length, _ in requests))
    assert drawn == pytest.approx(busy * watts)
