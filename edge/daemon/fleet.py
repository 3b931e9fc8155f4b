"""The models of one running edgellm: a supervisor with its task and its log for each, made from a plan."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from edge.board import device_nodes
from edge.config import Config
from edge.config.values import Preset
from edge.daemon.kept_by_model import KeptRemedies, SpeedBaseline, key
from edge.daemon.planning import process_limits
from edge.gateway.config import GatewayOptions
from edge.linux.best_effort import BestEffortWriter, LogFile
from edge.linux.ordered_writer import Put, at_once
from edge.linux.procfs import Ring, drop_pages
from edge.paths import Folders
from edge.plan.calibration_file import keep_claim
from edge.plan.plan import LaunchPlan, ModelPlan
from edge.plan.prepare import (
    Prepared,
    capability_of,
    config_of,
    preloaded,
    prepare,
    preset_of,
    wants_gpu,
    without_gpu,
    without_servers,
)
from edge.resources import data_dir, load_toml
from edge.supervisor.log_patterns import Patterns
from edge.supervisor.memory_wait import MemoryHolder
from edge.supervisor.model_handle import UNNAMED, ModelHandle
from edge.supervisor.policy import Policy, SupervisorOptions
from edge.supervisor.process import Child
from edge.supervisor.remedies import Remedies
from edge.supervisor.state import KILLED, SupervisorState
from edge.supervisor.status import Degraded, State
from edge.supervisor.supervisor import Supervisor, SupervisorCallbacks
from edge.supervisor.warmup import expected_speed
from edge.telemetry.sample import Sample
from edge.units import printable

# Convert configuration and plan into the options of supervisor and gateway. Pure.


def about(prepared: Prepared | None) -> dict[str, str | bool | None]:
    """Return what the status page shows of board and engine; empty until a plan is made."""
    if prepared is None:
        return {}
    engine = prepared.plan.engine
    known = {"board": prepared.board.module, "engine": engine.id, "engine_version": engine.version}
    # The wheel of the embedded engine holds llama.cpp's page; a server that edgellm builds has none.
    shown = any(rung.settings.ui for model in prepared.plan.models.values() for rung in model.ladder.plans[:1])
    return {**known, "engine_page": engine.kind == "embedded" and shown}


def gateway_config(config: Config, folders: Folders) -> GatewayOptions:
    """Return the [gateway] section with its paths resolved."""
    section = config.gateway
    return GatewayOptions(
        keys_file=Path(section.keys_file) if section.keys_file else folders.config / "keys.toml",
        cors_origins=section.cors_origins,
        hosts=section.hosts,
        max_body_bytes=section.max_body_bytes,
        hold_requests=section.hold.requests,
        hold_bytes=section.hold.bytes,
        hold_seconds=section.hold.seconds,
        unknown_model=section.unknown_model,
        default_model=section.default_model,
        strict=config.strict,
        insecure=config.insecure,
        queue_requests=section.queue,
        heartbeat_s=section.heartbeat_s,
        tls_cert=Path(section.tls_cert) if section.tls_cert else None,
        tls_key=Path(section.tls_key) if section.tls_key else None,
        access_log=None if section.access_log == "off" else folders.instance_run / "log" / "access.log",
        log_json=section.access_log == "json",
        log_prompts=section.log_prompts,
    )


def terms_of(prepared: Prepared, model: ModelPlan, last_good_tokens_s: float | None = None) -> SupervisorOptions:
    """Return the options of a model's supervisor. `last_good_tokens_s`: speed of the last good start on this rung."""
    preset, plan = preset_of(prepared, model.id), model.ladder.plans[model.ladder.chosen]
    return SupervisorOptions(
        policy=policy_of(prepared, plan),
        limits=process_limits(preset),
        strict=prepared.config.strict,
        capability=capability_of(prepared, plan),
        l4t=prepared.board.l4t,
        system_prompt=prepared.system_prompts.get(model.id, preset.system_prompt),
        warmup_tokens=preset.warmup_tokens,
        preload=preloaded(prepared, model),
        ttl_s=0.0 if plan.own_sleep_s else config_of(prepared, model.id).ttl_s,
        expected_speed=expected_speed(prepared.board, (plan.model or model.model).meta, plan, last_good_tokens_s),
        known=(*without_device(prepared, plan), *other_engine(prepared), *without_absent(prepared)),
    )


