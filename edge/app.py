"""The composition root of a running edgellm: supervisors, gateway, control socket. Imported after the spawn."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from edge.coldstart import journal
from edge.coldstart.timeline import Span
from edge.comeback import recover_gpu
from edge.config import Config, load
from edge.control import Actions, Control, LogQuestion
from edge.engine.choose import fallback_now
from edge.errors import EdgeError
from edge.fleet import Fleet
from edge.folders import Folders, system_folders
from edge.gateway.server import serve
from edge.governing import Governing, telemetry_of
from edge.instance import Lock
from edge.lastgood import LastGood
from edge.listen import Listeners
from edge.overview import log_lines, overview
from edge.prepare import HostView, Prepared, prepare
from edge.recorder import Recorder
from edge.reload import Reload, after_restart
from edge.service import awaited, keeping, unit
from edge.service.front import front
from edge.service.herald import MORE_S, Herald
from edge.service.reporter import console_for
from edge.status import Failure, ModelStatus, State
from edge.supervisor.child import Child
from edge.supervisor.model_handle import UNNAMED, ModelHandle
from edge.supervisor.notify import Notifier
from edge.supervisor.state import Machine, died
from edge.supervisor.supervisor import Supervisor
from edge.telemetry.telemetry import Telemetry
from edge.terms import gateway_config

PROGRESS_LOOK_S = 0.2


class LaunchTimes(NamedTuple):
    """When the process began (monotonic), the launcher's spans since then, and its CPU time until the spawn."""

    began_s: float
    spans: Sequence[Span]
    spawn_cpu_s: float | None


class Launched(NamedTuple):
    """A started process with open sockets and running engines. `plan` is the error to serve where none was made."""

    folders: Folders
    config: Config
    plan: Prepared | EdgeError
    lock: Lock
    listeners: Listeners
    notifier: Notifier
    children: Mapping[str, Child]
    flags: Mapping[str, object]  # of the command line, for a reload
    as_json: bool
    times: LaunchTimes


def run(launch: Launched) -> int:
    """Serve until stopped. Return 0 after an ordinary stop, 1 if a model is FAILED."""
    return asyncio.run(App(launch).run())


