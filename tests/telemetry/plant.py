"""A board as a first-order plant: power follows the requests that run, temperature follows power."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from edge.config.values import ThermalConfig
from edge.telemetry.governor import Governor, Level
from edge.telemetry.sample import PowerState, Sample, Zone


@dataclass(slots=True)
class Plant:
    """A board with an engine of `slots`. Time constants in seconds; `work` is a request's length alone on the board."""

    slots: int
    idle_w: float = 8.0
    request_w: float = 18.5  # the first request; each further one adds `more_w`
    more_w: float = 6.0
    power_tau_s: float = 10.0
    thermal_tau_s: float = 120.0
    kelvin_per_w: float = 1.6
    ambient_c: float = 25.0
    work_s: tuple[float, float] = (5.0, 30.0)
    noise_w: float = 0.3
    seed: int = 1
    power_w: float = field(init=False)
    temp_c: float = field(init=False)
    done: float = 0.0  # work finished, in seconds alone on the board
    running: list[float] = field(default_factory=list)
    open: int = 0  # requests that ran during the last step
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self.power_w = self.idle_w
        self.temp_c = self.ambient_c + self.idle_w * self.kelvin_per_w

    def target_w(self, running: int) -> float:
        """Power that the board settles at with so many requests."""
        return self.idle_w + (self.request_w + self.more_w * (running - 1) if running else 0.0)

    def speed(self, running: int) -> float:
        """Work per second of all requests together: batching gains, less with each request."""
        return sum(0.75**n for n in range(running))

    def step(self, allowed: int, dt: float, demand: Callable[[], bool] = lambda: True) -> None:
        """Advance by `dt`: admit up to `allowed` requests, let all work, follow power and heat."""
        while len(self.running) < min(allowed, self.slots) and demand():
            self.running.append(self._random.uniform(*self.work_s))
        count = self.open = len(self.running)
        if count:
            each = self.speed(count) * dt / count
            self.done += each * count
            self.running = [left - each for left in self.running if left > each]
        self.power_w += (self.target_w(count) - self.power_w) * min(1.0, dt / self.power_tau_s)
        settled_c = self.ambient_c + self.power_w * self.kelvin_per_w
        self.temp_c += (settled_c - self.temp_c) * min(1.0, dt / self.thermal_tau_s)

    def reading_w(self) -> float:
        """What the sensor reports: the power with noise."""
        return max(0.0, self.power_w + self._random.gauss(0.0, self.noise_w))


def best_speed(plant: Plant, limit_w: float) -> float:
    """Work per second that a mix of two numbers of requests reaches at a mean power of `limit_w`."""
    points = [(plant.target_w(n), plant.speed(n)) for n in range(plant.slots + 1)]
    if limit_w >= points[-1][0]:
        return points[-1][1]
    for (low_w, low), (high_w, high) in pairwise(points):
        if low_w <= limit_w <= high_w:
            return low + (high - low) * (limit_w - low_w) / (high_w - low_w)
    return 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation measured. `speed` is work per second."""

    mean_w: float
    speed: float
    changes_per_hour: float
    hottest_c: float
    level: Level
    because: str
    warning: str | None


def simulate(
    plant: Plant,
    limits: ThermalConfig,
    *,
    hours: float,
    passive_c: float | None = 199.0,
    critical_c: float | None = None,
    step_s: float = 0.5,
) -> Result:
    """Run the governor on the plant, with requests always waiting and a sample each second."""
    governor, allowed, energy_j, changes, hottest_c = Governor(limits), 1, 0.0, 0, 0.0
    steps = int(hours * 3600 / step_s)
    decision = governor.decide(None, 0.0, slots=plant.slots)
    for number in range(steps):
        plant.step(allowed, step_s)
        energy_j += plant.power_w * step_s
        hottest_c = max(hottest_c, plant.temp_c)
        if number % round(1 / step_s) == 0:
            now = number * step_s + 1.0
            zones = (Zone("tj", plant.temp_c, passive_c, critical_c),)
            sample = Sample(now, "plant", power=PowerState(plant.reading_w(), "VDD_IN"), zones=zones)
            decision = governor.decide(sample, now, active=plant.open, slots=plant.slots)
            changes += decision.changed
            limit = decision.limit
            allowed = 0 if limit.hold_new else max(1, int(plant.slots * limit.fraction))
            if limit.drain:
                plant.running.clear()
    return Result(
        energy_j / (steps * step_s),
        plant.done / (steps * step_s),
        changes / hours,
        hottest_c,
        decision.level,
        decision.because,
        decision.warning,
    )
