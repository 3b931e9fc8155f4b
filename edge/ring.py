"""The last lines of a stream, kept for `edgellm logs` and for a crash record."""

from __future__ import annotations

from collections import deque

RING_LINES = 2000


class Ring:
    """The last lines of a stream, numbered, so that a reader can ask for those it has not seen."""

    def __init__(self, most: int = RING_LINES) -> None:
        self.count = 0  # lines ever added
        self._lines: deque[str] = deque(maxlen=most)

    def add(self, line: str) -> None:
        self.count += 1
        self._lines.append(line)

    def since(self, number: int = 0) -> list[str]:
        """Return the lines after the first `number` that are still kept; all for a number of an earlier process."""
        if number > self.count:
            number = 0
        missing = self.count - number
        return list(self._lines)[-missing:] if missing else []
