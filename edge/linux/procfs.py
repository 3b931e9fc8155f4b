"""Read processes, sockets and file residency from /proc and the kernel. Absent or forbidden is None."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
# A sample of 64 MiB, spread over the file: mincore(2) answers a byte a page, ten million for 40 GB.
WINDOWS = 64
WINDOW_BYTES = 1 << 20
_TICKS_S = os.sysconf("SC_CLK_TCK")  # per second; times of /proc/PID/stat are in ticks
FAMILY = 64  # an engine has no children; a script that starts one has a few
_M_ARENA_MAX = -8  # malloc.h of glibc
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 1 << 20
_TCP_LISTEN = "0A"  # TCP_LISTEN of include/net/tcp_states.h, in hex


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat, see proc_pid_stat(5)."""

    state: str  # one letter: R, S, D, Z …
    parent_pid: int
    session: int
    cpu_s: float  # user and system time
    started_ticks: int  # since boot; with the pid it identifies one process, pids being reused


class ProcessUsage(NamedTuple):
    """Resource use of one process: memory in bytes, CPU time in seconds."""

    cpu_s: float
    called_bytes: int  # rchar: read(2) from any source, page cache included; 0 where io may not be read
    disk_bytes: int  # read_bytes: from storage, through mappings too; 0 where io may not be read
    rss_anon_bytes: int
    swap_bytes: int
    rss_bytes: int

    @property
    def read_bytes(self) -> int:
        """Return the progress through a file that is read once, by read(2) or by a mapping."""
        return max(self.called_bytes, self.disk_bytes)


class ListeningSocket(NamedTuple):
    """A listening TCP socket of this network namespace."""

    address: str
    port: int
    inode: str


class SocketOwner(NamedTuple):
    """A process that holds a socket."""

    pid: int
    name: str


