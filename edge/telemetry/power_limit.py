"""Hold the mean power of the board at a limit by admitting fewer requests at once and by pauses between them. Pure.

The controller keeps an energy budget in joules: what the limit allowed less what was drawn. It admits a base number of
requests, and one more while the budget is positive; the base follows when that does not suffice. Whatever was drawn
above the limit is saved later, so the mean holds for any board, model and request length without a model of them.
"""

from __future__ import annotations

from msgspec import Struct

# The budget saved for a burst, in seconds of the limit: long enough that admission does not change with every sample
# and that a slow board loses little of it, short enough that the mean of an hour exceeds the limit by 0.4 % at most.
_CREDIT_S = 15.0
_DEBT_S = 600.0  # at most this much is saved later: a sensor that read too high must not stop the board for hours
_SETTLE_S = 15.0  # after a change, before power is judged again: a board and its requests need seconds to follow
_RAISE_S = 60.0  # the base rises only after this long with budget left, so that levels change a few times an hour
_CALM_S = 300.0  # with budget left for this long the limit is no longer reported
_IDLE_S = 60.0  # without a request for this long, and no longer falling, power is that of the idle board
_IDLE_AGE_S = 1800.0  # then it is measured again: a fan or a power mode may have changed it
_SMOOTHING_S = 5.0
_SLOW_S = 30.0  # a second mean, to see whether power still falls
_SETTLED_RATIO = 0.005
_DEMAND_RATIO = 0.75  # of the admitted requests are open: more would run if they were admitted
_LONGEST_STEP_S = 10.0  # between samples; more is a gap, whose energy is unknown


class PowerAllowance(Struct, frozen=True):
    """What the limit allows now: `allowed` requests at once (None: any number; 0: a pause)."""

    allowed: int | None
    because: str
    limited: bool = True  # power has exceeded the limit; else requests are only added one by one
    pauses: bool = False  # one request alone exceeds the limit: it is held by pauses
    held: bool = True  # False: the board exceeds the limit without any request, and no admission can change that


class PowerLimit(Struct):
    """The controller of one board. `slots` is how many requests its engines take at once."""

    limit_w: float
    mean_w: float = 0.0
    one_w: float | None = None  # power with one request
    idle_w: float | None = None  # power without a request
    _budget_j: float = 0.0
    _base: int = 1  # requests that are always admitted; it starts low, because what was drawn in excess costs pauses
    _limited: bool = False  # power exceeded the limit before
    _extra: bool = True  # one more than the base is admitted
    _changed_s: float = float("-inf")
    _spare_since_s: float | None = None  # since when the budget is full although all admitted requests run
    _short_s: float = float("-inf")  # when the budget was last not full
    _quiet_since_s: float | None = None  # since when no request is open
    _single_since_s: float | None = None  # since when exactly one is open
    _slow_w: float = 0.0
    _open: float = 0.0  # mean number of open requests
    _idle_at_s: float = float("-inf")
    _at_s: float | None = None

    def step(self, power_w: float, active: int, slots: int, now: float) -> PowerAllowance:
        """Account one sample of power while `active` requests were open, and return what is allowed from now on."""
        before, self._at_s = self._at_s, now
        if before is None or not 0 < now - before <= _LONGEST_STEP_S:
            self.mean_w = self._slow_w = power_w
            return self._state(slots)
        self.mean_w += min(1.0, (now - before) / _SMOOTHING_S) * (power_w - self.mean_w)
        self._slow_w += (now - before) / _SLOW_S * (power_w - self._slow_w)
        self._open += min(1.0, (now - before) / _SMOOTHING_S) * (active - self._open)
        self._observe(power_w, active, now)
        credit_j = _CREDIT_S * self.limit_w
        left_j = self._budget_j + (self.limit_w - power_w) * (now - before)
        self._budget_j = max(-_DEBT_S * self.limit_w, min(credit_j, left_j))
        if self._too_much_idle():
            self._budget_j, self._base, self._extra, self._limited = 0.0, 0, True, True
            return self._state(slots)
        self._adjust(active, slots, credit_j, now)
        return self._state(slots)

    def _adjust(self, active: int, slots: int, credit_j: float, now: float) -> None:
        """Follow the budget: stop or allow the extra request, lower or raise the base."""
        self._base = min(self._base, slots)
        settled = now - self._changed_s >= _SETTLE_S
        falling = self.mean_w < (1 - _SETTLED_RATIO) * self._slow_w
        if self._budget_j < 0:
            # More requests may run than are admitted now, and a slow board is still cooling down: both are awaited.
            if not self._extra and settled and active <= self._base and not falling and self.mean_w > self.limit_w:
                self._base, self._changed_s, self._limited = max(0, self._base - 1), now, True
            elif self._extra:
                self._extra, self._changed_s = False, now
        elif self._budget_j >= credit_j:
            self._extra = True
        if self._budget_j < credit_j:
            self._short_s = now
        elif now - self._short_s >= _CALM_S:
            self._limited = False
        rising = self.mean_w > (1 + 2 * _SETTLED_RATIO) * self._slow_w
        full = self._budget_j >= credit_j and not rising and self._open >= _DEMAND_RATIO * min(slots, self._base + 1)
        if not full or self._base >= slots:
            self._spare_since_s = None
        elif self._spare_since_s is None:
            self._spare_since_s = now
        elif settled and now - self._spare_since_s >= (_SETTLE_S if self._next_w() <= self.limit_w else _RAISE_S):
            self._base, self._changed_s, self._spare_since_s = self._base + 1, now, None
            self._limited = self._limited and self._base < slots

    def _next_w(self) -> float:
        """Return at most what one more request would draw: each further one draws less than those before."""
        above_idle_w = self.mean_w - (self.idle_w or 0.0)
        return self.mean_w + above_idle_w / max(1.0, self._open)

    def _observe(self, power_w: float, active: int, now: float) -> None:
        """Learn the power of the idle board and of one request, for the sentence; only after it has settled."""
        falling = self.mean_w < (1 - _SETTLED_RATIO) * self._slow_w
        quiet = not active and not falling
        self._quiet_since_s = (now if self._quiet_since_s is None else self._quiet_since_s) if quiet else None
        single = active == 1
        self._single_since_s = (now if self._single_since_s is None else self._single_since_s) if single else None
        if self._quiet_since_s is not None and now - self._quiet_since_s >= _IDLE_S:
            self.idle_w, self._idle_at_s = self._slow_w, now
        elif now - self._idle_at_s >= _IDLE_AGE_S:
            self.idle_w = None
        if self._single_since_s is not None and now - self._single_since_s >= _SMOOTHING_S:
            self.one_w = power_w if self.one_w is None else self.one_w + 0.1 * (power_w - self.one_w)

    def _too_much_idle(self) -> bool:
        return self.idle_w is not None and self.idle_w >= self.limit_w

    def _state(self, slots: int) -> PowerAllowance:
        power = f"{self.mean_w:.1f} W, limit {self.limit_w:g} W"
        if self._too_much_idle():
            return PowerAllowance(
                1, f"the board draws {self.idle_w:.1f} W without a request, limit {self.limit_w:g} W", held=False
            )
        if self._base >= slots:
            return PowerAllowance(None, power, limited=False)
        allowed = min(slots, self._base + self._extra)
        if self._base > 0:
            because = f"{power}: {self._base} to {self._base + 1} of {slots} requests at once"
            return PowerAllowance(allowed, because, limited=self._limited)
        one = f"one request draws {self.one_w:.1f} W" if self.one_w else power
        return PowerAllowance(allowed, f"{one}, limit {self.limit_w:g} W: pauses between requests", pauses=True)
