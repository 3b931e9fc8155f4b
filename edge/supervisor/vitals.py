"""What /proc says of a running child: bytes read, CPU time, memory. Absent is None."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Vitals:
    """Memory in bytes, CPU in seconds."""

    cpu_s: float
    called_bytes: int  # through read(2): what the page cache holds too; 0 where io may not be read
    disk_bytes: int  # from storage: what a mapping reads too; 0 where io may not be read
    rss_anon_bytes: int
    swap_bytes: int
    rss_bytes: int

    @property
    def read_bytes(self) -> int:
        """Of a file that is read once, by whichever way it is read."""
        return max(self.called_bytes, self.disk_bytes)


def read_vitals(pid: int, proc: Path = Path("/proc")) -> Vitals | None:
    """None when the process is gone or not ours to look at."""
    try:
        stat = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        status = _fields((proc / str(pid) / "status").read_text())
    except (OSError, ValueError):
        return None
    io = {}
    with suppress(OSError, ValueError):  # kernels and containers may keep it from us: CPU time and memory still tell
        io = _fields((proc / str(pid) / "io").read_text())
    return Vitals(
        cpu_s=(int(stat[11]) + int(stat[12])) / _TICKS_S,
        called_bytes=io.get("rchar", 0),
        disk_bytes=io.get("read_bytes", 0),
        rss_anon_bytes=status.get("RssAnon", 0) * 1024,
        swap_bytes=status.get("VmSwap", 0) * 1024,
        rss_bytes=status.get("VmRSS", 0) * 1024,
    )


def _fields(text: str) -> dict[str, int]:
    """`Name:  123 kB` lines → numbers as they stand."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: int(rest.split()[0]) for name, rest in pairs if rest.split() and rest.split()[0].isdigit()}
