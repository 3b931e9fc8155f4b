"""Time the start of the real engine on the real model, per load mode, with the file in the page cache and without."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from signal import SIGKILL, SIGTERM

from msgspec import Struct, field
from msgspec.structs import replace

from edge.board.storage import mount_of, mounts
from edge.builder.smoke import request
from edge.errors import TimedOutError, UnavailableError
from edge.linux import prefetch
from edge.linux.procfs import drop_pages
from edge.linux.tree import Tree
from edge.plan.choices import LoadChoice, offload_of, size_class
from edge.plan.plan import LaunchPlan, ModelPlan, Plan
from edge.supervisor.process import Child, spawn

READY_LIMIT_S = 900.0
PREFETCH = "+prefetch"  # of a mode: the file is read ahead of the engine where it is not in the page cache
_LOOK_S = 0.002
# Two medians of one mode lay up to 5 % apart on an H200: a second mode is only kept if it gains more than that.
_GAIN = 0.95


class LoadRow(Struct):
    """The starts of one load mode. `seconds` from spawn to /health 200; `note`: why the mode was not measured."""

    mode: str
    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    note: str | None = None

    @property
    def median_s(self) -> float | None:
        """Return the mean of the medians: a service starts cold after boot and warm after a crash."""
        medians = [statistics.median(values) for values in (self.cold_s, self.warm_s) if values]
        return sum(medians) / len(medians) if medians else None


class EngineBench:
    """One measurement. `plan_for` returns the plan under a value of one setting; `socket_path` is free to use."""

    def __init__(
        self, plan_for: Callable[[str], Plan], model_id: str, socket_path: Path, on_step: Callable[[str], None]
    ) -> None:
        self._plan_for = plan_for
        self.model_id = model_id
        self._socket_path = socket_path
        self._on_step = on_step
        self.plans: dict[str, tuple[Plan, ModelPlan, LaunchPlan]] = {}

    def _plan(self, way: str, value: str) -> LaunchPlan:
        """Plan the model with `value`, kept as `plans[way]`. Raises EdgeError where it cannot be planned."""
        plan = self._plan_for(value)
        model = plan.models[self.model_id]
        launch = model.ladder.plans[model.ladder.chosen]
        self.plans[way] = (plan, model, launch)
        return launch


class LoadBench(EngineBench):
    """Starts one model under several load modes."""

    def measure(self, modes: Sequence[str], *, repeat: int, cold: bool, warm: bool) -> list[LoadRow]:
        """Measure the modes in turns, so that other load falls on all of them. Raises what planning raises."""
        rows = {mode: LoadRow(mode) for mode in modes}
        for mode, row in rows.items():
            wanted = mode.removesuffix(PREFETCH)
            used = self._plan(mode, wanted).settings.load_mode
            if used != wanted and wanted != "auto":
                row.note = f"the plan uses {used} instead: {wanted} needs all weights on the GPU"
        measured = [row for row in rows.values() if row.note is None]
        for number in range(repeat):
            for row in measured:
                if cold:
                    row.cold_s.append(self._start(row.mode, cold=True))
                if warm:
                    row.warm_s.append(self._start(row.mode, cold=False))
                self._on_step(f"{row.mode}: {number + 1} of {repeat}")
        return list(rows.values())

    def _start(self, mode: str, *, cold: bool) -> float:
        _, model, launch = self.plans[mode]
        file = launch.model or model.model
        prepare = drop_pages if cold else read_through
        for path in file.shards:
            prepare(Path(path))
        host = launch.budget.get("unified") or launch.budget.get("host")
        with running(replace(launch, argv=launch.argv_at(0.0 if cold else 1.0)), self._socket_path) as child:
            ahead = mode.endswith(PREFETCH) and cold
            reader = prefetch.start(file.shards, child.pid, host.reserve_bytes if host else 0) if ahead else None
            try:
                return wait_ready(child)
            finally:
                if reader is not None:
                    reader.kill()
                    reader.wait()


@contextmanager
def running(launch: LaunchPlan, socket_path: Path) -> Iterator[Child]:
    """Run an engine; it is terminated, and killed after 10 s, at the end."""
    child = spawn(launch.argv, launch.env, socket_path)
    for pipe in (child.stdout, child.stderr):
        os.set_blocking(pipe.fileno(), False)
    try:
        yield child
    finally:
        child.send(SIGTERM)
        if child.wait(10) is None:
            child.send(SIGKILL)
            child.wait(10)
        child.close()
        socket_path.unlink(missing_ok=True)


def wait_ready(child: Child) -> float:
    """Return the seconds from spawn to /health 200. Raises UnavailableError if the engine ends, TimedOutError."""
    last = b""
    while time.monotonic() - child.spawned_at_s < READY_LIMIT_S:
        for pipe in (child.stdout, child.stderr):  # a full pipe would stop the engine
            last = (last + (pipe.read(1 << 16) or b""))[-2000:]
        if child.poll() is not None:
            line = last.decode(errors="replace").strip().splitlines()[-1:] or ["no log"]
            raise UnavailableError(f"the engine ended while it loaded: {line[0]}", "see `edgellm doctor`")
        if health(child.socket_path) == 200:
            return time.monotonic() - child.spawned_at_s
        time.sleep(_LOOK_S)
    raise TimedOutError(f"the engine was not ready after {READY_LIMIT_S:.0f} s")


def health(path: Path) -> int | None:
    """Return the status of GET /health; None before the engine listens."""
    try:
        return request(path, "GET", "/health", timeout_s=5)[0]
    except (OSError, HTTPException):
        return None


def read_through(path: Path) -> None:
    """Bring a file into the page cache, as far as memory allows."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(8 << 20)
        while file.readinto(buffer):
            pass


