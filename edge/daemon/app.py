"""The running application: supervisors, gateway, telemetry and control socket. Imported after the spawn."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from edge.config import load
from edge.daemon import late_start as awaited
from edge.daemon.console import has_terminal
from edge.daemon.control import Control, LogQuestion, PageHistory, log_lines, overview
from edge.daemon.device_recovery import recover_devices
from edge.daemon.fleet import Fleet, about, gateway_config
from edge.daemon.history import PastRecords, Recorder, lost_on_reboot
from edge.daemon.journal import console_for
from edge.daemon.kept_by_model import SpeedBaseline
from edge.daemon.planning import Launched, LaunchTimes, fallback_of, keep_launch
from edge.daemon.reload import Reload, after_restart
from edge.daemon.remembered_launch import forget
from edge.daemon.residents import Residents, Restarted
from edge.daemon.template_verdicts import judged
from edge.daemon.thermal import ThermalControl, telemetry_of
from edge.daemon.watchdog import MORE_S, Watchdog
from edge.engine.choose import EngineFallback
from edge.errors import BugError, EdgeError
from edge.gateway.server import make_app, serve
from edge.linux.ordered_writer import OrderedWriter
from edge.linux.tree import Tree
from edge.paths import system_folders
from edge.plan.prepare import HostView, Prepared, prepare
from edge.service import unit
from edge.supervisor.model_handle import UNNAMED, ModelHandle
from edge.supervisor.state import SupervisorState, died
from edge.supervisor.status import Failure, ModelStatus, State
from edge.supervisor.supervisor import Supervisor
from edge.telemetry.telemetry import Telemetry

PROGRESS_LOOK_S = 0.2
STATE_DISK_S = 1.0  # the longest wait for one write to the state folder: a flash card syncs within a fraction of it
HUNG_UP = 129  # 128 + SIGHUP, as a shell reports it


def run(launch: Launched) -> int:
    """Serve until stopped. Return 0 after an ordinary stop, 1 if a model is FAILED."""
    return asyncio.run(App(launch).run())


class App:
    """One running edgellm, from its first event to the end of its last engine."""

    def __init__(self, launch: Launched, telemetry: Telemetry | None = None) -> None:
        """`telemetry` replaces that of the board, for tests."""
        self.launch = launch
        self.config = launch.config  # with `prepared`, replaced by each reload
        self.prepared: Prepared | None = None
        self.console = console_for(os.environ, as_json=bool(launch.request.options["json"]))
        self.urls = launch.listeners.urls(tls=bool(launch.config.gateway.tls_cert))  # no reload changes them
        self.writer = OrderedWriter("state folder")
        self.past = PastRecords(launch.folders)
        speeds, put = SpeedBaseline(launch.folders, self.writer.put), self.writer.put
        self.fleet = Fleet(launch.folders, self._changed, speeds, lambda: self.governing.telemetry.latest, put)
        self.watchdog = Watchdog(launch.notifier, self.statuses)
        self.late_start: awaited.LateStart | None = None
        self._own_sensors = telemetry is None
        sensors = telemetry or telemetry_of(launch.plan, launch.config, launch.folders.models)
        self.governing = ThermalControl(sensors, self.console, self.fleet.handles, launch.folders, put)
        self._memorable = isinstance(launch.plan, Prepared)  # until an engine fails or a reload changes something
        self.residents = Residents(self.fleet, lambda: self.prepared, self._expected_s)
        self.reloading = Reload(self.fleet, self.residents.pool)
        self._times = launch.times  # a late plan has a launch of its own
        self.recorder: Recorder | None = None
        self._unit = unit.own()
        self._arrival: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._terminal = has_terminal()
        self._hung_up = False
        self._stops = 0
        self._stop = asyncio.Event()
        self._build()

    # --- building ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        plan = self.launch.plan
        if isinstance(plan, EdgeError):
            if awaited.may_come(plan):
                self.late_start = awaited.LateStart(self.config, plan)
                self.fleet.handles.update(self.late_start.placeholders)
            else:
                handle = self.fleet.handles[UNNAMED] = ModelHandle(UNNAMED)
                handle.fail(awaited.failure_of(plan))
            return
        self._adopt(plan)
        for model_id, model in plan.plan.models.items():
            handle, _ = self.fleet.add(plan, model, self._expected_s(model_id))
            self._added(handle)

    def _adopt(self, prepared: Prepared) -> None:
        """Make this plan the current one."""
        self.prepared, self.config = prepared, prepared.config
        self.recorder = Recorder(
            self.launch.folders,
            self.writer,
            self.past,
            (prepared.plan.engine.id, prepared.board.module),
            self.governing.samples,
            self.console.warn,
        )
        for model_id, model in prepared.plan.models.items():
            if model_id in self.launch.children.resident:
                self.recorder.resident[model_id] = self.launch.children.resident.pop(model_id)
            elif model.other is None:
                self.recorder.look_at_cache(model_id, Path(model.model.path))

    def _added(self, handle: ModelHandle) -> None:
        self.residents.add(handle)
        self.governing.limit(handle)
        self.watchdog.watch(self.fleet.supervisors())

    def statuses(self) -> list[ModelStatus]:
        return [handle.status() for handle in self.fleet.handles.values()]

    def _expected_s(self, model_id: str) -> float | None:
        return self.recorder.last_ready_s(model_id) if self.recorder is not None else None

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until a signal, a `stop` request or a bug. Return the exit code."""
        launch = self.launch
        self._follow_signals()
        for supervisor in self.fleet.supervisors():
            child = launch.children.get(supervisor.model_id)
            self.fleet.run(supervisor, child, self._times.began_s)
            if child is None:  # behind a socket unit a failed spawn is repeated, so that its failure is recorded
                supervisor.begin()
        gateway = await serve(self._gateway(), launch.listeners.sockets)
        reporting = [asyncio.create_task(self.watchdog.run()), asyncio.create_task(self.governing.telemetry.run())]
        launch.notifier.ready("listening")
        as_service = launch.folders.run == system_folders().run
        control = Control(launch.folders.control_socket, self, for_group=as_service)
        await control.start()
        if self.prepared is not None:
            self.console.planned(self.prepared.plan, self.prepared.profile.name, self.urls)
        for note in launch.notes:
            self.console.say(note)
        self._report_problems()
        self._arrival = asyncio.create_task(self._serve_late())
        recovering = recover_devices(lambda: self.prepared, self.fleet, self._reload_in_background)
        serving = [
            self._arrival,
            *map(asyncio.create_task, (self._show_progress(), recovering, self.residents.pool.run())),
        ]
        ending = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self.fleet.broke.wait())]
        await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        await _end([*serving, *ending, *self._tasks])
        failed = any(status.state is State.FAILED for status in self.statuses())
        await self._wind_down()
        await gateway.cleanup()
        await control.close()
        await _end(reporting)
        await self.fleet.close()
        if not self.writer.close(STATE_DISK_S) or self.writer.dropped:
            self.console.warn(f"{launch.folders.instance_state} did not answer in time: records of this run are lost")
        launch.lock.release()
        if self.fleet.broke.is_set():
            return BugError.exit_code
        return HUNG_UP if self._hung_up else int(failed)

    def _follow_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup(1) ignores it for us
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _gateway(self) -> web.Application:
        """Return the gateway. Behind a socket unit one without readable keys answers 503; else raises ConfigError."""
        config = gateway_config(self.config, self.launch.folders)
        make = partial(
            make_app, self.fleet.handles, alive=lambda: self.watchdog.alive, about=lambda: about(self.prepared)
        )
        try:
            app = make(config)
        except EdgeError as error:
            if not self.launch.listeners.inherited:
                raise
            fault = awaited.failure_of(error)
            self.console.failed("gateway", fault, gives_up=True)
            app = make(replace(config, keys_file=None), fault=fault)
        self._context = self.governing.attach(app, self.residents.priority)
        self._context.history = PageHistory(self.past, self.logs)
        return app

    def _report_problems(self) -> None:
        for model_id, handle in self.fleet.handles.items():
            failure = handle.status().failure
            if failure is not None and self.late_start is not None and self.late_start.patience_s:
                self.console.waits(model_id, failure, self.late_start.patience_s)
            elif failure is not None and self.prepared is None:
                self.console.failed(model_id, failure, gives_up=True)
        if not self.launch.listeners.inherited:
            return
        lost = lost_on_reboot(self.launch.folders, Tree())
        for warning in (*(self._unit.warnings if self._unit else ()), *([lost] if lost else [])):
            self.console.warn(warning)

    async def _serve_late(self) -> None:
        """Plan again until it succeeds, where no plan could be made at the start, and serve from then on."""
        if self.late_start is None:
            return
        launch, late_start = self.launch, self.late_start

        def gave_up(failure: Failure) -> None:
            for model_id in late_start.placeholders:
                self.console.failed(model_id, failure, gives_up=True)

        def planned(waited_s: float) -> Prepared:
            self.writer.drain(STATE_DISK_S)
            return prepare(self.config, launch.folders, HostView(waited_s=waited_s))

        prepared = await late_start.until(planned, gave_up)
        if self._own_sensors:
            self.governing.telemetry.follow(telemetry_of(prepared, launch.config, launch.folders.models))
        self._times = LaunchTimes(time.monotonic())
        self._adopt(prepared)
        for model_id, model in prepared.plan.models.items():
            handle, supervisor = self.fleet.add(prepared, model, self._expected_s(model_id))
            self._added(handle)
            self.fleet.run(supervisor)
            supervisor.begin()
        self._settle_placeholders()
        self.console.planned(prepared.plan, prepared.profile.name, self.urls)

    def _settle_placeholders(self) -> None:
        """Remove the placeholders: there is a plan now."""
        self.fleet.drop_placeholders()
        self.late_start = None

    async def _wind_down(self) -> None:
        """Drain, TERM, KILL by the supervisors' own deadlines; a second signal kills at once."""
        self.launch.notifier.stopping("stopping: open requests may finish", more_s=MORE_S)
        self.governing.rest()
        await self.fleet.stop(now=self._stops > 1)

    def _on_stop_signal(self) -> None:
        self.stop(now=self._stops > 0)

    def _on_hangup(self) -> None:
        """Stop if our terminal is gone; reload otherwise, as daemons do."""
        if self._terminal and not has_terminal():
            self._hung_up = True
            self._on_stop_signal()
        else:
            self._in_background(self.reload())

    async def _show_progress(self) -> None:
        while True:
            loading = [status for status in self.statuses() if status.state is State.LOADING]
            for status in loading:
                self.console.progress(status)
            await asyncio.sleep(PROGRESS_LOOK_S if loading else 1.0)

    # --- changes of state --------------------------------------------------------------------------------------------

    def _changed(self, supervisor: Supervisor, before: SupervisorState, after: SupervisorState) -> None:
        if after.state is before.state:
            return
        self.governing.became(supervisor, after)
        self.residents.pool.became(supervisor, after.state)
        self.console.state(supervisor.status())
        self.watchdog.notify()
        if after.state is State.READY:
            self.launch.children.end_prefetch()
            if self.recorder is not None:
                self.recorder.ready(supervisor, self._times)
                self._in_background(self.recorder.complete(supervisor.model.model))
            self._remember_launch()
            began_s = supervisor.started_at_s or self._times.began_s
            role = supervisor.plan.settings.role
            keyed = not self._context.keys.empty
            self.console.ready(supervisor.status(), time.monotonic() - began_s, self.urls, role, keyed=keyed)
        if died(before, after) and after.failure is not None:
            if self.recorder is not None:
                self.recorder.crashed(supervisor, before, after.failure, self._times)
            if before.ready_since is None or not after.alive:
                self._forget_launch()
            self._roll_back_if_needed()
            self.console.failed(supervisor.model_id, after.failure, gives_up=after.state is State.FAILED)

    def _remember_launch(self) -> None:
        """Keep the launch for the next start once every engine of it is READY as planned."""
        launched = [each for each in self.fleet.supervisors() if each.model_id in self.launch.children]
        if not self._memorable or not launched or self.prepared is None:
            return
        if any(each.machine.state is not State.READY or not each.as_planned for each in launched):
            return
        self._memorable = False  # once is enough
        self.writer.put(partial(keep_launch, self.launch, self.prepared))

    def _forget_launch(self) -> None:
        self._memorable = False
        self.writer.put(partial(forget, self.launch.folders))

    def _roll_back_if_needed(self) -> None:
        prepared = self.prepared
        if prepared is None or prepared.config.engine or prepared.fallback is not None:
            return

        def judged(fallback: EngineFallback | None) -> None:
            ends = self._stop.is_set() or self.fleet.broke.is_set()
            if fallback is not None and self.prepared is prepared and not ends:  # no reload came first
                self.console.warn(f"{fallback.because}: {fallback.engine} serves instead")
                self._in_background(self.reload())

        self.writer.put(partial(fallback_of, self.launch.folders), judged)

    # --- operations of the control socket ----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        own = self._unit if self.launch.listeners.inherited else None
        telemetry, began_s = self.governing.telemetry.status(), self._times.began_s
        document = overview(self.launch.folders, self.prepared, self.statuses(), telemetry, self.urls, began_s, own)
        for model_id, row in document["models"].items():
            row |= self.residents.row(model_id, self._context.stats.model(model_id).last_per_s)
        return document | {"crashes": self.past.crashes, "keys": self._context.key_use()}

    def telemetry(self) -> dict[str, Any]:
        return self.governing.telemetry.document(history=False)

    def logs(self, asked: LogQuestion) -> dict[str, Any]:
        return log_lines(asked, self.console.ring, {name: log.ring for name, log in self.fleet.logs.items()})

    def stop(self, now: bool = False) -> None:
        self._stops += 1
        self._stop.set()
        if now:
            self.fleet.kill()
        elif self._stops == 1:
            self.console.say("stopping: open requests may finish (again to stop at once)")

    def restart(self, model_id: str | None) -> Restarted:
        return self.residents.restart(model_id)

    async def reload(self) -> dict[str, Any]:
        """Plan the present configuration and apply it. Raises EdgeError, with nothing changed, if it has no plan."""
        launch = self.launch

        def planned(view: HostView) -> Prepared:
            self.writer.drain(STATE_DISK_S)  # the plan reads what the last start wrote
            return judged(prepare(load(launch.folders, launch.flags, os.environ), launch.folders, view), launch.folders)

        outcome = await self.reloading.apply(planned, self._added, self._adopt)
        outcome.after_restart = after_restart(launch.config, self.config)
        if self._arrival is not None:
            self._arrival.cancel()
        self._settle_placeholders()
        self.watchdog.watch(self.fleet.supervisors())
        if set(outcome.models.values()) != {"kept"}:
            self._forget_launch()
        self.console.say(f"reloaded: {', '.join(f'{name}: {how}' for name, how in outcome.models.items())}")
        if outcome.after_restart:
            self.console.warn(f"{', '.join(outcome.after_restart)}: changed, and read only when edgellm starts")
        for model_id, failure in outcome.failures.items():
            self.console.failed(model_id, failure, gives_up=True)
        return outcome.document

    async def _reload_in_background(self) -> None:
        self._in_background(self.reload())

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something that no request waits for; an EdgeError is reported on the console."""

        async def reported() -> None:
            try:
                await work
            except EdgeError as error:
                self.console.failed("reload", awaited.failure_of(error), gives_up=False)

        task = asyncio.create_task(reported())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
