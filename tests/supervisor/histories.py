"""Named event histories: starts, stops, crashes, hangs. histories_faults.py has memory, device and plan."""

from __future__ import annotations

from edge.supervisor.events import (
    DeviceBack,
    DeviceMissing,
    Drained,
    EngineLoading,
    EngineReady,
    Event,
    Exited,
    FirstRequestDue,
    Hung,
    MemoryBack,
    Restart,
    Sleep,
    StartRefused,
    StartRequested,
    Stop,
    Tick,
    Warmed,
)
from edge.supervisor.policy import EngineFault
from edge.supervisor.status import Failure


def exited(fault: EngineFault = EngineFault.CRASH, kind: str = "exited", remedies: tuple[str, ...] = ()) -> Exited:
    return Exited(fault, Failure(kind, "evidence", "hint"), remedies=remedies)


START, STOP, STOP_NOW, RESTART, SLEEP = StartRequested(), Stop(), Stop(now=True), Restart(), Sleep()
LOADING, READY, WARM, DRAINED, TICK, BACK = EngineLoading(), EngineReady(), Warmed(), Drained(), Tick(), DeviceBack()
SAVED = Drained(saved=True)
MEMORY, FIRST = MemoryBack(), FirstRequestDue()
CRASH, ABORT = exited(), exited(kind="signal_abrt", remedies=("safe",))
PERMANENT, OOM, NVMAP = (
    exited(EngineFault.PERMANENT, "bad_flag"),
    exited(EngineFault.OOM, "oom"),
    exited(EngineFault.NVMAP, "nvmap"),
)
KILLED, GPU_GONE = exited(EngineFault.KILLED, "killed"), exited(EngineFault.DEVICE, "no_gpu")
SHOT = exited(EngineFault.KILLED, "killed", ("mmap",))
FATAL = exited(kind="signal_segv", remedies=("a", "b"))
HUNG = Hung(Failure("wedged", "", ""))
NO_GPU = DeviceMissing(Failure("no_gpu", "", ""))
OLD_DRIVER = DeviceMissing(Failure("driver_too_old", "", ""), permanent=True)
REFUSED = StartRefused(Failure("degraded", "", ""))

Row = tuple[Event | float, str] | tuple[Event | float, str, str]

UP: tuple[Row, ...] = (
    (START, "STARTING", "spawn 0"),
    (LOADING, "LOADING"),
    (READY, "WARMING", "warm"),
    (WARM, "READY"),
)
AGAIN: tuple[Row, ...] = ((READY, "WARMING", "warm"), (WARM, "READY"))