# A start each minute (the last of backoff_s), for about two years.
_WITHOUT_END = 1_000_000


def policy_of(prepared: Prepared, plan: LaunchPlan) -> Policy:
    """Return the limits of a supervisor; starts for rpc-servers that are to be waited for have no last one."""
    policy = Policy(**to_builtins(prepared.config.restart, enc_hook=str))
    waits = plan.settings.rpc and not may_do_without(prepared, plan)
    return replace(policy, device_attempts=_WITHOUT_END) if waits else policy


def may_do_without(prepared: Prepared, plan: LaunchPlan) -> bool:
    """Return whether this board may serve alone while an rpc-server of the plan is away: each has to allow it."""
    used = [device for device in prepared.config.devices if device.rpc in plan.settings.rpc]
    return bool(used) and all(device.absent == "without" for device in used)


def without_absent(prepared: Prepared) -> tuple[Degraded, ...]:
    """Return a degradation for each rpc-server that the plan was made without."""
    return tuple(Degraded("rpc", each.endpoint, "not used", each.because) for each in prepared.absent)


def gives_pages_back(plan: LaunchPlan, preset: Preset) -> bool:
    """Return whether the page cache holds the weights a second time once the engine has read them.

    On unified memory that is room for a second model; on other machines it costs the GPU nothing, and a restart gains.
    """
    return "unified" in plan.budget and plan.settings.load_mode == "none" and not preset.keep_cached


def give_pages_back(plan: LaunchPlan, model: ModelPlan) -> None:
    """Drop a model's files from the page cache. Blocking; a file that is gone has no pages."""
    for path in (plan.model or model.model).shards:
        with suppress(OSError):
            drop_pages(Path(path))


def without_device(prepared: Prepared, plan: LaunchPlan) -> tuple[Degraded, ...]:
    """Return the degradation of a plan for the CPU under a profile that requests the GPU; empty otherwise."""
    if not wants_gpu(prepared.profile) or plan.settings.n_gpu_layers > 0 or plan.settings.role == "other":
        return ()
    because = prepared.board.refused or "no GPU can be used with this engine"
    return (Degraded("device", "GPU", "CPU", because),)


def other_engine(prepared: Prepared) -> tuple[Degraded, ...]:
    """Return the degradation of an engine that was rolled back; empty otherwise."""
    fallback = prepared.fallback
    return (Degraded("engine", fallback.instead_of, fallback.engine, fallback.because),) if fallback else ()


FILE_BYTES = 4 << 20


class ChildLog:
    """One model's log: a ring in memory, and two files in the run folder (tmpfs, so no flash wear) if it allows."""

    def __init__(self, folder: Path, name: str) -> None:
        self.ring = Ring()
        self.path = folder / f"{name}.log"
        self._file: LogFile | None = None
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = LogFile(self.path, FILE_BYTES, lambda count: f"({count} lines are missing: the disk was slow)")

    def add(self, line: str) -> None:
        self.ring.add(line)
        if self._file is not None:
            self._file.add(printable(line))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


Changed = Callable[[Supervisor, SupervisorState, SupervisorState], None]


class SupervisorTask(Struct, frozen=True):
    """One supervisor and the task that runs it."""

    supervisor: Supervisor
    owner: asyncio.Task[None]


