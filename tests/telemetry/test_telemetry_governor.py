"""The governor: levels from the board's trip points, exactly once each way, whatever the noise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.config.values import ThermalConfig
from edge.telemetry.governor import AdmissionLimit, Decision, Governor, Level
from edge.telemetry.sample import PowerState, Sample, Zone

N, P, H, C = Level.NOMINAL, Level.PASSIVE, Level.HOT, Level.CRITICAL
ACT = ThermalConfig(act=True)


def hot(celsius: float | None, at: float = 0.0, watts: float | None = None) -> Sample:
    zones = (Zone("tj", celsius, 99.0, 104.5), Zone("tboard", 40.0), Zone("cv0", None, 99.0, 104.5))
    return Sample(at, "sysfs", power=None if watts is None else PowerState(watts, "VDD_IN"), zones=zones)


def drive(governor: Governor, series: list[float | None], step_s: float = 1.0, start_s: float = 0.0) -> list[Decision]:
    decisions = []
    for number, celsius in enumerate(series):
        now = start_s + number * step_s
        decisions.append(governor.decide(None if celsius is None else hot(celsius, now), now))
    return decisions


def changes(decisions: list[Decision]) -> list[Level]:
    return [decision.level for decision in decisions if decision.changed]


def ramp(start: float, end: float, step: float = 1.0) -> list[float | None]:
    count = int(abs(end - start) / step) + 1
    return [start + (step if end > start else -step) * n for n in range(count)]


def test_heating_from_50_to_104_and_back_visits_each_level_once_each_way() -> None:
    assert changes(drive(Governor(ACT), ramp(50, 104) + ramp(104, 50))) == [P, H, C, H, P, N]


@pytest.mark.parametrize(("celsius", "level"), [(88.9, N), (89.0, P), (94.9, P), (95.0, H), (102.4, H), (102.5, C)])
def test_levels_begin_at_the_margins_below_the_trip_points(celsius: float, level: Level) -> None:
    assert drive(Governor(ACT), [celsius] * 2)[-1].level is level


def test_what_each_level_asks_for() -> None:
    governor = Governor(ACT)
    limits = {
        level: drive(governor, [c] * 2, start_s=n * 100.0)[1].limit for n, (level, c) in enumerate(_by_level.items())
    }
    assert limits == {
        N: AdmissionLimit(),
        P: AdmissionLimit(0.5, cause="heat"),
        H: AdmissionLimit(0.5, hold_new=True, cause="heat"),
        C: AdmissionLimit(0.5, hold_new=True, drain=True, cause="heat"),
    }


_by_level = {N: 60.0, P: 91.0, H: 97.0, C: 103.5}


def test_a_stopped_engine_comes_back_when_cool_not_when_merely_hot() -> None:
    decisions = drive(Governor(ACT), [103.5] * 2 + [97.0] * 30 + [91.0] * 30)
    hot_again = [d for d in decisions if d.level is H]
    assert hot_again and all(d.limit.drain and d.limit.hold_new for d in hot_again)
    assert decisions[-1].level is P
    assert not decisions[-1].limit.drain


def test_by_default_it_observes_and_never_does_more_than_passive() -> None:
    decisions = drive(Governor(), ramp(50, 104))
    assert changes(decisions) == [P, H, C]
    assert {d.limit for d in decisions} == {AdmissionLimit(), AdmissionLimit(0.5, cause="heat")}


def test_noise_at_a_threshold_does_not_flap() -> None:
    series = [94.9, 95.1, 94.2, 95.0, 93.0, 95.2] * 50
    assert changes(drive(Governor(ACT), [*series])) == [P, H]


def test_dwell_keeps_a_level_though_it_cooled_at_once() -> None:
    decisions = drive(Governor(ACT), [97.0] * 2 + [60.0] * 25)[1:]
    assert [d.level for d in decisions[:11]] == [H] * 10 + [P]
    assert decisions[20].level is N


def test_fc44_a_series_with_a_hole_of_30_s_keeps_its_level() -> None:
    """FC-44: 70 → 85 → 97 °C, readings stop for 30 s, and come back at 97 °C."""
    series = ramp(70, 97) + [None] * 30 + [97.0] * 5
    assert changes(drive(Governor(ACT), series)) == [P, H]


def test_fc44_warns_before_the_throttle_point() -> None:
    """FC-44: PASSIVE comes ten degrees before the kernel throttles, with the reason in words."""
    decision = next(d for d in drive(Governor(), ramp(70, 99)) if d.changed)
    assert decision.because == "tj 89.0 °C, passive at 99.0 °C"


def test_no_data_stops_no_model() -> None:
    governor = Governor(ACT)
    governor.decide(hot(103.5), -1.0)
    assert governor.decide(hot(103.5), 0.0).limit.drain
    assert governor.decide(None, 59.0).limit.drain
    decision = governor.decide(None, 60.0)
    assert (decision.level, decision.limit) == (Level.UNKNOWN, AdmissionLimit())


def test_fc62_an_offline_sensor_raises_no_alarm_and_clears_none() -> None:
    """FC-62: an absent GPU temperature neither heats nor cools the board."""
    zones = (Zone("gpu", None, 99.0, 104.5), Zone("tj", 96.0, 99.0, 104.5))
    assert _confirmed(Governor(ACT), zones).level is H


def test_a_zone_with_only_a_critical_trip_gets_its_passive_from_it() -> None:
    zones = (Zone("tj", 105.0, None, 114.5),)
    assert _confirmed(Governor(ACT), zones).level is H


def _confirmed(governor: Governor, zones: tuple[Zone, ...]) -> Decision:
    """Return the decision after the same temperatures twice."""
    governor.decide(Sample(0.0, "sysfs", zones=zones), 0.0)
    return governor.decide(Sample(1.0, "sysfs", zones=zones), 1.0)


@pytest.mark.parametrize("glitch", [103.5, 112.0, 124.9])
def test_one_hot_sample_stops_nothing(glitch: float) -> None:
    """A glitch of a sensor's bus lasts one sample; the board that is really so hot still is in the next."""
    for series in ([60.0] * 5 + [glitch] + [60.0] * 30, [glitch] + [60.0] * 30):
        assert not any(d.limit.hold_new or d.limit.drain for d in drive(Governor(ACT), series))
    assert drive(Governor(ACT), [60.0] * 5 + [glitch] * 2)[-1].limit.drain