def read_stat(pid: int | str, proc: Path = PROC) -> ProcessStat | None:
    """Read the stat line of a process (`self` for this one); None when it is gone."""
    try:
        # The command name in parentheses may hold spaces and parentheses, so the fields are counted from its end.
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_S
        return ProcessStat(fields[0], int(fields[1]), int(fields[3]), cpu_s, int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def pids(proc: Path = PROC) -> Iterator[int]:
    """Yield the ids of the processes that are visible here. Raises nothing: an unreadable /proc has none."""
    with suppress(OSError):
        for entry in proc.iterdir():
            if entry.name.isdecimal():
                yield int(entry.name)


def session_pids(session: int, proc: Path = PROC) -> list[int]:
    """Return the processes of a session that still run; a session's id is the pid of the process that began it."""
    found = ((pid, read_stat(pid, proc)) for pid in pids(proc))
    return [pid for pid, stat in found if stat is not None and stat.session == session and stat.state != "Z"]


def child_pids(pid: int, proc: Path = PROC) -> list[int]:
    """Return the children of a process's first thread (CONFIG_PROC_CHILDREN); empty where the kernel lists none."""
    try:
        return [int(child) for child in (proc / str(pid) / "task" / str(pid) / "children").read_text().split()]
    except (OSError, ValueError):
        return []


def process_started_s(proc: Path = PROC) -> float | None:
    """Return when this process started, on the monotonic clock. The kernel counts in ticks of 10 ms since boot."""
    import time  # late: keeps readers of this module free of a clock

    stat = read_stat("self", proc)
    if stat is None:
        return None
    # Start times count suspended time, as CLOCK_BOOTTIME does and CLOCK_MONOTONIC does not.
    return stat.started_ticks / _TICKS_S - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def read_boot_id(proc: Path = PROC) -> str | None:
    """Read the kernel's random id of this boot."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def read_usage(pid: int, proc: Path = PROC) -> ProcessUsage | None:
    """Read CPU time, bytes read and memory of a process; None when it is gone or belongs to another user."""
    stat = read_stat(pid, proc)
    try:
        status = _numbers((proc / str(pid) / "status").read_text())
    except (OSError, ValueError):
        return None
    if stat is None:
        return None
    io: dict[str, int] = {}
    with suppress(OSError, ValueError):  # closed in some containers; CPU time and memory are still useful
        io = _numbers((proc / str(pid) / "io").read_text())
    return ProcessUsage(
        cpu_s=stat.cpu_s,
        called_bytes=io.get("rchar", 0),
        disk_bytes=io.get("read_bytes", 0),
        rss_anon_bytes=status.get("RssAnon", 0) * 1024,
        swap_bytes=status.get("VmSwap", 0) * 1024,
        rss_bytes=status.get("VmRSS", 0) * 1024,
    )


def family_pids(pid: int, proc: Path = PROC) -> list[int]:
    """Return a process and its descendants, of which one may be the program that a shell script started."""
    found = [pid]
    for each in found:
        found += child_pids(each, proc)[: FAMILY - len(found)]
    return found


def read_family_usage(pid: int, proc: Path = PROC) -> ProcessUsage | None:
    """Read the usage of a process and its descendants together; None when the process is gone."""
    usage = read_usage(pid, proc)
    if usage is None:
        return None
    others = [each for other in family_pids(pid, proc)[1:] if (each := read_usage(other, proc)) is not None]
    return ProcessUsage(*(sum(values) for values in zip(usage, *others, strict=True)))


def family_pss_bytes(family: Iterable[int], proc: Path = PROC) -> int | None:
    """Return the memory of processes, shared pages divided among those that map them; None if none can be read.

    PSS of /proc/PID/smaps_rollup (Linux 4.14); the resident set where the kernel has no such file.
    """
    sizes = []
    for pid in family:
        for name, field in (("smaps_rollup", "Pss"), ("status", "VmRSS")):
            with suppress(OSError, ValueError):
                size = _numbers((proc / str(pid) / name).read_text()).get(field)
                if size is not None:
                    sizes.append(size * 1024)
                    break
    return sum(sizes) if sizes else None


def own_listeners(port: int, family: Iterable[int], proc: Path = PROC) -> list[str]:
    """Return the addresses at which one of these processes listens on a TCP port."""
    folders = [proc / str(pid) / "fd" for pid in family]
    found = [each for each in listening_sockets(proc) if each.port == port]
    return [each.address for each in found if any(_holds(fd, {f"socket:[{each.inode}]"}) for fd in folders)]


def process_name(pid: int, proc: Path = PROC) -> str:
    """Read the command name of a process; `?` when it is gone."""
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "?"


def _numbers(text: str) -> dict[str, int]:
    """Parse `Name:  123 kB` lines; units stay as they are."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: int(rest.split()[0]) for name, rest in pairs if rest.split() and rest.split()[0].isdigit()}


def listening_sockets(proc: Path = PROC) -> Iterator[ListeningSocket]:
    """Yield every listening TCP socket from /proc/net/tcp and tcp6."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text(errors="replace").splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _TCP_LISTEN:
                    address, _, port = fields[1].partition(":")
                    yield ListeningSocket(_address(address), int(port, 16), fields[9])


def socket_owner(inodes: set[str], proc: Path = PROC) -> SocketOwner | None:
    """Find the process that holds one of these sockets; None when it belongs to another user or is gone."""
    links = {f"socket:[{inode}]" for inode in inodes}
    for pid in pids(proc) if links else ():
        if _holds(proc / str(pid) / "fd", links):
            with suppress(OSError):
                return SocketOwner(pid, (proc / str(pid) / "comm").read_text(errors="replace").strip())
    return None


def port_owner(port: int, proc: Path = PROC) -> str | None:
    """Describe the process that listens on a TCP port, as `python3 (pid 1234)`; None when it cannot be found."""
    owner = socket_owner({socket.inode for socket in listening_sockets(proc) if socket.port == port}, proc)
    return f"{owner.name} (pid {owner.pid})" if owner else None


def lock_holders(path: Path, proc: Path = PROC) -> set[int]:
    """Return the processes with a lock on a file (/proc/locks: id, kind, mode, access, pid, device:inode)."""
    try:
        inode = str(path.stat().st_ino)
        rows = [line.split() for line in (proc / "locks").read_text(errors="replace").splitlines()]
    except OSError:
        return set()
    return {int(row[4]) for row in rows if len(row) > 5 and row[5].endswith(f":{inode}") and row[4].isdecimal()}


def _address(text: str) -> str:
    """Decode an address; the kernel prints words of four bytes in the machine's order (little endian here)."""
    import ipaddress  # late: only needed when a port is taken

    raw = bytes.fromhex(text)
    address = ipaddress.ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _holds(descriptors: Path, links: set[str]) -> bool:
    with suppress(OSError):
        for descriptor in descriptors.iterdir():
            with suppress(OSError):  # closed since the listing
                if str(descriptor.readlink()) in links:
                    return True
    return False


def drop_pages(path: Path) -> None:
    """Remove a file's clean pages from the page cache: this needs no root, unlike /proc/sys/vm/drop_caches.

    Raises OSError. Pages that a process has mapped stay.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)  # dirty pages cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


_LOWEST_BIT = bytes(byte & 1 for byte in range(256))


def resident_ratio(path: Path) -> float | None:
    """Return how much of a file the page cache holds, 0…1; None when it cannot be read.

    At most 64 windows of 1 MiB spread over the file are asked with mincore(2): 40 GB cost no more than 64 MB.
    """
    import mmap  # late, with ctypes: no other reader of this module needs them

    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return None
            step = max(WINDOW_BYTES, size // WINDOWS // mmap.PAGESIZE * mmap.PAGESIZE)
            answers = _resident_pages(file.fileno(), size, step)
    except (OSError, ValueError):
        return None
    # Only the lowest bit of each byte is defined (mincore(2)). Not in a loop of Python, which takes 8 ms.
    return round(answers.translate(_LOWEST_BIT).count(1) / len(answers), 3)


def _resident_pages(descriptor: int, size: int, step: int) -> bytes:
    """Return what mincore states of a window every `step` bytes, a byte a page. Raises OSError where it is refused."""
    import ctypes
    import mmap

    # Not Python's mmap: an interrupt (Ctrl-C) while ctypes has its buffer would make its close() fail with BufferError.
    libc, address, length = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, length, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mincore.argtypes = (address, length, ctypes.c_char_p)
    libc.munmap.argtypes = (address, length)
    whole = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if whole == address(-1).value:
        raise OSError(ctypes.get_errno(), "mmap failed")
    answers = b""
    try:
        for at in range(0, size, step):
            window = min(WINDOW_BYTES, size - at)
            answer = ctypes.create_string_buffer(-(-window // mmap.PAGESIZE))
            if libc.mincore(whole + at, window, answer):
                raise OSError(ctypes.get_errno(), "mincore failed")
            answers += answer.raw
    finally:
        libc.munmap(whole, size)
    return answers


# The last lines of a stream, kept for `edgellm logs` and for a crash record.

RING_LINES = 2000
RING_BYTES = 2 << 20  # of memory; a log line of llama.cpp takes 150, one of an engine is cut at 64 KiB


class Ring:
    """The last lines of a stream, numbered, so that a reader can ask for those it has not seen."""

    def __init__(self, most: int = RING_LINES, most_bytes: int = RING_BYTES) -> None:
        self.count = 0  # lines ever added
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lines: deque[str] = deque()

    def add(self, line: str) -> None:
        """Keep a line; the oldest ones leave, but never this one."""
        self.count += 1
        self._lines.append(line)
        self._bytes += sys.getsizeof(line)  # a character takes one, two or four bytes, as the widest of its line
        while len(self._lines) > 1 and (len(self._lines) > self._most or self._bytes > self._most_bytes):
            self._bytes -= sys.getsizeof(self._lines.popleft())

    def since(self, number: int = 0) -> list[str]:
        """Return the lines after the first `number` that are still kept; all for a number of an earlier process."""
        if number > self.count:
            number = 0
        missing = self.count - number
        return list(self._lines)[-missing:] if missing else []


def limit_malloc_arenas() -> None:
    """Let malloc of this process use few arenas, and give large blocks back. Call before the first thread starts.

    glibc gives each thread an arena of 64 MiB of address space, up to 8 for each core (mallopt(3), M_ARENA_MAX): with
    `ulimit -v`, or where memory is not overcommitted, that alone can end a supervisor that needs 50 MB.

    After the first large block is freed glibc takes blocks up to 32 MiB from the heap too (M_MMAP_THRESHOLD), where
    each window of a decompressor touches other pages: a flood of zstd left 200 MB. A fixed threshold ends that.
    """
    import ctypes

    with suppress(AttributeError, OSError):  # musl has no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 2)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