class Fleet:
    """The models of one process. `handles` by model id, placeholders included; the first is the default model.

    `broke` is set when a supervisor's task ends by itself, which is a bug: the process must end. `put` runs what writes
    to the state folder.
    """

    def __init__(
        self,
        folders: Folders,
        on_change: Changed,
        last_good: SpeedBaseline,
        telemetry: Callable[[], Sample | None] = lambda: None,
        put: Put = at_once,
    ) -> None:
        self.handles: dict[str, ModelHandle] = {}
        self.logs: dict[str, ChildLog] = {}
        self.broke = asyncio.Event()
        self._folders = folders
        self._on_change = on_change
        self._last_good = last_good
        self._telemetry = telemetry
        self._put = put
        self._kept = KeptRemedies(folders, put)
        self._table = load_toml(data_dir("build") / "llama-server.toml")
        self._patterns = Patterns(self._table)
        self._tasks: dict[int, SupervisorTask] = {}
        self._socket_number = 0

    def supervisors(self) -> list[Supervisor]:
        return [handle.supervisor for handle in self.handles.values() if handle.supervisor is not None]

    def add(
        self, prepared: Prepared, model: ModelPlan, expected_ready_s: float | None = None
    ) -> tuple[ModelHandle, Supervisor]:
        """Add a model, in its placeholder's handle where there is one. `run` and `begin` the supervisor."""
        supervisor = self.make(prepared, model, expected_ready_s)
        # A request that waits at the placeholder is served by whatever model the plan chose.
        handle = self.handles.get(model.id) or self.handles.pop(UNNAMED, None) or ModelHandle(model.id)
        self.handles[model.id] = handle
        handle.last_load_s = expected_ready_s
        handle.serve(supervisor)
        return handle, supervisor

    def drop_placeholders(self) -> None:
        """Remove what is still without a supervisor: the plan that holds now does not name it."""
        for name in [name for name, handle in self.handles.items() if handle.supervisor is None]:
            self.handles.pop(name).remove()

    def make(
        self, prepared: Prepared, model: ModelPlan, expected_ready_s: float | None = None, *, asleep: bool = False
    ) -> Supervisor:
        """Make a supervisor, not started. Beside one that serves the model already it gets another socket path."""
        engine = prepared.plan.engine
        planned = model.ladder.plans[model.ladder.chosen]
        remote = bool(planned.settings.rpc)
        other = may_do_without(prepared, planned) if remote else prepared.profile.preset.fallback == "cpu"
        good = key(model.model.fingerprint, engine.id, model.ladder.chosen)

        def on_speed(supervisor: Supervisor, tokens_s: float) -> None:
            if not supervisor.status().degraded:
                self._last_good.keep(model.id, good, tokens_s)

        def on_change(supervisor: Supervisor, before: SupervisorState, after: SupervisorState) -> None:
            if after.state is State.READY and before.state is not State.READY:
                # What a kill by an unknown process suggested is no need of every start.
                self._kept.keep(model.id, good, [each for each in after.kept if each.kind != KILLED])
                plan = supervisor.plan
                if gives_pages_back(plan, preset_of(prepared, model.id)):
                    # Not in the executor, whose threads the exit waits for: the disk of the model may hang.
                    threading.Thread(target=give_pages_back, args=(plan, model), daemon=True).start()
            if supervisor.measured and after.state is not before.state:
                self._put(partial(keep_claim, self._folders, model.model.fingerprint, dict(supervisor.measured)))
            self._note_change(supervisor, before, after)

        llama = model.other is None
        callbacks = SupervisorCallbacks(
            on_change=on_change,
            on_line=self._log(model.id).add,
            on_speed=on_speed,
            remedies=Remedies(self._table, engine, model.model, model.id) if llama else None,
            cpu=(lambda: self._other_plan(prepared, model.id, remote=remote)) if other and llama else None,
            driver=lambda: _driver(prepared),
            memory_back=self._memory_back,
            gpu_load=self._gpu_load,
            gpu_holders=self._gpu_holders,
        )
        # A speed of another file, engine or rung would be no measure for this start.
        terms = terms_of(prepared, model, self._last_good.tokens_s(model.id, good))
        return Supervisor(
            model,
            self._socket(model.id),
            self._patterns,
            terms,
            callbacks,
            expected_ready_s=expected_ready_s,
            asleep=asleep,
            kept=self._kept.of(model.id, good),
        )

    def run(self, supervisor: Supervisor, child: Child | None = None, started_at_s: float = 0.0) -> None:
        """Run it in a task. `child`: the engine that the launcher spawned; `started_at_s`: when the launcher began."""
        if child is not None:
            supervisor.adopt(child, started_at_s)
        owner = asyncio.create_task(supervisor.run())
        self._tasks[id(supervisor)] = SupervisorTask(supervisor, owner)
        owner.add_done_callback(self._ended)

    async def dismiss(self, supervisor: Supervisor) -> None:
        """Cancel the task of a supervisor, whose engine is killed if it runs."""
        task = self._tasks.pop(id(supervisor), None)
        if task is not None:
            task.owner.cancel()
            await asyncio.gather(task.owner, return_exceptions=True)

    async def stop(self, *, now: bool) -> None:
        """Drain, TERM, KILL by the supervisors' own deadlines."""
        running = list(self._tasks.values())
        for task in running:
            task.supervisor.stop(now=now)
        await asyncio.gather(*(_stopped(task) for task in running))

    def kill(self) -> None:
        for task in self._tasks.values():
            task.supervisor.stop(now=True)

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            await self.dismiss(task.supervisor)
        for log in self.logs.values():
            log.close()

    def _gpu_load(self) -> float | None:
        latest = self._telemetry()
        return latest.gpu_load_ratio if latest is not None else None

    def _gpu_holders(self) -> list[MemoryHolder]:
        latest = self._telemetry()
        found = latest.gpu_processes if latest is not None else ()
        return [MemoryHolder(each.pid, each.name, each.gpu_memory_bytes or 0) for each in found]

    def _note_change(self, supervisor: Supervisor, before: SupervisorState, after: SupervisorState) -> None:
        """Pass a change on, and let models that failed for want of memory try again when another gives its back."""
        # Not after FAILED: two models that fail for want of memory would start each other without end.
        if before.alive and after.state in (State.STOPPED, State.SLEEPING):
            for other in self.handles.values():
                if other.supervisor is not supervisor:
                    other.memory_back()
        self._on_change(supervisor, before, after)

    def _memory_back(self, supervisor: Supervisor) -> None:
        if (handle := self.handles.get(supervisor.model_id)) is not None:
            handle.memory_back()

    def _ended(self, owner: asyncio.Task[None]) -> None:
        if owner.cancelled():
            return
        self.broke.set()  # before printing, which can fail
        error = owner.exception()
        if error is not None:
            traceback.print_exception(error, file=BestEffortWriter(sys.stderr))

    def _log(self, model_id: str) -> ChildLog:
        if model_id not in self.logs:
            name = self._folders.model_socket(model_id).stem
            self.logs[model_id] = ChildLog(self._folders.instance_run / "log", name)
        return self.logs[model_id]

    def _socket(self, model_id: str) -> Path:
        first = self._folders.model_socket(model_id)
        handle = self.handles.get(model_id)
        if handle is None or handle.supervisor is None:
            return first
        self._socket_number += 1
        # Cut to keep the path within sun_path (108 bytes, unix(7)).
        return first.with_name(f"{first.stem[:28]}~{self._socket_number}.sock")

    def _other_plan(self, prepared: Prepared, model_id: str, *, remote: bool) -> LaunchPlan:
        """Return the model's plan without the GPU, or without `remote` boards. Blocking. Raises EdgeError."""
        reduced = without_servers(prepared.config) if remote else without_gpu(prepared.config)
        instead = prepare(reduced, self._folders)
        ladder = instead.plan.models[model_id].ladder
        return replace(ladder.plans[ladder.chosen], model=instead.plan.models[model_id].model)


async def _stopped(task: SupervisorTask) -> None:
    """Wait until it is at rest, or its task has ended by itself, after which it cannot come to rest."""
    rest = asyncio.create_task(task.supervisor.settled(State.STOPPED, State.FAILED))
    await asyncio.wait([rest, task.owner], return_when=asyncio.FIRST_COMPLETED)
    rest.cancel()


def _driver(prepared: Prepared) -> str | None:
    found = device_nodes.check_nodes(prepared.board)
    return found.evidence if found.ready else None
