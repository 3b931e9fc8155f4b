"""Read small files of this machine, or of a copy of another one under a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from edge.linux.slow_reads import reading
from edge.paths import LINKS_MAX

_MOST_DIGITS = 20  # of 64 bits
_READ_MAX_BYTES = 4 * 2**20  # /var/lib/dpkg/status is the largest file read


class Tree:
    """The file system of a machine: `/` or a copy, in which absolute symbolic links stay."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.live = root.resolve() == Path("/")

    def path(self, name: str | Path) -> Path:
        """Return the real path of `/proc/meminfo` and the like."""
        plain = str(name).lstrip("/")
        return Path("/") / plain if self.live else self._inside(Path(plain))

    def text(self, name: str | Path) -> str | None:
        """Return the file's text (at most 4 MiB); None if it is absent or unreadable, as a gated sensor is (EAGAIN)."""
        data = self.data(name)
        return None if data is None else data.decode(errors="replace")

    def data(self, name: str | Path) -> bytes | None:
        """Return the file's bytes; none of a FIFO in its place, which is not waited for."""
        with reading(name):
            try:
                descriptor = os.open(self.path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                with os.fdopen(descriptor, "rb") as file:
                    return file.read(_READ_MAX_BYTES) or b""
            except (OSError, ValueError):  # ValueError: a name with a NUL, read from a file
                return None

    def number(self, name: str | Path) -> int | None:
        text = (self.text(name) or "").strip()
        count = parse_count(text.removeprefix("-"))
        return -count if count is not None and text.startswith("-") else count

    def word(self, name: str | Path) -> str | None:
        """Return the text without surrounding white space and NULs; None if it is empty."""
        text = self.text(name)
        return (text.strip("\0 \t\r\n") or None) if text is not None else None

    def exists(self, name: str | Path) -> bool:
        with reading(name):
            try:
                return self.path(name).exists()
            except (OSError, ValueError):
                return False

    def children(self, name: str | Path) -> list[str]:
        """Return sorted names in a folder, cpu2 before cpu10; [] without the folder."""
        with reading(name):
            try:
                return sorted((entry.name for entry in self.path(name).iterdir()), key=_natural)
            except (OSError, ValueError):
                return []

    def lines(self, name: str | Path) -> Iterator[str]:
        yield from (self.text(name) or "").splitlines()

    def counts(self, name: str | Path) -> dict[str, int]:
        """Parse lines of a word and a number, as those of /proc/vmstat and of a cgroup's memory.stat."""
        pairs = (line.split() for line in self.lines(name))
        found = {pair[0]: parse_count(pair[1]) for pair in pairs if len(pair) == 2}
        return {word: count for word, count in found.items() if count is not None}

    def _inside(self, relative: Path) -> Path:
        """Resolve links here, so that a link to `/sys/…` in a copy means the copy's."""
        done = self.root
        waiting = [part for part in relative.parts if part != "/"]
        links = 0
        while waiting:
            part = waiting.pop(0)
            if part == "..":
                done = done.parent if done != self.root else done
                continue
            step = done / part
            if links < LINKS_MAX and step.is_symlink():
                links += 1
                target = step.readlink()
                waiting = [p for p in target.parts if p != "/"] + waiting
                done = self.root if target.is_absolute() else done
            else:
                done = step
        return done


def parse_count(text: str) -> int | None:
    """Return the number of a plain text of digits, None for any other text and for more digits than the kernel prints.

    int() refuses 4300 digits, and fewer overflow the first float that they meet.
    """
    return int(text) if len(text) <= _MOST_DIGITS and text.isdecimal() else None


def _natural(name: str) -> tuple[str, int]:
    head = name.rstrip("0123456789")
    number = parse_count(name[len(head) :])
    return (head, -1 if number is None else number)
