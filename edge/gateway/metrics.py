"""Serve /metrics: the gateway's counters and the supervisor's states in Prometheus' text format.

`Metrics.add` takes any collector of prometheus_client (an object with `collect()`); telemetry adds its own.
prometheus_client is imported by the first scrape: its import takes 74 ms of CPU, which must not delay the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from edge.gateway.access_log import AccessLog
from edge.gateway.accounting import Histogram, Stats
from edge.gateway.admission import Admission
from edge.gateway.waiting_room import WaitingQueue
from edge.supervisor.status import State
from edge.supervisor.upstream import Upstream

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Collector(Protocol):
    def collect(self) -> Iterable[Any]:
        """Yield metric families of prometheus_client."""
        ...


class Metrics:
    """The registry behind /metrics, made with the first scrape."""

    def __init__(self) -> None:
        self._collectors: list[Collector] = []
        self._registry: Any = None

    def add(self, collector: Collector) -> None:
        self._collectors.append(collector)
        if self._registry is not None:
            self._registry.register(collector)

    def exposition(self) -> bytes:
        from prometheus_client import generate_latest

        text: bytes = generate_latest(self._ready())
        return text

    def _ready(self) -> Any:
        if self._registry is None:
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry()
            for collector in self._collectors:
                self._registry.register(collector)
        return self._registry


class GatewayCollector:
    """Makes its families anew for each scrape, so that a value that is unknown now is absent, not stale."""

    def __init__(
        self,
        stats: Stats,
        upstreams: Mapping[str, Upstream],
        admission: Admission,
        waiting: WaitingQueue,
        access_log: AccessLog,
    ) -> None:
        self._stats = stats
        self._upstreams = upstreams
        self._admission = admission
        self._waiting = waiting
        self._access_log = access_log

    # prometheus_client calls it at registration, before there is anything to collect.
    def describe(self) -> list[Any]:
        """Return nothing, so that registration does not collect."""
        return []

    def collect(self) -> Iterator[Any]:
        yield from self._requests()
        yield from self._per_model()
        yield from self._states()
        yield from self._gates()

    def _requests(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        family = CounterMetricFamily("edgellm_requests", "Answered requests.", labels=["route", "code", "model"])
        for (route, code, model), count in self._stats.requests.items():
            family.add_metric([route, code, model], count)
        yield family
        lost = CounterMetricFamily("edgellm_access_log_dropped", "Lines that the disk did not take in time.")
        lost.add_metric([], self._access_log.lines_lost)
        yield lost
        for name, text, get in (
            ("time_to_first_token", "From a request's arrival to the first chunk of its stream.", "first_token_s"),
            ("time_between_tokens", "Between two chunks of a stream.", "between_tokens_s"),
            ("request_duration", "From a request's arrival to the end of its answer.", "duration_s"),
        ):
            histograms = HistogramMetricFamily(f"edgellm_{name}_seconds", text, labels=["model"])
            for model, stats in self._stats.models.items():
                histogram: Histogram = getattr(stats, get)
                histograms.add_metric([model], histogram.buckets(), histogram.sum)
            yield histograms

    def _per_model(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        models = self._stats.models
        tokens = CounterMetricFamily("edgellm_tokens", "Tokens, as the engine counts them.", labels=["model", "kind"])
        for model, stats in models.items():
            tokens.add_metric([model, "prompt"], stats.prompt_tokens)
            tokens.add_metric([model, "completion"], stats.completion_tokens)
        yield tokens
        for name, text in (
            ("retries", "Requests sent once more because the engine died before it answered."),
            ("cut", "Answers that ended before their end."),
            ("errors", "Answers that report an error of the engine, or lack their end."),
            ("gone", "Clients that left before the end of their answer."),
        ):
            counter = CounterMetricFamily(f"edgellm_requests_{name}", text, labels=["model"])
            for model, stats in models.items():
                counter.add_metric([model], getattr(stats, name))
            yield counter
        speed = GaugeMetricFamily("edgellm_tokens_per_second", "Of the last answer.", labels=["model"])
        for model, stats in models.items():
            if stats.last_per_s is not None:
                speed.add_metric([model], stats.last_per_s)
        yield speed

    def _states(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, text: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"edgellm_{name}", text, labels=["model", *labels])

        flight, waiting = (
            gauge("requests_in_flight", "Sent to the engine."),
            gauge("requests_waiting", "For the model."),
        )
        queued, state = gauge("requests_queued", "Queued for a slot."), gauge("model_state", "1: it is this.", "state")
        rung, degraded = (
            gauge("model_rung", "0 is the plan as requested."),
            gauge("model_degraded", "Serves less than planned."),
        )
        progress = gauge("model_load_progress", "Of the weights, 0 to 1.")
        restarts = CounterMetricFamily("edgellm_upstream_restarts", "Of the engine.", labels=["model"])
        # A copy: a reload may change the mapping during a scrape.
        for upstream in list(self._upstreams.values()):
            model, status = upstream.model_id, upstream.status()
            flight.add_metric([model], self._stats.model(model).in_flight)
            waiting.add_metric([model], self._waiting.for_model.get(model, 0))
            queued.add_metric([model], self._admission.queued(model))
            for each in State:
                state.add_metric([model, each.value], 1.0 if status.state is each else 0.0)
            rung.add_metric([model], status.rung)
            degraded.add_metric([model], 1.0 if status.degraded else 0.0)
            restarts.add_metric([model], status.restarts)
            if status.progress is not None:
                progress.add_metric([model], status.progress)
        yield from (flight, waiting, queued, state, rung, degraded, progress, restarts)

    def _gates(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        opened = GaugeMetricFamily("edgellm_gate_open", "1: this step of the start is done.", labels=["model", "gate"])
        took = GaugeMetricFamily("edgellm_gate_seconds", "What the step took.", labels=["model", "gate"])
        for upstream in list(self._upstreams.values()):
            for name, gate in upstream.status().gates.items():
                opened.add_metric([upstream.model_id, name], 1.0 if gate.ready else 0.0)
                if gate.took_s is not None:
                    took.add_metric([upstream.model_id, name], gate.took_s)
        yield from (opened, took)
