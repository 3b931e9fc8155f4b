"""The open requests of one model: a drain waits for them, hangs are judged by them, and deaths are blamed on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Fingerprint = Callable[[], str | None]
DEATHS = 2  # at one death a request may have been there by chance
REFUSED_S = 600.0  # a client that retries stops within minutes; a later version of the prompt has another fingerprint
DEATHS_S = 3600.0  # a death longer ago says nothing of a request that monitoring repeats each minute
# From a broken connection to the exit that the supervisor sees: a core of some GiB is written meanwhile.
BLAMED_S = 10.0
REMEMBERED = 256


class Traffic:
    """The open requests. `moved_s`: when the last byte of an answer came, monotonic. `on_idle`: the last one ended.

    `on_answer` receives the generation of an engine that answered its first request.
    """

    def __init__(
        self,
        on_idle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        on_answer: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.open = 0
        self.moved_s = 0.0
        self.opened = asyncio.Event()  # set while a request is open
        self.unanswered: str | None = None  # the warm-up request that ended without an answer, or is sent
        self.unanswered_s: float | None = None  # when that ended; None while it is sent
        self.fatal_warmups: set[str] = set()  # after which an engine died: they are not sent again
        self.keep_alive_s: float | None = None  # idle time that the last client asked for; negative is never
        self._on_idle = on_idle
        self._on_answer = on_answer
        self._clock = clock
        self._running: list[Fingerprint] = []
        self._broken: list[tuple[float, str | None]] = []  # ended without an answer lately
        self._deaths: dict[str, tuple[int, float]] = {}  # how many, and when the last one was
        self._refused_until_s: dict[str, float] = {}

    def idle_limit_s(self, ttl_s: float) -> float | None:
        """Return the idle seconds after which the model may sleep, `ttl_s` where no client asked; None is never."""
        if self.keep_alive_s is None:
            return ttl_s or None
        return None if self.keep_alive_s < 0 else self.keep_alive_s

    def moved(self) -> None:
        self.moved_s = self._clock()

    def answered(self, generation: int) -> None:
        self._on_answer(generation)

    @contextmanager
    def request(self, fingerprint: Fingerprint = lambda: None) -> Iterator[Traffic]:
        """Count a request as open. `fingerprint` is computed when it is needed: None blames nothing."""
        self.open += 1
        self.opened.set()
        self._running.append(fingerprint)
        self.moved()
        try:
            yield self
        except BaseException:
            now = self._clock()
            self._broken = [each for each in self._broken if now - each[0] < BLAMED_S]
            self._broken.append((now, fingerprint()))  # not the function: it holds the request's body
            raise
        finally:
            self._running.remove(fingerprint)
            self.open -= 1
            self.moved()
            if self.open == 0:
                self.opened.clear()
                self._on_idle()

    def engine_died(self) -> None:
        """Count a death against the requests that were in flight, and refuse those that were there twice.

        A request of the warm-up is refused after one death: it is sent at each start, and would end each of them.
        """
        now = self._clock()
        if self.unanswered is not None and (self.unanswered_s is None or now - self.unanswered_s < BLAMED_S):
            self.fatal_warmups.add(self.unanswered)
        self.unanswered = None
        blamed = {fingerprint() for fingerprint in self._running}
        blamed |= {text for at_s, text in self._broken if now - at_s < BLAMED_S}
        self._broken.clear()
        for text in (text for text in blamed if text is not None):
            before, at_s = self._deaths.pop(text, (0, now))
            deaths = before + 1 if now - at_s < DEATHS_S else 1
            self._deaths[text] = deaths, now
            if deaths >= DEATHS:
                self._refused_until_s[text] = now + REFUSED_S
        while len(self._deaths) > REMEMBERED:
            self._deaths.pop(next(iter(self._deaths)))

    def kills(self, fingerprint: Fingerprint) -> bool:
        """Return whether a request is refused because it was in flight at two deaths of the engine."""
        now = self._clock()
        self._refused_until_s = {text: until_s for text, until_s in self._refused_until_s.items() if until_s > now}
        return bool(self._refused_until_s) and fingerprint() in self._refused_until_s
