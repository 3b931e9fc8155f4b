"""The history of one instance, starts.jsonl and crashes.jsonl in its state folder, and the calibration of its plans."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from edge.board.readrate import measure as measure_read_rate
from edge.board.storage import Mount, mount_of, mounts
from edge.daemon.planning import LaunchTimes
from edge.daemon.remembered_launch import identity
from edge.daemon.start_timeline import Instants, spans, start_record, with_limit, with_service_start
from edge.linux.files import read_json, visible, write_atomic
from edge.linux.ordered_writer import OrderedWriter
from edge.linux.procfs import read_boot_id, read_usage, resident_ratio
from edge.linux.slow_reads import ReadHangs, answer_of
from edge.linux.timeouts import DeadlineExceeded, in_thread
from edge.linux.tree import Tree
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile
from edge.paths import Folders
from edge.plan import start_records
from edge.plan.argv import redacted_args
from edge.plan.calibration import measure
from edge.plan.calibration_file import calibration_path, record
from edge.plan.plan import LaunchPlan, Measured
from edge.service import unit
from edge.supervisor.state import SupervisorState
from edge.supervisor.status import Failure, State
from edge.supervisor.supervisor import Supervisor

Samples = Callable[[str, float], Sequence[Sequence[float | int | None]]]  # (model id, zero_s) → telemetry samples
READ_BYTES = 256 << 20  # 64 MiB for each number of streams: enough for several GB/s, a second and a half from eMMC
READ_LIMIT_S = 120.0  # of that measurement: 2 MB/s, slower than any disk that holds models
SHOWN_CRASHES = 5
RECORDS_S = 1.0  # to read the records of this instance, before the gateway opens

_CACHE_SUBJECTS = ("kv_cache", "kv_type", "n_ctx", "n_parallel", "n_gpu_layers", "device")


class PastRecords:
    """The past starts and the last crashes of one instance, in memory: a request must not wait for their disk."""

    def __init__(self, folders: Folders) -> None:
        """Read the files of the state folder. Blocking; a disk that hangs has none."""
        self._starts: list[dict[str, Any]] = []
        crashes: list[dict[str, Any]] = []
        with suppress(ReadHangs):
            self._starts = answer_of(partial(start_records.read, folders.starts), RECORDS_S, RECORDS_S)
            crashes = answer_of(partial(start_records.read, folders.crashes), RECORDS_S, RECORDS_S)
        self._crashes = deque(map(_shown, crashes), maxlen=SHOWN_CRASHES)

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Return the records of starts.jsonl, oldest first."""
        return list(self._starts)

    @property
    def crashes(self) -> list[dict[str, Any]]:
        """Return the last crashes, oldest first, without evidence and argv."""
        return list(self._crashes)

    def started(self, record: dict[str, Any]) -> None:
        self._starts = [*self._starts, record][-start_records.KEPT_LINES :]

    def crashed(self, record: Mapping[str, Any]) -> None:
        self._crashes.append(_shown(record))

    def change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Replace each start by `change(record)`."""
        self._starts = [change(record) for record in self._starts]


def _shown(crash: Mapping[str, Any]) -> dict[str, Any]:
    return {name: crash.get(name) for name in ("at", "model", "state", "rung", "kind", "hint")}


class Recorder:
    """A writer of starts and crashes. `on_lost` receives one sentence when they cannot be written."""

    def __init__(
        self,
        folders: Folders,
        writer: OrderedWriter,
        past: PastRecords,
        of: tuple[str, str],
        samples: Samples = lambda model, zero_s: (),
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`of`: the ids of engine and board."""
        self._folders = folders
        self._writer = writer
        self._past = past
        self._engine, self._board = of
        self._samples = samples
        self._on_lost = on_lost
        self._lost = False
        self._boot_id = read_boot_id() or "unknown"
        self.resident: dict[str, float | None] = {}
        # A later start of the same plan says nothing new, and its plan was not made with what the first one taught.
        self._calibrated: WeakSet[Supervisor] = WeakSet()
        self._first_id: str | None = None  # of the start that this process began with, until its service is noted

    def look_at_cache(self, model_id: str, path: Path) -> None:
        """Note how much of the model is in the page cache before its engine reads it, unless its disk hangs."""

        def look() -> None:
            self.resident[model_id] = resident_ratio(path)

        threading.Thread(target=look, name="page-cache", daemon=True).start()

    def last_ready_s(self, model_id: str) -> float | None:
        """Return the seconds that the last start of this model took."""
        for row in reversed(self._past.starts):
            if row.get("model") == model_id and isinstance(row.get("ready_s"), (int, float)):
                return float(row["ready_s"])
        return None

    def ready(self, supervisor: Supervisor, launch: LaunchTimes) -> None:
        """Record a start that became ready, and calibrate by it."""
        self._start(supervisor, "ready", launch)
        self._calibrate(supervisor)

    def crashed(self, supervisor: Supervisor, before: SupervisorState, failure: Failure, launch: LaunchTimes) -> None:
        """Record the end of an engine, and its start if it was not ready yet."""
        if before.ready_since is None:
            self._start(supervisor, f"failed: {failure.kind}", launch)
        self._crash(supervisor, before, failure)

    def _start(self, supervisor: Supervisor, outcome: str, launch: LaunchTimes) -> None:
        """Record one start. Only the launcher's own first child has its times; others begin with their spawn."""
        watch = supervisor.watch
        if watch is None:
            return
        start_id = uuid.uuid4().hex
        if not (supervisor.launched and supervisor.restarts == 0):
            launch = LaunchTimes(supervisor.started_at_s or time.monotonic())
        else:
            self._first_id = start_id
        began_s = launch.began_s
        instants = Instants(
            process_s=began_s,
            spawned_s=watch.child.spawned_at_s,
            engine_ready_s=watch.engine_ready_s,
            ready_s=time.monotonic() if outcome == "ready" else None,
            first_token_s=watch.first_token_s,
        )
        weights_bytes = supervisor.model.model.meta.tensor_bytes
        row = start_record(
            start_id=start_id,
            boot_id=self._boot_id,
            model=supervisor.model_id,
            engine=self._engine,
            rung=supervisor.machine.rung,
            args=redacted_args(watch.attempt.plan.args),
            resident_ratio=self.resident.pop(supervisor.model_id, None),
            instants=instants,
            spans=spans(instants, launch.spans, watch.attempt.marks, weights_bytes),
            weights_bytes=weights_bytes,
            file=supervisor.model.model.path,
            board=self._board,
            spawn_cpu_s=launch.spawn_cpu_s,
            outcome=outcome,
            remembered=launch.remembered,
            samples=self._samples(supervisor.model_id, began_s),
            gates={name: opening.at_s for name, opening in watch.attempt.gates.openings.items()},
            since_boot=start_id == self._first_id,
            load_mode=watch.attempt.facts.load_mode,
        )
        self._past.started(row)
        self._append(self._folders.starts, row)

    async def complete(self, model: ModelFile) -> None:
        """Add to the records what takes time to find out: when systemd started the service, and the disk's limit.

        How fast the model's file can be read at all is measured once: a quarter of a second on an NVMe drive. Direct
        reads leave the page cache as it is.
        """
        start_id, self._first_id = self._first_id, None
        if start_id is not None and (service := unit.own()) is not None:
            service_s = await in_thread(partial(unit.begun_s, service), None)
            if service_s is not None:
                self._change(partial(with_service_start, start_id=start_id, service_s=service_s))
        rate = await self._read_rate(model.path) if model.shards else None
        if rate is not None:
            self._change(partial(with_limit, file=model.path, others=self._past.starts, **rate))

    async def _read_rate(self, file: str) -> dict[str, Any] | None:
        """Return `bytes_s` and `streams` of the best direct reads; None where they cannot be made."""
        path = self._folders.instance_state / "read_rates.json"
        try:
            known, measured = await in_thread(partial(_known_rate, path, file), READ_LIMIT_S)
        except DeadlineExceeded:
            return None
        if measured:
            self._writer.put(partial(_keep_rate, path, file, known))
        return {"bytes_s": known["bytes_s"], "streams": known["streams"]} if "bytes_s" in known else None

    def _calibrate(self, supervisor: Supervisor) -> None:
        """Store the memory that the engine allocated, by which the next plan of this architecture is corrected."""
        watch = supervisor.watch
        if watch is None or supervisor in self._calibrated:
            return
        self._calibrated.add(supervisor)
        plan, vitals = watch.attempt.plan, read_usage(watch.child.pid)
        file = plan.model or supervisor.model.model
        subject = f"{file.name} {file.quant}, {plan.settings.n_ctx} tokens"
        log, rss_bytes = watch.attempt.log.loading, vitals.rss_bytes if vitals else None
        measured = measure(subject, log, rss_bytes, watch.gpu_bytes, drafts=file.drafter_bytes > 0)
        # What the engine changed by itself, or put elsewhere, says nothing about the formula.
        changed = any(item.subject in _CACHE_SUBJECTS for item in watch.degraded)
        meta = None if changed else file.meta
        if measured.weights_bytes:  # older builds do not log their buffers
            path, arch = calibration_path(self._folders), file.meta.arch
            self._writer.put(partial(_keep_calibration, path, self._engine, arch, plan, measured, meta))

    def _crash(self, supervisor: Supervisor, before: SupervisorState, failure: Failure) -> None:
        row = {
            "schema": 1,
            "at": time.time(),
            "boot_id": self._boot_id,
            "model": supervisor.model_id,
            "state": State.READY.value if before.ready_since is not None else before.state.value,
            "rung": before.rung,
            "kind": failure.kind,
            "hint": failure.hint,
            "evidence": failure.evidence,
            "argv": list(supervisor.plan.argv),
        }
        self._past.crashed(row)
        self._append(self._folders.crashes, row)

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        self._writer.put(partial(start_records.append, path, record), partial(self._appended, path))

    def _change(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._past.change(change)
        self._writer.put(partial(start_records.update, self._folders.starts, change))

    def _appended(self, path: Path, written: bool) -> None:
        """Report once that the disk is full or read-only; a start goes on without its record."""
        if not written and not self._lost:
            self._lost = True
            self._on_lost(f"{path} cannot be written (is the disk full or read-only?): starts and crashes are not kept")


def _known_rate(path: Path, file: str) -> tuple[dict[str, Any], bool]:
    """Return the read rate of a file as kept in `path`, or as measured now, and whether it was measured."""
    known, found = _read_object(path).get(file), identity(file)
    if isinstance(known, dict) and known.get("identity") == found and _is_rate(known):
        return known, False
    try:
        rate = measure_read_rate(Path(file), budget_bytes=READ_BYTES)
    except OSError:
        return {}, False
    return {"identity": found} | ({"bytes_s": round(rate.bytes_s), "streams": rate.streams} if rate else {}), True


def _is_rate(known: Mapping[str, Any]) -> bool:
    """Return whether a kept rate has both of its figures, or neither: direct reads could not be made."""
    figures = [known.get(name) for name in ("bytes_s", "streams")]
    return figures == [None, None] or all(isinstance(each, int) and not isinstance(each, bool) for each in figures)


def _keep_rate(path: Path, file: str, known: dict[str, Any]) -> None:
    with suppress(OSError):
        write_atomic(path, json.dumps(_read_object(path) | {file: known}) + "\n")


def _keep_calibration(
    path: Path, engine: str, arch: str, plan: LaunchPlan, measured: Measured, meta: ModelMeta | None
) -> None:
    with suppress(OSError):
        record(path, engine, arch, plan, measured, meta)


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object of ours; empty if it is missing or damaged."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


# Folders whose content is lost at power-off: named in one warning at the start of the service.

# Types in mountinfo's field behind " - " (proc(5)); `rootfs` is an initramfs over which no disk was mounted.
_VOLATILE = {"tmpfs", "ramfs", "rootfs"}


def lost_on_reboot(folders: Folders, tree: Tree) -> str | None:
    """Return a warning that names the lost folders, or None if state and cache are on disk."""
    lost = (
        (folders.instance_state, "the history of starts and crashes"),
        (folders.cache, "what was compiled and looked up (kernels, engine flags)"),
    )
    table = mounts(tree)
    kinds = [(why, what, path) for path, what in lost if (why := _why_lost(path, table)) is not None]
    return "; ".join(f"{path} {why}: {what} is lost at power-off" for why, what, path in kinds) or None


def _why_lost(path: Path, table: list[Mount]) -> str | None:
    # The folder may not exist yet: its nearest existing parent has the file system on which it will be made.
    here = next(part for part in (path, *path.parents) if visible(part))
    if not os.access(here, os.W_OK):
        return "cannot be written"
    mount = mount_of(table, here)
    return f"is in memory ({mount.filesystem})" if mount is not None and mount.filesystem in _VOLATILE else None
