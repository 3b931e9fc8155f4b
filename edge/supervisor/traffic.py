"""Count the open requests of one model: a drain waits for them, and hangs are judged by their progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Traffic:
    """The open requests. `moved_s`: when the last byte of an answer came, monotonic. `on_idle`: the last one ended."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        self.open = 0
        self.moved_s = 0.0
        self.opened = asyncio.Event()  # set while a request is open
        self.keep_alive_s: float | None = None  # idle time that the last client asked for; negative is never
        self._on_idle = on_idle

    def idle_limit_s(self, ttl_s: float) -> float | None:
        """Return the idle seconds after which the model may sleep, `ttl_s` where no client asked; None is never."""
        if self.keep_alive_s is None:
            return ttl_s or None
        return None if self.keep_alive_s < 0 else self.keep_alive_s

    def moved(self) -> None:
        self.moved_s = time.monotonic()

    @contextmanager
    def request(self) -> Iterator[Traffic]:
        self.open += 1
        self.opened.set()
        self.moved()
        try:
            yield self
        finally:
            self.open -= 1
            self.moved()
            if self.open == 0:
                self.opened.clear()
                self._on_idle()
