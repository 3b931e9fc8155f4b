"""Observe an engine beside llama.cpp by its port, its processes and its memory: its log and its API are its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.board.cgroup import group_bytes
from edge.board.nvml import process_bytes
from edge.linux.procfs import ProcessUsage, family_pids, family_pss_bytes, own_listeners
from edge.linux.timeouts import DeadlineExceeded, in_thread
from edge.linux.tree import Tree
from edge.models.meta import ModelMeta
from edge.plan.plan import LaunchPlan, OtherEngine
from edge.supervisor.events import Drained, StartRefused, Warmed
from edge.supervisor.gates import Gates
from edge.supervisor.log_patterns import Patterns
from edge.supervisor.start import Attempt, LogEvent
from edge.supervisor.status import GATES, Degraded, Failure, Gate
from edge.supervisor.warmup_run import EngineClient
from edge.supervisor.watch import GPU_BYTES_S, Watch
from edge.units import MIB, format_bytes

# A measurement that is above the claim by less is no fault of the claim: libraries, threads, buffers of a request.
_OVER_RATIO = 1.25
_OVER_BYTES = 64 * MIB
NO_PATTERNS = Patterns({"gates": {"weights": [], "kv_cache": []}, "marks": {}, "facts": {}, "signatures": []})
# Why a gate of llama.cpp is not open. These are all that can be stated of an engine whose log is not read.
_NOTES = {
    "driver": "unknown: no probe of this engine shows it",
    "context": "unknown: NVML shows no memory of this engine on a GPU",
    "backend": "unknown: nothing shows which device computes",
    "weights": "unknown: the log of another engine is not read",
    "kv_cache": "not applicable: no KV cache of llama.cpp",
    "warm": "not ready yet",
}
_NO_GPU = "not applicable: no GPU memory is claimed"


def free_port() -> int:
    """Return a loopback port that is free now. Another process may take it before the engine does: see `judge_port`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EngineFoundAt(Struct, frozen=True):
    """The engine of one child: what its table states, and the port that this child got."""

    engine: OtherEngine
    port: int

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return a command line with this port."""
        return tuple(word.replace("{port}", str(self.port)) for word in argv)

    def judge_port(self, pid: int) -> Failure | None:
        """Return why the port must not be used: another process answers, or other machines can reach it. Blocking."""
        addresses = own_listeners(self.port, family_pids(pid))
        if not addresses:
            what = f"port {self.port} is answered by another process than the engine that was started"
            hint = "the command itself has to listen on {port}; a container's port is forwarded by another process"
            return Failure("socket_busy", what, hint)
        open_ = sorted({each for each in addresses if not each.startswith("127.") and each != "::1"})
        if open_:
            what = f"the engine listens on {', '.join(open_)}: other machines could reach it past keys and limits"
            return Failure("not_loopback", what, "have the command listen on 127.0.0.1, often --host 127.0.0.1")
        return None

    def measure(self, pid: int) -> dict[str, int]:
        """Return bytes by domain: PSS or the engine's own control group, NVML by pid. Unknown domains are left out.

        Blocking: smaps_rollup of a process with many mappings takes milliseconds.
        """
        family = family_pids(pid)
        host = max((each for each in (family_pss_bytes(family), group_bytes(Tree(), pid)) if each), default=None)
        gpus = [each for each in map(process_bytes, family) if each is not None]
        found = {}
        for domain in self.engine.claim_bytes:
            known = [host] if domain == "host" else [host, *gpus] if domain == "unified" else [sum(gpus) or None]
            if all(each is not None for each in known):
                found[domain] = sum(each for each in known if each is not None)
        return found


def over_claim(engine: OtherEngine, measured: Mapping[str, int]) -> tuple[Degraded, ...]:
    """Return each domain in which the engine takes clearly more than it claims."""
    return tuple(
        Degraded(
            "memory", f"{format_bytes(claim)} {name}", format_bytes(measured[name]), "it takes more than it claims"
        )
        for name, claim in engine.claim_bytes.items()
        if measured.get(name, 0) > claim * _OVER_RATIO + _OVER_BYTES
    )


class OtherGates(Gates, frozen=True):
    """The gates of an engine that is no llama.cpp: those that cannot be observed state why, and block nothing."""

    gpu: bool = False

    def as_status(self, *, alive: bool = True) -> dict[str, Gate]:
        return {name: self._gate(name, alive) for name in GATES}

    def fail(self, evidence: str) -> OtherGates:
        """Close the gate of readiness: the others state nothing that could have failed."""
        return self.refuse("warm", evidence)  # type: ignore[return-value]

    def _gate(self, name: str, alive: bool) -> Gate:
        opening = self.openings.get(name)
        if opening is not None and alive:
            return Gate(True, opening.at_s, opening.at_s - self.began_s, opening.evidence)
        note = _NO_GPU if not self.gpu and name in ("driver", "context", "backend") else _NOTES[name]
        return Gate(evidence=self.refusals.get(name, note))


class OtherAttempt(Attempt):
    """The observed start of another engine: its lines are kept as evidence of an exit, and match no pattern."""

    def __init__(self, plan: LaunchPlan, engine: OtherEngine, spawned_at_s: float) -> None:
        self._gpu = len(engine.claim_bytes) > 1
        super().__init__(plan, NO_PATTERNS, spawned_at_s, 0)
        self.gates = OtherGates(spawned_at_s, gpu=self._gpu)

    @property
    def wants_gpu(self) -> bool:
        """Whether memory of a GPU is claimed; on unified memory that cannot be told from other memory."""
        return self._gpu

    def stdout(self, raw: str, now_s: float) -> Sequence[LogEvent]:
        """Take a log line: progress lines are of llama-server only."""
        return self.stderr(raw, now_s)

    def answered(self, now_s: float, rss_bytes: int | None = None) -> Sequence[LogEvent]:
        """Take the probe's answer, which is all that shows readiness."""
        return ()

    def on_gpu(self, now_s: float, size_bytes: int, domain: str) -> None:
        """Open the context gate: NVML shows memory of this engine on a GPU."""
        self.gates = self.gates.open("context", now_s, f"NVML: {format_bytes(size_bytes)} of {domain}")


