"""The power limit against a simulated board: its mean holds, levels rest, and no more is lost than the limit asks."""

from __future__ import annotations

import pytest

from edge.config.values import ThermalConfig
from edge.telemetry.governor import Level
from edge.telemetry.power_limit import PowerLimit
from tests.telemetry.plant import Plant, Result, best_speed, simulate


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("limit_w", [12.0, 20.0, 30.0, 40.0])
@pytest.mark.parametrize("tau_s", [10.0, 60.0, 300.0])
def test_the_mean_holds_for_every_board_and_request(slots: int, limit_w: float, tau_s: float) -> None:
    for work_s in ((0.5, 3.0), (60.0, 200.0)):
        plant = Plant(slots, power_tau_s=tau_s, work_s=work_s)
        result = simulate(plant, ThermalConfig(max_watts=limit_w), hours=2)
        assert result.mean_w <= 1.02 * limit_w, (work_s, result)
        assert result.changes_per_hour <= 20, (work_s, result)
        assert result.speed >= 0.85 * best_speed(plant, limit_w), (work_s, result)


def test_one_slot_is_held_by_pauses_and_the_reason_is_given() -> None:
    """26.5 W with one slot at a limit of 20 W: fewer slots than one cannot be had, pauses can."""
    result = simulate(Plant(1), ThermalConfig(max_watts=20.0), hours=1)
    assert result.mean_w <= 20.4 and result.level is Level.HOT
    assert result.because.startswith("one request draws 2") and result.because.endswith("pauses between requests")


def test_a_board_that_exceeds_the_limit_without_requests_is_not_paused_but_reported() -> None:
    result = simulate(Plant(2, idle_w=23.0), ThermalConfig(max_watts=20.0), hours=1)
    assert result.speed > 0.5, "pauses would not help"
    assert result.warning is not None
    assert result.warning.startswith("max_watts = 20 cannot be held: the board draws 23")


def test_a_limit_that_is_never_reached_costs_nothing() -> None:
    result = simulate(Plant(4), ThermalConfig(max_watts=60.0), hours=1)
    assert result.changes_per_hour == 0 and result.level is Level.NOMINAL
    assert result.speed >= 0.97 * Plant(4).speed(4)


def test_a_gap_of_samples_is_neither_spent_nor_saved() -> None:
    control = PowerLimit(20.0)
    for now in range(60):
        control.step(45.0, 1, 1, float(now))
    before = control._budget_j
    control.step(45.0, 1, 1, 3600.0)
    assert control._budget_j == before


@pytest.mark.parametrize("tau_s", [10.0, 60.0, 300.0])
def test_the_thermal_governor_keeps_the_board_below_its_critical_trip(tau_s: float) -> None:
    """A board whose full load would settle at 117 °C, and whose heat sink has any time constant."""
    plant = Plant(4, thermal_tau_s=tau_s, kelvin_per_w=2.1, ambient_c=25.0)
    result = simulate(plant, ThermalConfig(act=True), hours=1, passive_c=99.0, critical_c=104.5)
    assert result.hottest_c < 104.5
    assert result.changes_per_hour <= 20
    assert isinstance(result, Result) and result.speed > 0.5
