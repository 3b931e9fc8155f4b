"""The last lines of a stream, for whoever asks later."""

from __future__ import annotations

from collections import deque

RING_LINES = 2000


class Ring:
    """The last lines of a stream, each with a number, so that a reader can ask for what came since."""

    def __init__(self, most: int = RING_LINES) -> None:
        self.count = 0  # of all lines ever
        self._lines: deque[str] = deque(maxlen=most)

    def add(self, line: str) -> None:
        self.count += 1
        self._lines.append(line)

    def since(self, number: int = 0) -> list[str]:
        """Lines after the first `number`, as far as they are still kept. A number from another life is no number."""
        if number > self.count:
            number = 0
        missing = self.count - number
        return list(self._lines)[-missing:] if missing else []
