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
        self._on_idle = on_idle

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
