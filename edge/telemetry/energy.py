"""Integrate measured power to joules (trapezoid) and share them among requests and models.

Gaps are not bridged: where samples are more than `GAP_S` apart the energy is unknown. All instants are on one monotonic
clock, given by the caller.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from msgspec import Struct, field

from edge.telemetry.jtop_line import IDLE_INTERVAL_S

# jtop is the slowest source and may be the only one with power; one late sample of it is no gap.
GAP_S = 2 * IDLE_INTERVAL_S + 1.0
KEEP_S = 900.0  # at least this much history, and more while an older request is open
KEEP_POINTS = 7200  # 12 min at ten a second, 2 h at one: a longer request uses what was shared out while it ran
KEEP_WORK = 2000  # requests remembered for sharing with a long one that they overlap
FEWEST_SAMPLES = 3  # two only describe a line: a peak between them would be invisible
HOURS = 48  # two days, so that a day can be compared with the one before


# Of a model that goes to sleep. The engine's end and the clocks that follow it take some seconds; half a minute of
# samples at the slowest source's rate is a mean of three.
SLEEP_SETTLES_S = 10.0
SLEEP_MEAN_S = 30.0


class SleepPower(Struct, frozen=True):
    """Mean power of the board before a model went to sleep and while it slept; None where it was not measured."""

    before_w: float | None
    after_w: float | None = None


class Point(Struct, frozen=True):
    """One measurement of power."""

    at_s: float
    power_w: float


class MeteredRequest(Struct, eq=False):
    """One request. `tokens` is set at its end, `so_far` counts them before (0: unknown); `end_s` is None while open."""

    start_s: float
    model: str
    tokens: int = 0
    end_s: float | None = None
    so_far: Callable[[], int] | None = None
    joules: float = 0.0  # its share of the measured time
    measured_s: float = 0.0
    samples: int = 0  # inside it

    def count(self) -> int:
        return self.so_far() if self.end_s is None and self.so_far is not None else self.tokens

    def rate(self, now: float) -> float | None:
        """Return tokens per second so far; None while no token is known."""
        length = (now if self.end_s is None else self.end_s) - self.start_s
        tokens = self.count()
        return tokens / length if tokens and length > 0 else None

    def covers(self, start_s: float, end_s: float) -> bool:
        return self.start_s <= start_s and (self.end_s is None or end_s <= self.end_s)


class ModelEnergy(Struct):
    """Totals of one model since telemetry started. `joules` are its share while it had requests."""

    joules: float = 0.0
    tokens: int = 0
    requests: int = 0


class TokenEnergy(Struct):
    """Tokens and joules of the same time: of requests that enough samples fall into, and without gaps.

    `error_joules` bounds what the power between two samples hides at the start and the end of these requests.
    """

    tokens: float = 0.0
    joules: float = 0.0
    error_joules: float = 0.0


class Curve(Struct, frozen=True):
    """Power over time: linear between points, constant beyond both ends for at most `GAP_S`."""

    points: Sequence[Point]
    times: Sequence[float]

    def joules(self, start_s: float, end_s: float) -> float | None:
        """Return the energy between two instants; None where a gap makes it unknown."""
        if not self.points or self.times[0] - start_s > GAP_S or end_s - self.times[-1] > GAP_S:
            return None
        inner = self.points[bisect_right(self.times, start_s) : bisect_left(self.times, end_s)]
        path = [Point(start_s, self._at(start_s)), *inner, Point(end_s, self._at(end_s))]
        before, after = bisect_right(self.times, start_s) - 1, bisect_left(self.times, end_s)
        measured = self.times[max(0, before) : after + 1]
        if any(right - left > GAP_S for left, right in pairwise(measured)):
            return None
        return sum((b.at_s - a.at_s) * (a.power_w + b.power_w) / 2 for a, b in pairwise(path))

    def _at(self, at_s: float) -> float:
        after = bisect_left(self.times, at_s)
        if after == 0:
            return self.points[0].power_w
        if after == len(self.points):
            return self.points[-1].power_w
        a, b = self.points[after - 1], self.points[after]
        return a.power_w + (b.power_w - a.power_w) * (at_s - a.at_s) / (b.at_s - a.at_s)


def share(mine: MeteredRequest, active: Sequence[MeteredRequest], now: float) -> float:
    """Return the share of `mine` while `active` ran, by generated tokens; a request without tokens counts as `mine`."""
    own = mine.rate(now)
    if own is None:
        return 1 / len(active)
    return own / sum(own if work is mine else work.rate(now) or own for work in active)


class EnergyMeter(Struct):
    """Energy of a board, its models and requests, from power (`add`) and requests (`begin`, `request`, `cancel`)."""

    total_joules: float = 0.0
    idle_joules: float = 0.0
    idle_s: float = 0.0
    measured_s: float = 0.0
    gap_s: float = 0.0
    by_model: dict[str, ModelEnergy] = field(default_factory=dict)
    by_hour: dict[int, float] = field(default_factory=dict)  # hours since 1970 → joules
    on_begin: Callable[[], None] = lambda: None  # a request has started: sample faster
    _measured: dict[str, TokenEnergy] = field(default_factory=dict)
    _points: deque[Point] = field(default_factory=lambda: deque(maxlen=KEEP_POINTS))
    _work: list[MeteredRequest] = field(default_factory=list)

    def add(self, at_s: float, power_w: float, unix_s: float | None = None) -> None:
        """Add one measurement, unless it is older than the last. `unix_s` selects the hour it counts for."""
        last = self._points[-1] if self._points else None
        if last is not None and at_s <= last.at_s:
            return
        self._points.append(Point(at_s, power_w))
        if last is None:
            return
        if at_s - last.at_s > GAP_S:
            self.gap_s += at_s - last.at_s
        else:
            self._account(last.at_s, at_s, unix_s)
        self._forget(at_s)

    def begin(self, start_s: float, model: str = "", so_far: Callable[[], int] | None = None) -> MeteredRequest:
        """Start a request. `so_far` counts its tokens until the result is passed to `request` or `cancel`."""
        work = MeteredRequest(start_s, model, so_far=so_far)
        self._work.append(work)
        self.on_begin()
        return work

    def request(self, start_s: float, end_s: float, tokens: int, work: MeteredRequest | None = None) -> float | None:
        """End a request and return its estimated joules; None with fewer than three samples inside it, or with a gap.

        Requests that overlap share by generated tokens.
        """
        mine = work or self.begin(start_s)
        mine.start_s, mine.end_s, mine.tokens = start_s, max(start_s, end_s), tokens
        use = self.by_model.setdefault(mine.model, ModelEnergy())
        use.tokens += tokens
        use.requests += 1
        points = [point for point in self._points if start_s - GAP_S <= point.at_s <= end_s + GAP_S]
        if sum(start_s <= point.at_s <= end_s for point in points) < FEWEST_SAMPLES:
            return None
        joules = self._part(mine, _curve(points)) if points[0].at_s <= start_s else None
        if joules is None and len(self._points) == KEEP_POINTS and mine.measured_s >= end_s - start_s - GAP_S:
            joules = mine.joules  # its first samples are no longer kept
        if joules is not None:
            mine.samples = 0  # counted here, and not again when it is forgotten
            self._count(mine.model, tokens, joules, _edge_error(points, (start_s, mine.end_s)))
        return joules

    def cancel(self, work: MeteredRequest, end_s: float) -> None:
        """End a request without an answer: it shares the energy of its time and counts no token."""
        work.end_s = max(work.start_s, end_s)

    def open(self, model: str | None = None) -> int:
        return sum(work.end_s is None and model in (None, work.model) for work in self._work)

    def tokens(self, model: str | None = None) -> int:
        """Return tokens of finished and open requests of a model; of all models without a name."""
        done = sum(use.tokens for name, use in self.by_model.items() if model in (None, name))
        return done + sum(work.count() for work in self._work if work.end_s is None and model in (None, work.model))

    def tokens_per_joule(self, model: str) -> float | None:
        """Return tokens per joule of measured requests; None until there is one.

        Requests that too few samples fall into, and the time of gaps, are left out of both sides.
        """
        measured = self.measured(model)
        return measured.tokens / measured.joules if measured.tokens and measured.joules else None

    def error_ratio(self, model: str) -> float | None:
        """Return how much of the joules behind `tokens_per_joule` is uncertain, as a ratio."""
        measured = self.measured(model)
        return min(1.0, measured.error_joules / measured.joules) if measured.tokens and measured.joules else None

    def measured(self, model: str) -> TokenEnergy:
        """Return tokens and joules of the same time, with those of requests that still run or lost samples."""
        done = self._measured.get(model, TokenEnergy())
        now = self._points[-1].at_s if self._points else 0.0
        parts = [_partial(work, now) for work in self._work if work.model == model]
        tokens = done.tokens + sum(part.tokens for part in parts)
        return TokenEnergy(tokens, done.joules + sum(part.joules for part in parts), done.error_joules)

    def _count(self, model: str, tokens: float, joules: float, error_joules: float = 0.0) -> None:
        measured = self._measured.setdefault(model, TokenEnergy())
        measured.tokens += tokens
        measured.joules += joules
        measured.error_joules += error_joules

    @property
    def idle_w(self) -> float | None:
        """Return the mean power while no request was open."""
        return self.idle_joules / self.idle_s if self.idle_s > 0 else None

    def _part(self, mine: MeteredRequest, curve: Curve) -> float | None:
        """Sum the share of `mine` over the intervals between starts and ends of requests."""
        end_s = mine.end_s if mine.end_s is not None else mine.start_s
        energy = 0.0
        for left, right in self._intervals(mine.start_s, end_s):
            drawn = curve.joules(left, right)
            if drawn is None:
                return None
            energy += drawn * share(mine, self._active(left, right), end_s)
        return energy

    def _account(self, start_s: float, end_s: float, unix_s: float | None) -> None:
        """Add the newest segment to its hour and to the active models, or to idling."""
        curve = _curve([self._points[-2], self._points[-1]])
        for left, right in self._intervals(start_s, end_s):
            drawn = curve.joules(left, right) or 0.0
            self.total_joules += drawn
            self.measured_s += right - left
            if unix_s is not None:
                hour = int(unix_s // 3600)
                self.by_hour[hour] = self.by_hour.get(hour, 0.0) + drawn
            active = self._active(left, right)
            if not active:
                self.idle_joules += drawn
                self.idle_s += right - left
            for work in active:
                part = drawn * share(work, active, right)
                self.by_model.setdefault(work.model, ModelEnergy()).joules += part
                work.joules += part
                work.measured_s += right - left
                work.samples += right == end_s

    def _intervals(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Cut [start, end] wherever a request starts or ends."""
        edges = {start_s, end_s}
        for work in self._work:
            edges.update(at for at in (work.start_s, work.end_s) if at is not None and start_s < at < end_s)
        cuts = sorted(edges)
        return list(pairwise(cuts))

    def _active(self, start_s: float, end_s: float) -> list[MeteredRequest]:
        return [work for work in self._work if work.covers(start_s, end_s)]

    def _forget(self, now: float) -> None:
        """Drop points and requests that no open request needs."""
        oldest = min((work.start_s for work in self._work if work.end_s is None), default=now)
        kept = [work for work in self._work if work.end_s is None or work.end_s > oldest][-KEEP_WORK:]
        staying = set(map(id, kept))
        for work in self._work:
            if id(work) not in staying:
                part = _partial(work, now)
                self._count(work.model, part.tokens, part.joules)
        self._work = kept
        while self._points and self._points[0].at_s < min(oldest, now - KEEP_S) - GAP_S:
            self._points.popleft()
        while len(self.by_hour) > HOURS:
            del self.by_hour[min(self.by_hour)]


def _partial(work: MeteredRequest, now: float) -> TokenEnergy:
    """Return the measured part of a request that runs, or that lost samples: its tokens by the measured time."""
    rate = work.rate(now) if work.samples >= FEWEST_SAMPLES else None
    return TokenEnergy() if rate is None else TokenEnergy(rate * work.measured_s, work.joules)


def _edge_error(points: Sequence[Point], edges: tuple[float, float]) -> float:
    """Bound the error at start and end: power may have changed anywhere between the samples around them."""
    error = 0.0
    for before, after in pairwise(points):
        if any(before.at_s < edge < after.at_s for edge in edges):
            error += abs(after.power_w - before.power_w) * (after.at_s - before.at_s) / 2
    return error


def _curve(points: Sequence[Point]) -> Curve:
    return Curve(points, [point.at_s for point in points])


def mean_power_w(points: Iterable[tuple[float, float | None]], from_s: float, to_s: float) -> float | None:
    """Return the mean of (instant, watts) in a span; None with fewer than FEWEST_SAMPLES known values. Pure."""
    known = [watts for at_s, watts in points if watts is not None and from_s <= at_s <= to_s]
    return round(sum(known) / len(known), 2) if len(known) >= FEWEST_SAMPLES else None