class App:
    """Everything that runs, and how it ends."""

    def __init__(self, launch: Launched, telemetry: Telemetry | None = None) -> None:
        """`telemetry` stands in for that of the board that was found."""
        self.launch = launch
        self.config = launch.config  # with `prepared`, replaced by each reload
        self.prepared: Prepared | None = None
        self.console = console_for(os.environ, as_json=launch.as_json)
        self.urls = launch.listeners.urls(tls=bool(launch.config.gateway.tls_cert))  # no reload changes them
        self.fleet = Fleet(launch.folders, self._changed, LastGood(launch.folders))
        self.herald = Herald(launch.notifier, self.statuses)
        self.vigil: awaited.Vigil | None = None
        self.governing = Governing(
            telemetry or telemetry_of(launch.plan, launch.config, launch.folders.models),
            self.console,
            self.fleet.handles,
        )
        self.reloading = Reload(self.fleet)
        self._times = launch.times  # a late plan has a launch of its own
        self.recorder: Recorder | None = None
        self._unit = unit.own()
        self._arrival: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stops = 0
        self._stop = asyncio.Event()
        self._build()

    # --- building ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        plan = self.launch.plan
        if isinstance(plan, EdgeError):
            if awaited.may_come(plan):
                self.vigil = awaited.Vigil(self.config, plan)
                self.fleet.handles.update(self.vigil.placeholders)
            else:
                handle = self.fleet.handles[UNNAMED] = ModelHandle(UNNAMED)
                handle.fail(awaited.failure_of(plan))
            return
        self._take(plan)
        for model_id, model in plan.plan.models.items():
            handle, _ = self.fleet.add(plan, model, self._expected_s(model_id))
            self._added(handle)

    def _take(self, prepared: Prepared) -> None:
        """This plan holds from now on."""
        self.prepared, self.config = prepared, prepared.config
        self.recorder = Recorder(
            self.launch.folders, prepared.plan.engine.id, self.governing.samples, self.console.warn
        )
        for model_id, model in prepared.plan.models.items():
            self.recorder.look_at_cache(model_id, Path(model.model.path))

    def _added(self, handle: ModelHandle) -> None:
        self.governing.limit(handle)
        self.herald.watch(self.fleet.supervisors())

    def statuses(self) -> list[ModelStatus]:
        return [handle.status() for handle in self.fleet.handles.values()]

    def _expected_s(self, model_id: str) -> float | None:
        return self.recorder.last_ready_s(model_id) if self.recorder is not None else None

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        launch = self.launch
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        for supervisor in self.fleet.supervisors():
            child = launch.children.get(supervisor.model_id)
            self.fleet.run(supervisor, child, self._times.began_s)
            if child is None:  # behind a socket a spawn that failed is tried once more, and then explained
                supervisor.begin()
        gateway = await serve(self._gateway(), launch.listeners.sockets)
        herald, senses = asyncio.create_task(self.herald.run()), asyncio.create_task(self.governing.telemetry.run())
        launch.notifier.ready("listening")
        as_service = launch.folders.run == system_folders().run
        control = Control(launch.folders.control_socket, self._actions(), for_group=as_service)
        await control.start()
        if self.prepared is not None:
            self.console.planned(self.prepared.plan, self.prepared.profile.name, self.urls)
        self._tell_troubles()
        show = asyncio.create_task(self._show_progress())
        stopped = asyncio.create_task(self._stop.wait())
        back = asyncio.create_task(recover_gpu(lambda: self.prepared, self.fleet, self._plan_again))
        broke = asyncio.create_task(self.fleet.broke.wait())
        self._arrival = asyncio.create_task(self._arrive())
        await asyncio.wait([stopped, broke], return_when=asyncio.FIRST_COMPLETED)
        await _end([show, self._arrival, back, broke, stopped, *self._tasks])
        failed = any(status.state is State.FAILED for status in self.statuses())
        await self._wind_down()
        await gateway.cleanup()
        await control.close()
        await _end([herald, senses])
        await self.fleet.close()
        launch.lock.release()
        return 1 if failed else 0

    def _gateway(self) -> web.Application:
        def fault(failure: Failure) -> None:
            self.console.failed("gateway", failure, gives_up=True)

        config = gateway_config(self.config, self.launch.folders)
        on_fault = fault if self.launch.listeners.inherited else None
        app = front(self.fleet.handles, config, alive=lambda: self.herald.alive, on_fault=on_fault)
        self.governing.attach(app)
        return app

    def _tell_troubles(self) -> None:
        for model_id, handle in self.fleet.handles.items():
            failure = handle.status().failure
            if failure is not None and self.vigil is not None and self.vigil.patience_s:
                self.console.waits(model_id, failure, self.vigil.patience_s)
            elif failure is not None and self.prepared is None:
                self.console.failed(model_id, failure, gives_up=True)
        for warning in self._unit.warnings if self._unit and self.launch.listeners.inherited else ():
            self.console.warn(warning)
        lost = keeping.lost_on_reboot(self.launch.folders) if self.launch.listeners.inherited else None
        if lost is not None:
            self.console.warn(lost)

    async def _arrive(self) -> None:
        """What could not be planned at start is planned as soon as it can be, and served from then on."""
        if self.vigil is None:
            return
        launch, vigil = self.launch, self.vigil

        def gave_up(failure: Failure) -> None:
            for model_id in vigil.placeholders:
                self.console.failed(model_id, failure, gives_up=True)

        def planned(waited_s: float) -> Prepared:
            return prepare(self.config, launch.folders, HostView(waited_s=waited_s))

        prepared = await vigil.until(planned, gave_up)
        self._times = LaunchTimes(time.monotonic(), (), None)
        self._take(prepared)
        for model_id, model in prepared.plan.models.items():
            handle, supervisor = self.fleet.add(prepared, model, self._expected_s(model_id))
            self._added(handle)
            self.fleet.run(supervisor)
            supervisor.begin()
        self._settle_placeholders()
        self.console.planned(prepared.plan, prepared.profile.name, self.urls)

    def _settle_placeholders(self) -> None:
        """End the waiting for a first plan: there is one."""
        self.fleet.drop_placeholders()
        self.vigil = None

    async def _wind_down(self) -> None:
        """Drain, TERM, KILL by the machine's own deadlines; a second signal makes it KILL now."""
        self.launch.notifier.stopping("stopping: open requests may finish", more_s=MORE_S)
        self.governing.rest()
        await self.fleet.stop(now=self._stops > 1)

    def _asked_to_stop(self) -> None:
        self.stop(now=self._stops > 0)

    def stop(self, now: bool = False) -> None:
        self._stops += 1
        self._stop.set()
        if now:
            self.fleet.kill()
        elif self._stops == 1:
            self.console.say("stopping: open requests may finish (again to stop at once)")

    async def _show_progress(self) -> None:
        while True:
            rising = [status for status in self.statuses() if status.state is State.LOADING]
            for status in rising:
                self.console.progress(status)
            await asyncio.sleep(PROGRESS_LOOK_S if rising else 1.0)

    # --- what changed ------------------------------------------------------------------------------------------------

    def _changed(self, supervisor: Supervisor, before: Machine, after: Machine) -> None:
        if after.state is before.state:
            return
        self.governing.became(supervisor, after)
        self.console.state(supervisor.status())
        self.herald.notify()
        if after.state is State.READY:
            self._record_start(supervisor, "ready")
            if self.recorder is not None:
                self.recorder.calibrate(supervisor)
            began_s = supervisor.started_at_s or self._times.began_s
            self.console.ready(supervisor.status(), time.monotonic() - began_s, self.urls)
        if died(before, after) and after.failure is not None:
            self._record_crash(supervisor, before, after.failure)
            self.console.failed(supervisor.model_id, after.failure, gives_up=after.state is State.FAILED)

    def _record_start(self, supervisor: Supervisor, outcome: str) -> None:
        times, recorder = self._times, self.recorder
        if recorder is None:
            return
        if supervisor.launched and supervisor.restarts == 0:
            recorder.start(supervisor, outcome, *times)
        else:
            recorder.start(supervisor, outcome, supervisor.started_at_s or time.monotonic(), (), None)

    def _record_crash(self, supervisor: Supervisor, before: Machine, failure: Failure) -> None:
        if before.ready_since is None:
            self._record_start(supervisor, f"failed: {failure.kind}")
        if self.recorder is not None:
            self.recorder.crash(supervisor, before, failure)
        prepared = self.prepared
        if prepared is not None and not prepared.config.engine and prepared.fallback is None:
            fallback = fallback_now(self.launch.folders.engines, journal.read(self.launch.folders.starts))
            if fallback is not None:
                self.console.warn(f"{fallback.because}: {fallback.engine} serves instead")
                self._spare(self._reload())

    # --- the control socket ------------------------------------------------------------------------------------------

    def _actions(self) -> Actions:
        return Actions(
            status=self.status,
            logs=self._log_lines,
            stop=self.stop,
            restart=self._restart,
            reload=self._reload,
            telemetry=lambda: self.governing.telemetry.document(history=False),
        )

    def status(self) -> dict[str, Any]:
        own = self._unit if self.launch.listeners.inherited else None
        telemetry, began_s = self.governing.telemetry.status(), self._times.began_s
        return overview(self.launch.folders, self.prepared, self.statuses(), telemetry, self.urls, began_s, own)

    def _log_lines(self, asked: LogQuestion) -> dict[str, Any]:
        return log_lines(asked, self.console.ring, {name: log.ring for name, log in self.fleet.logs.items()})

    def _restart(self, model_id: str | None) -> list[str]:
        chosen = [s for s in self.fleet.supervisors() if model_id in (None, s.model_id)]
        for supervisor in chosen:
            supervisor.restart()
        return [supervisor.model_id for supervisor in chosen]

    # --- a new configuration -----------------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        self._spare(self._reload())

    async def _plan_again(self) -> None:
        self._spare(self._reload())

    async def _reload(self) -> dict[str, Any]:
        """Plans first. What cannot be planned changes nothing: raises EdgeError."""
        launch = self.launch

        def planned(view: HostView) -> Prepared:
            return prepare(load(launch.folders, launch.flags, os.environ), launch.folders, view)

        outcome = await self.reloading.apply(planned, self._added, self._take)
        outcome.after_restart = after_restart(launch.config, self.config)
        if self._arrival is not None:
            self._arrival.cancel()
        self._settle_placeholders()
        self.herald.watch(self.fleet.supervisors())
        told = ", ".join(f"{name}: {how}" for name, how in outcome.models.items())
        self.console.say(f"reloaded: {told}")
        if outcome.after_restart:
            self.console.warn(f"{', '.join(outcome.after_restart)}: changed, and read only when edgellm starts")
        for model_id, failure in outcome.failures.items():
            self.console.failed(model_id, failure, gives_up=True)
        return outcome.document

    def _spare(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something that nobody waits for: what it raises is said."""

        async def told() -> None:
            try:
                await work
            except EdgeError as error:
                self.console.failed("reload", awaited.failure_of(error), gives_up=False)

        task = asyncio.create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
