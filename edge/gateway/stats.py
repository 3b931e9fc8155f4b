"""Keep the gateway's counters in plain Python: cheap to write, read by metrics.py on a scrape. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

FIRST_TOKEN_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
BETWEEN_TOKENS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)
DURATION_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


@dataclass(slots=True)
class Histogram:
    """`counts[i]` holds values ≤ bounds[i]; the last entry holds what is above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative buckets as prometheus_client takes them."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), total))
        return rows


@dataclass(slots=True)
class ModelStats:
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens_s: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))
    duration_s: Histogram = field(default_factory=lambda: Histogram(DURATION_S))
    in_flight: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_per_s: float | None = None
    retries: int = 0  # sent once more, because the engine died before it answered
    cut: int = 0  # answers that broke off
    errors: int = 0  # answers that report an error of the engine, or lack their end
    gone: int = 0  # clients that left before the end of their answer


@dataclass(slots=True)
class Stats:
    """All counters. `requests` by (route, code, model), with "" as the model of the gateway's own routes.

    Routes are a closed set of names, so that the number of series is bounded.
    """

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    models: dict[str, ModelStats] = field(default_factory=dict)

    def model(self, model: str) -> ModelStats:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelStats()
        return found