# A number is time that passes, in seconds, followed by a tick.
LIFE: dict[str, tuple[Row, ...]] = {
    "a clean start": UP,
    "an engine that says nothing until it is ready": (
        (START, "STARTING", "spawn 0"),
        (READY, "WARMING", "warm"),
        (WARM, "READY"),
    ),
    "an engine that says loading over and over": (*UP[:2], (LOADING, "LOADING"), (LOADING, "LOADING"), *UP[2:]),
    "ready is said twice": (*UP[:3], (READY, "WARMING"), (WARM, "READY"), (READY, "READY"), (WARM, "READY")),
    "the first request of a client is let in, and answered": (*UP[:3], (FIRST, "WARMING"), (WARM, "READY")),
    "stop waits for the first request": (
        *UP[:3],
        (FIRST, "WARMING"),
        (STOP, "DRAINING"),
        (WARM, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STOPPED"),
    ),
    "a death in the first request is blamed on no remedy, and the next start takes none": (
        *UP[:3],
        (FIRST, "WARMING"),
        (ABORT, "STARTING", "spawn 0"),
        (READY, "WARMING", "warm"),
        (FIRST, "WARMING"),
        (STOP, "STOPPING", "term"),
        (CRASH, "STOPPED"),
    ),
    "an engine that starts is put to sleep": (UP[0], (SLEEP, "STOPPING", "term"), (CRASH, "SLEEPING")),
    "one that loads without end is put to sleep, and a request starts it again": (
        *UP[:2],
        (SLEEP, "STOPPING", "term"),
        (START, "STOPPING"),
        (CRASH, "STARTING", "spawn 0"),
    ),
    "one that takes its first request sleeps after it": (
        *UP[:3],
        (FIRST, "WARMING"),
        (SLEEP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "SLEEPING"),
    ),
    "one that pauses after a crash sleeps at once": (
        *UP,
        (CRASH, "STARTING", "spawn 0"),
        (CRASH, "BACKOFF"),
        (SLEEP, "SLEEPING"),
        (START, "STARTING", "spawn 0"),
    ),
    "a stopped one sleeps: its next request starts it": (
        *UP,
        (STOP_NOW, "STOPPING", "kill"),
        (CRASH, "STOPPED"),
        (SLEEP, "SLEEPING"),
        (START, "STARTING", "spawn 0"),
    ),
    "one that restarts sleeps in its place": (
        *UP,
        (RESTART, "DRAINING"),
        (SLEEP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "SLEEPING"),
    ),
    "a second start changes nothing": (*UP, (START, "READY")),
    "a start while it starts changes nothing": (UP[0], (START, "STARTING"), *UP[1:]),
    "stop waits for open requests": (
        *UP,
        (STOP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STOPPED"),
    ),
    "stop does not wait without end": (
        *UP,
        (STOP, "DRAINING"),
        (29.0, "DRAINING"),
        (1.0, "STOPPING", "term"),
        (CRASH, "STOPPED"),
    ),
    "a child that ignores SIGTERM is killed (FC-37)": (
        *UP,
        (STOP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (9.0, "STOPPING"),
        (1.0, "STOPPING", "kill"),
        (KILLED, "STOPPED"),
    ),
    "a child in uninterruptible sleep is killed again and again": (
        *UP[:2],
        (STOP, "STOPPING", "term"),
        (10.0, "STOPPING", "kill"),
        (10.0, "STOPPING", "kill"),
        (10.0, "STOPPING", "kill"),
        (KILLED, "STOPPED"),
    ),
    "stop while it loads needs no drain; 143 is normal": (
        *UP[:2],
        (STOP, "STOPPING", "term"),
        (exited(kind="signal_term"), "STOPPED"),
    ),
    "stop now kills": (*UP, (STOP_NOW, "STOPPING", "kill"), (KILLED, "STOPPED")),
    "stop, then stop now": (*UP, (STOP, "DRAINING"), (STOP_NOW, "STOPPING", "kill"), (KILLED, "STOPPED")),
    "stop now with nothing running": ((STOP_NOW, "STOPPED"),),
    "stop while it waits for the next try": (
        *UP,
        (CRASH, "STARTING", "spawn 0"),
        (CRASH, "BACKOFF"),
        (STOP, "STOPPED"),
    ),
    "stop, then start: it starts when the old one has gone": (
        *UP,
        (STOP, "DRAINING"),
        (START, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STARTING", "spawn 0"),
    ),
    "stop, start, stop": (
        *UP,
        (STOP, "DRAINING"),
        (START, "DRAINING"),
        (STOP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STOPPED"),
    ),
    "restart waits for open requests": (
        *UP,
        (RESTART, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STARTING", "spawn 0"),
        *AGAIN,
    ),
    "restart while it loads": (*UP[:2], (RESTART, "STOPPING", "term"), (CRASH, "STARTING", "spawn 0")),
    "restart of a stopped one starts it": ((RESTART, "STARTING", "spawn 0"),),
    "a death while draining is the end that was wanted": (*UP, (STOP, "DRAINING"), (ABORT, "STOPPED")),
    "the first crash is answered at once": (*UP, (ABORT, "STARTING", "spawn 0"), *AGAIN),
    "crashes in a row wait 0 1 2 4 seconds": (
        *UP,
        (ABORT, "STARTING", "spawn 0"),
        *AGAIN,
        (ABORT, "BACKOFF"),
        (0.9, "BACKOFF"),
        (0.1, "STARTING", "spawn 0"),
        *AGAIN,
        (ABORT, "BACKOFF"),
        (1.9, "BACKOFF"),
        (0.1, "STARTING", "spawn 0"),
        *AGAIN,
        (ABORT, "BACKOFF"),
        (3.9, "BACKOFF"),
        (0.1, "STARTING", "spawn 0"),
    ),
    "60 stable seconds forgive (FC-40)": (
        *UP,
        (ABORT, "STARTING", "spawn 0"),
        *AGAIN,
        (60.0, "READY"),
        (ABORT, "STARTING", "spawn 0"),
    ),
    "a bad flag fails at once (FC-28)": ((START, "STARTING", "spawn 0"), (PERMANENT, "FAILED")),
    "FAILED is left by a start only (FC-26)": (
        (START, "STARTING", "spawn 0"),
        (PERMANENT, "FAILED"),
        (STOP, "FAILED"),
        (STOP_NOW, "FAILED"),
        (READY, "FAILED"),
        (3600.0, "FAILED"),
        (START, "STARTING", "spawn 0"),
    ),
    "exit 0 before it was ready is a failure too (FC-35)": (
        (START, "STARTING", "spawn 0"),
        (CRASH, "STARTING", "spawn 0"),
    ),
    "the same crash twice while starting: once without accelerations": (
        (START, "STARTING", "spawn 0"),
        (ABORT, "STARTING", "spawn 0"),
        (ABORT, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 safe"),
        *AGAIN,
    ),
    "what serves without accelerations stays so": (
        (START, "STARTING", "spawn 0"),
        (ABORT, "STARTING", "spawn 0"),
        (ABORT, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 safe"),
        *AGAIN,
        (60.0, "READY"),
        (CRASH, "STARTING", "spawn 0 safe"),
        (CRASH, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 safe"),
    ),
    "what does not serve without them goes back to the plan": (
        (START, "STARTING", "spawn 0"),
        (ABORT, "STARTING", "spawn 0"),
        (ABORT, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 safe"),
        (ABORT, "BACKOFF"),
        (2.0, "STARTING", "spawn 0"),
    ),
    "each remedy once, alone and then together; then FAILED after eight equal crashes without": (
        (START, "STARTING", "spawn 0"),
        (FATAL, "STARTING", "spawn 0"),
        (FATAL, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 a"),
        (FATAL, "BACKOFF"),
        (2.0, "STARTING", "spawn 0 b"),
        (FATAL, "BACKOFF"),
        (4.0, "STARTING", "spawn 0 a+b"),
        (FATAL, "BACKOFF"),
        (8.0, "STARTING", "spawn 0"),
        *((FATAL, "BACKOFF"), (16.0, "STARTING", "spawn 0")),
        *((FATAL, "BACKOFF"), (32.0, "STARTING", "spawn 0")),
        *((FATAL, "BACKOFF"), (60.0, "STARTING", "spawn 0")) * 3,
        (FATAL, "FAILED"),
    ),
    "a signature whose fault is permanent tries its remedy at once": (
        (START, "STARTING", "spawn 0"),
        (exited(EngineFault.PERMANENT, "flash_attention", ("a",)), "STARTING", "spawn 0 a"),
        *AGAIN,
    ),
    "a signature whose remedies are spent fails": (
        (START, "STARTING", "spawn 0"),
        (exited(EngineFault.PERMANENT, "flash_attention", ("a",)), "STARTING", "spawn 0 a"),
        (exited(EngineFault.PERMANENT, "flash_attention"), "FAILED"),
    ),
    "three stalls in a row end (FC-26)": (
        (START, "STARTING", "spawn 0"),
        *((HUNG, "STOPPING", "term"), (CRASH, "STARTING", "spawn 0")),
        *((HUNG, "STOPPING", "term"), (CRASH, "BACKOFF"), (1.0, "STARTING", "spawn 0")),
        *((HUNG, "STOPPING", "term"), (CRASH, "FAILED")),
    ),
    "a stall tries what may cure it": (
        (START, "STARTING", "spawn 0"),
        *((HUNG, "STOPPING", "term"), (ABORT, "STARTING", "spawn 0")),
        *((HUNG, "STOPPING", "term"), (ABORT, "BACKOFF"), (1.0, "STARTING", "spawn 0 safe")),
        *AGAIN,
    ),
    "two different crashes while starting change nothing": (
        (START, "STARTING", "spawn 0"),
        (ABORT, "STARTING", "spawn 0"),
        (CRASH, "BACKOFF"),
        (1.0, "STARTING", "spawn 0"),
    ),
    "a load that stands still is ended and tried again (FC-26)": (
        *UP[:2],
        (HUNG, "STOPPING", "term"),
        (10.0, "STOPPING", "kill"),
        (KILLED, "STARTING", "spawn 0"),
    ),
    "a wedged engine is ended and tried again (FC-37)": (
        *UP,
        (HUNG, "STOPPING", "term"),
        (10.0, "STOPPING", "kill"),
        (CRASH, "STARTING", "spawn 0"),
        *AGAIN,
        (HUNG, "STOPPING", "term"),
        (CRASH, "BACKOFF"),
    ),
    "a hang whose log names a permanent fault fails": (*UP[:2], (HUNG, "STOPPING", "term"), (PERMANENT, "FAILED")),
    "a hang is no news while it ends": (*UP, (STOP, "DRAINING"), (HUNG, "DRAINING")),
}