def winner(rows: Sequence[LoadRow], *, warm: bool = False) -> LoadRow | None:
    """Return the mode that was soonest ready; `auto` is no mode of its own. `warm`: with the file in the page cache.

    Reading ahead changes no warm start: of a mode with and without, the one that was sooner cold.
    """
    measured = [row for row in rows if row.median_s is not None and row.mode != "auto"]
    if warm and all(row.warm_s and row.cold_s for row in measured):
        by_mode = [
            min(same, key=lambda row: statistics.median(row.cold_s))
            for mode in dict.fromkeys(row.mode.removesuffix(PREFETCH) for row in measured)
            if (same := [row for row in measured if row.mode.removesuffix(PREFETCH) == mode])
        ]
        return min(by_mode, key=lambda row: statistics.median(row.warm_s), default=None)
    return min(measured, key=lambda row: row.median_s or 0.0, default=None)


def cold_winner(rows: Sequence[LoadRow], usual: LoadRow) -> tuple[LoadRow, float] | None:
    """Return the mode that is sooner than `usual` without the page cache, and below which share of the file in it.

    None where `usual` is the soonest there, too. Between the two measured points a start is taken to gain in proportion
    to what is in the page cache.
    """
    others = [row for row in rows if row.cold_s and row.warm_s and "auto" not in row.mode and PREFETCH not in row.mode]
    other = min(others, key=lambda row: statistics.median(row.cold_s), default=usual)
    if not (usual.cold_s and usual.warm_s) or other.mode == usual.mode.removesuffix(PREFETCH):
        return None
    gain_s = statistics.median(usual.cold_s) - statistics.median(other.cold_s)
    loss_s = statistics.median(other.warm_s) - statistics.median(usual.warm_s)
    if loss_s <= 0 or statistics.median(other.cold_s) > _GAIN * statistics.median(usual.cold_s):
        return None
    return other, round(gain_s / (gain_s + loss_s), 2)


def may_change(plan: Plan, model: ModelPlan, launch: LaunchPlan) -> bool:
    """Return whether a start without the page cache may take a mode of its own: see `edge.plan.ladder.cold_choice`."""
    full = launch.settings.n_gpu_layers > (launch.model or model.model).meta.n_layer
    apart = full and not launch.settings.cpu_expert_layers and not launch.settings.rpc
    return apart and not plan.board.unified_memory


def choice_of(
    best: LoadRow, plan: Plan, model: ModelPlan, launch: LaunchPlan, rows: Sequence[LoadRow] = ()
) -> LoadChoice:
    """Return the choice that `--apply` keeps for this board, engine, disk, size class and offload.

    `rows`: what was measured, where a cold start may take a mode of its own.
    """
    file = launch.model or model.model
    mount = mount_of(mounts(Tree(Path("/"))), Path(file.path).resolve().parent)
    offload = offload_of(launch.settings.n_gpu_layers, file.meta.n_layer)
    point = mount.point if mount else "/"
    seconds = round(best.median_s or 0.0, 3)
    mode, _, ahead = best.mode.partition("+")
    kind = size_class(file.bytes)
    choice = LoadChoice(plan.board.id, plan.engine.id, point, kind, offload, mode, seconds, bool(ahead))
    cold = cold_winner(rows, best) if may_change(plan, model, launch) else None
    if cold is None:
        return choice
    # The reader at boot would only keep the disk from the engine.
    return replace(choice, prefetch=False, cold_mode=cold[0].mode, cold_below=cold[1])
