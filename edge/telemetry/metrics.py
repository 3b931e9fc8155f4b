"""Export temperature, power and energy to Prometheus, in its base units. Families are built at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from edge.telemetry.governor import Level
from edge.telemetry.sample import Sample
from edge.telemetry.telemetry import Telemetry


class TelemetryCollector:
    """A collector over one Telemetry."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def describe(self) -> list[Any]:
        # A registry with auto_describe would call collect() instead, for the names alone.
        """Return nothing, which spares a collection at registration."""
        return []

    def collect(self) -> Iterator[Any]:
        yield from self._energy()
        yield from self._governor()
        yield from self._ages()
        sample = self._telemetry.latest
        if sample is not None:
            yield from _power(sample)
            yield from _heat(sample)
            yield from _gpus(sample)
            yield from _host(sample)

    def _energy(self) -> Iterator[Any]:
        meter = self._telemetry.energy
        # Without any measured time joules are unknown: a family without a sample, not one of 0.
        measured = bool(meter.measured_s)
        total, idle = ([((), value)] if measured else [] for value in (meter.total_joules, meter.idle_joules))
        yield _counter("energy_joules", "Joules of the total, since start.", total)
        yield _counter("energy_idle_joules", "Joules while no request was open.", idle)
        if meter.idle_w is not None:
            yield _gauge("power_idle_watts", "Mean power while no request was open.", [((), meter.idle_w)])
        models = list(meter.by_model.items())
        text = "Estimated joules of a model, while it had requests."
        joules = [((name,), use.joules) for name, use in models] if measured else []
        yield _counter("model_energy_joules", text, joules, "model")
        rates = [((name,), meter.tokens_per_joule(name)) for name, _ in models]
        # Not left to a query over two counters: only requests whose energy was measured count in both.
        yield _gauge("tokens_per_joule", "Generated tokens per joule, by model.", rates, "model")

    def _governor(self) -> Iterator[Any]:
        level = self._telemetry.decision.level
        rows = [((each.name,), 1.0 if each is level else 0.0) for each in Level]
        yield _gauge("thermal_level", "1 for the present level.", rows, "level")
        limit = self._telemetry.decision.limit
        yield _gauge("admission_limit_ratio", "Share of the slots that may be busy.", [((), limit.fraction)])

    def _ages(self) -> Iterator[Any]:
        sampler = self._telemetry.sampler
        now = sampler.clock()
        ages = [((part.name,), part.latest.age_s(now)) for part in sampler.parts if part.latest is not None]
        yield _gauge("telemetry_age_seconds", "Age of a source's last sample.", ages, "source")
        up = [((part.name,), 1.0 if part.fresh(now) else 0.0) for part in sampler.parts]
        yield _gauge("telemetry_up", "1 while the source has a fresh sample.", up, "source")


Rows = Iterable[tuple[tuple[str, ...], float | int | None]]


def _power(sample: Sample) -> Iterator[Any]:
    power = sample.power
    total = [] if power is None else [((power.rail,), power.power_w)]
    yield _gauge("power_watts", "Total power; the label names the rail, or the sum.", total, "rail")
    yield _gauge("rail_power_watts", "Power of each rail.", [((r.name,), r.power_w) for r in sample.rails], "rail")
    events = [((line,), count) for line, count in sample.overcurrent.items()]
    yield _counter("overcurrent_events", "Over-current events, since start.", events, "line")
    yield _gauge("supply_alarm", "1 for each trouble of the supply.", [((s,), 1) for s in sample.supply], "alarm")
    yield _gauge("throttled", "1 for each reason to lower clocks.", [((r,), 1) for r in sample.throttled], "reason")


def _heat(sample: Sample) -> Iterator[Any]:
    for name, text, get in (
        ("temperature_celsius", "Temperature of a zone.", "temp_c"),
        ("temperature_passive_celsius", "Trip point at which the kernel throttles.", "passive_c"),
        ("temperature_critical_celsius", "Trip point at which the board shuts down.", "critical_c"),
    ):
        yield _gauge(name, text, [((zone.name,), getattr(zone, get)) for zone in sample.zones], "zone")
    fan = sample.fan
    if fan is not None:
        yield _gauge("fan_speed_ratio", "Share of full speed.", [((), fan.speed_ratio)])
        yield _gauge("fan_revolutions_per_minute", "Measured speed.", [((), fan.rpm)])


def _gpus(sample: Sample) -> Iterator[Any]:
    for name, text, get in (
        ("gpu_load_ratio", "Load of a GPU.", "load_ratio"),
        ("gpu_clock_hertz", "Clock of a GPU.", "clock_hz"),
        ("gpu_power_watts", "Power of a GPU board.", "power_w"),
        ("gpu_memory_used_bytes", "Used memory of a discrete GPU.", "memory_used_bytes"),
        ("gpu_memory_total_bytes", "Memory of a discrete GPU.", "memory_total_bytes"),
    ):
        yield _gauge(name, text, [((gpu.uuid or gpu.name,), getattr(gpu, get)) for gpu in sample.gpus], "gpu")


def _host(sample: Sample) -> Iterator[Any]:
    memory = sample.memory
    if memory is not None:
        yield _gauge("memory_total_bytes", "MemTotal.", [((), memory.total_bytes)])
        yield _gauge("memory_available_bytes", "MemAvailable.", [((), memory.available_bytes)])
        yield _gauge("swap_used_bytes", "Swap in use.", [((), memory.swap_used_bytes)])
    for name, text, value in (
        ("memory_gpu_used_bytes", "Memory that the integrated GPU holds.", sample.gpu_used_bytes),
        ("cpu_load_ratio", "Load of all cores.", sample.cpu_load_ratio),
        ("memory_controller_load_ratio", "Load of the memory controller (EMC).", sample.emc_load_ratio),
        ("disk_free_bytes", "Free space of the models' disk.", sample.disk_free_bytes),
    ):
        if value is not None:
            yield _gauge(name, text, [((), value)])


def _gauge(name: str, text: str, rows: Rows, *labels: str) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(f"edgellm_{name}", text, labels=labels), rows)


def _counter(name: str, text: str, rows: Rows, *labels: str) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(f"edgellm_{name}", text, labels=labels), rows)


def _filled(family: Any, rows: Rows) -> Any:
    for values, value in dict(rows).items():  # two chips with one label would be one series twice
        if value is not None:
            family.add_metric(list(values), value)
    return family
