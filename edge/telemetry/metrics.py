"""Heat, power and energy for /metrics, in Prometheus' base units. Families are made anew for each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from edge.telemetry.governor import Level
from edge.telemetry.sample import Sample
from edge.telemetry.telemetry import Telemetry


class Registry(Protocol):
    """The gateway's registry."""

    def add(self, collector: TelemetryCollector) -> None: ...


def register(registry: Registry, telemetry: Telemetry) -> None:
    registry.add(TelemetryCollector(telemetry))


class TelemetryCollector:
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def describe(self) -> list[Any]:
        """Spares a collection at registration."""
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
        yield _counter("energy_joules", "Of the rail that counts, since start.", [((), meter.total_joules)])
        yield _counter("energy_idle_joules", "While no request was open.", [((), meter.idle_joules)])
        if meter.idle_w is not None:
            yield _gauge("power_idle_watts", "Mean while no request was open.", [((), meter.idle_w)])
        models = list(meter.by_model.items())
        text = "Estimated share of a model in the time when it had requests."
        yield _counter("model_energy_joules", text, [((name,), use.joules) for name, use in models], "model")
        rates = [((name,), meter.tokens_per_joule(name)) for name, _ in models]
        yield _gauge("tokens_per_joule", "Generated tokens by model.", rates, "model")

    def _governor(self) -> Iterator[Any]:
        level = self._telemetry.decision.level
        rows = [((each.name,), 1.0 if each is level else 0.0) for each in Level]
        yield _gauge("thermal_level", "1: the board is at this level.", rows, "level")
        limit = self._telemetry.decision.limit
        yield _gauge("admission_limit_ratio", "Part of the slots that may be busy.", [((), limit.fraction)])

    def _ages(self) -> Iterator[Any]:
        sampler = self._telemetry.sampler
        now = sampler.clock()
        ages = [((part.name,), part.latest.age_s(now)) for part in sampler.parts if part.latest is not None]
        yield _gauge("telemetry_age_seconds", "Of a source's last sample.", ages, "source")
        up = [((part.name,), 1.0 if part.fresh(now) else 0.0) for part in sampler.parts]
        yield _gauge("telemetry_up", "1: the source has a fresh sample.", up, "source")


Rows = Iterable[tuple[tuple[str, ...], float | int | None]]


def _power(sample: Sample) -> Iterator[Any]:
    power = sample.power
    total = [] if power is None else [((power.rail,), power.power_w)]
    yield _gauge("power_watts", "Of the rail that counts.", total, "rail")
    yield _gauge("rail_power_watts", "Of each rail.", [((r.name,), r.power_w) for r in sample.rails], "rail")
    events = [((line,), count) for line, count in sample.overcurrent.items()]
    yield _counter("overcurrent_events", "Since start.", events, "line")
    yield _gauge(
        "throttled", "1: the board slows itself down for this.", [((r,), 1) for r in sample.throttled], "reason"
    )


def _heat(sample: Sample) -> Iterator[Any]:
    for name, text, get in (
        ("temperature_celsius", "Now.", "temp_c"),
        ("temperature_passive_celsius", "Where the zone throttles by software.", "passive_c"),
        ("temperature_critical_celsius", "Where the zone shuts the board down.", "critical_c"),
    ):
        yield _gauge(name, text, [((zone.name,), getattr(zone, get)) for zone in sample.zones], "zone")
    fan = sample.fan
    if fan is not None:
        yield _gauge("fan_speed_ratio", "Of its full speed.", [((), fan.speed_ratio)])
        yield _gauge("fan_revolutions_per_minute", "Measured.", [((), fan.rpm)])


def _gpus(sample: Sample) -> Iterator[Any]:
    for name, text, get in (
        ("gpu_load_ratio", "Busy.", "load_ratio"),
        ("gpu_clock_hertz", "Now.", "clock_hz"),
        ("gpu_power_watts", "Of the GPU board.", "power_w"),
        ("gpu_memory_used_bytes", "Of the GPU's own memory.", "memory_used_bytes"),
        ("gpu_memory_total_bytes", "The GPU's own memory.", "memory_total_bytes"),
    ):
        yield _gauge(name, text, [((gpu.uuid or gpu.name,), getattr(gpu, get)) for gpu in sample.gpus], "gpu")


def _host(sample: Sample) -> Iterator[Any]:
    memory = sample.memory
    if memory is not None:
        yield _gauge("memory_total_bytes", "MemTotal.", [((), memory.total_bytes)])
        yield _gauge("memory_available_bytes", "MemAvailable.", [((), memory.available_bytes)])
        yield _gauge("swap_used_bytes", "Swap in use.", [((), memory.swap_used_bytes)])
    for name, text, value in (
        ("memory_gpu_used_bytes", "What the integrated GPU holds of it.", sample.gpu_used_bytes),
        ("cpu_load_ratio", "All cores.", sample.cpu_load_ratio),
        ("memory_controller_load_ratio", "EMC.", sample.emc_load_ratio),
        ("disk_free_bytes", "Where the models are.", sample.disk_free_bytes),
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
    for values, value in rows:
        if value is not None:
            family.add_metric(list(values), value)
    return family