def place(engine: OtherEngine | None) -> EngineFoundAt | None:
    """Return where the next child of another engine is found; None for llama.cpp, which has a socket."""
    return None if engine is None else EngineFoundAt(engine, free_port())


def begin_attempt(
    found: EngineFoundAt | None,
    plan: LaunchPlan,
    patterns: Patterns,
    spawned_at_s: float,
    meta: ModelMeta,
    capability: str | None,
) -> Attempt:
    """Return the observed start of a child, by llama.cpp's lines or without any."""
    if found is not None:
        return OtherAttempt(plan, found.engine, spawned_at_s)
    return Attempt(plan, patterns, spawned_at_s, meta.tensor_bytes, capability=capability)


class OtherWatch(Watch):
    """The observation of an engine beside llama.cpp: by its readiness path, its port and its memory."""

    attempt: OtherAttempt

    def __init__(self, found: EngineFoundAt, *args: Any, **options: Any) -> None:
        probe = EngineClient(Path("/nonexistent"), found.port, found.engine.ready)
        super().__init__(*args, probe=probe, **options)
        self._found = found

    def _stdout(self, raw: str) -> None:
        """Take a line of the log: other programs write theirs to either stream."""
        self._stderr(raw)

    async def _save_and_end(self) -> None:
        """Let it end by SIGTERM: another engine may have something to write."""
        self._post(Drained())

    async def _listens(self) -> bool:
        refused = await in_thread(partial(self._found.judge_port, self.child.pid), None)
        if refused is not None:
            self._post(StartRefused(refused))
        return refused is None

    def _endless(self, *_: object) -> bool:
        """Judge no stage of another engine: which of them only compute, and for how long, is not known."""
        return False

    async def _look_at_memory(self, vitals: ProcessUsage | None) -> None:
        """Measure the memory of the engine, which no plan states in advance."""
        try:
            measured = await in_thread(partial(self._found.measure, self.child.pid), GPU_BYTES_S)
        except DeadlineExceeded:
            return  # a driver that hangs: what was measured before holds
        self.measured |= {name: max(size, self.measured.get(name, 0)) for name, size in measured.items()}
        self._memory = over_claim(self._found.engine, measured)
        for domain in measured.keys() - {"host", "unified"}:
            self.attempt.on_gpu(time.monotonic(), measured[domain], domain)

    async def _warm(self) -> None:
        """Report readiness by the probe's answer: a request that warms another engine up is not known."""
        await self._look_at_memory(None)
        self.first_token_s = time.monotonic()
        evidence = f"GET {self._found.engine.ready} is answered; no warm-up request is known"
        self.attempt.warmed(self.first_token_s, evidence)
        self._post(Warmed())


def begin_watch(found: EngineFoundAt | None, *args: Any, **options: Any) -> Watch:
    """Return the observation of a child, of llama.cpp or of another engine."""
    return Watch(*args, **options) if found is None else OtherWatch(found, *args, **options)