def test_trip_points_of_other_zones_limit_nothing() -> None:
    """The passive trip of a PC's ACPI zone (60 °C) is that of its case."""
    zones = (Zone("acpitz", 75.0, 60.0, 110.0, limits=False),)
    decision = _confirmed(Governor(ACT), zones)
    assert (decision.level, decision.limit) == (Level.UNKNOWN, AdmissionLimit())


def test_a_level_that_comes_and_goes_is_reported_a_few_times_an_hour() -> None:
    """A small heat sink cycles between two levels every half a minute: limits follow, the reported level rests."""
    series: list[float | None] = ([91.0] * 15 + [80.0] * 15) * 120
    decisions = drive(Governor(ACT), series)
    assert len(changes(decisions)) <= 20
    assert sum(d.limit == AdmissionLimit() for d in decisions) > 500


def test_sensors_without_trip_points_govern_nothing() -> None:
    decision = Governor(ACT).decide(Sample(0.0, "host", zones=(Zone("package", 101.0),)), 0.0)
    assert (decision.level, decision.because) == (Level.UNKNOWN, "no temperature with a trip point")


def test_throttling_and_overcurrent_are_apart_from_heat() -> None:
    sample = Sample(0.0, "sysfs", zones=hot(50.0).zones, throttled=("gpu-throttle-alert",), overcurrent={"oc3": 9000})
    assert Governor(ACT).decide(sample, 0.0).level is N


def test_max_watts_slows_down_step_by_step_and_never_stops_the_engine() -> None:
    governor = Governor(ThermalConfig(max_watts=30.0))
    busy = [
        governor.decide(hot(50.0, float(t), 45.0), float(t), active=4 if t < 60 else 1, slots=4) for t in range(120)
    ]
    assert changes(busy) == [P, H] or changes(busy) == [H]
    assert busy[-1].limit.hold_new and busy[-1].limit.cause == "power" and not busy[-1].limit.drain
    assert "limit 30 W" in busy[-1].because
    calm = [governor.decide(hot(50.0, float(t), 12.0), float(t), active=1, slots=4) for t in range(120, 600)]
    assert not calm[-1].limit.hold_new and changes(calm)[-1] is N


def test_a_short_peak_of_power_is_averaged_away() -> None:
    governor = Governor(ThermalConfig(act=True, max_watts=30.0))
    series = [20.0] * 20 + [60.0] * 2 + [20.0] * 20
    assert changes([governor.decide(hot(50.0, float(t), w), float(t)) for t, w in enumerate(series)]) == []


def test_a_limit_without_a_power_sensor_is_reported_as_not_held() -> None:
    decision = Governor(ThermalConfig(max_watts=20.0)).decide(hot(50.0), 0.0)
    assert decision.limit == AdmissionLimit()
    assert decision.warning == "max_watts = 20 cannot be held: no total power is measured"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-40, 130)), min_size=1, max_size=60), st.floats(0.2, 20), st.booleans())
def test_levels_fall_by_one_and_limits_follow_levels(series: list[float | None], step_s: float, act: bool) -> None:
    governor, before = Governor(ThermalConfig(act=act)), Level.UNKNOWN
    for decision in drive(governor, series, step_s):
        fell = before - decision.level
        assert fell <= 1 or decision.because.startswith("no temperature")
        assert decision.limit.hold_new <= act and decision.limit.drain <= decision.limit.hold_new
        assert not (decision.limit.drain and decision.level <= P)
        before = decision.level
