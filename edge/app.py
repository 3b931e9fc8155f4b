"""The composition root of a running edgellm: supervisors, gateway, control socket. Imported after the spawn."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from edge import __version__, listen
from edge.childlog import ChildLog
from edge.control import Actions, Control
from edge.folders import system_folders
from edge.gateway.health import healthz
from edge.gateway.server import serve
from edge.governing import Governing, telemetry_of
from edge.handover import Launch
from edge.prepare import Prepared, prepare_present
from edge.recorder import Recorder
from edge.resources import data_dir, load_toml
from edge.service import awaited, keeping
from edge.service.front import front
from edge.service.herald import MORE_S, Herald
from edge.service.reporter import console_for
from edge.status import Failure, State
from edge.supervisor.failed import FailedUpstream
from edge.supervisor.hooks import Hooks
from edge.supervisor.patterns import Patterns
from edge.supervisor.state import LIVE, Machine
from edge.supervisor.supervisor import Supervisor
from edge.supervisor.terms import Terms
from edge.telemetry.telemetry import Telemetry
from edge.terms import gateway_config, policy
from edge.upstream import Upstream

PROGRESS_LOOK_S = 0.2


def run(launch: Launch) -> int:
    """Serves until stopped. 0 after an ordinary stop, 1 when a model had failed for good."""
    return asyncio.run(App(launch).run())


class App:
    """Everything that runs, and how it ends."""

    def __init__(self, launch: Launch, telemetry: Telemetry | None = None) -> None:
        """`telemetry` stands in for that of the board that was found."""
        self.launch = launch
        self.console = console_for(os.environ, as_json=launch.json)
        self.urls = [listen.url(each) for each in launch.sockets]
        self.supervisors: dict[str, Supervisor] = {}
        self.upstreams: dict[str, Upstream] = {}
        self.herald = Herald(launch.notifier, lambda: [each.status() for each in self.upstreams.values()])
        self.vigil: awaited.Vigil | None = None
        self.governing = Governing(telemetry or telemetry_of(launch), self.console)
        self.logs: dict[str, ChildLog] = {}
        self.recorder: Recorder | None = None
        self._stops = 0
        self._stop = asyncio.Event()
        self._build()

    # --- building ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        launch = self.launch
        if launch.prepared is None:
            error = launch.failure
            assert error is not None
            if awaited.may_come(error):
                self.vigil = awaited.Vigil(launch.config, error)
                self.upstreams |= self.vigil.stand_ins
            else:
                self.upstreams["model"] = FailedUpstream("model", awaited.failure_of(error))
            return
        self._supervise(launch.prepared)

    def _supervise(self, prepared: Prepared) -> None:
        launch = self.launch
        patterns = Patterns(load_toml(data_dir("build") / "llama-server.toml"))
        terms = Terms(policy=policy(launch.config), strict=launch.config.strict)
        recorder = self.recorder = Recorder(launch.folders, prepared.plan.engine.id, self.governing.samples)
        for model_id, model in prepared.plan.models.items():
            log = ChildLog(launch.folders.instance_run / "log", launch.folders.model_socket(model_id).stem)
            self.logs[model_id] = log
            recorder.look_at_cache(model_id, Path(model.model.path))
            supervisor = Supervisor(
                model,
                launch.folders.model_socket(model_id),
                patterns,
                terms,
                Hooks(on_change=self._changed, on_line=log.add),
                expected_ready_s=recorder.last_ready_s(model_id),
            )
            supervisor.began_s = launch.began_s
            self.supervisors[model_id] = supervisor
            self.upstreams[model_id] = self.governing.govern(supervisor)
        self.herald.watch(self.supervisors.values())

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        launch = self.launch
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        owners = self._start()
        gateway = await serve(self._gateway(), launch.sockets)
        herald, senses = asyncio.create_task(self.herald.run()), asyncio.create_task(self.governing.telemetry.run())
        launch.notifier.ready("listening")
        as_service = launch.folders.run == system_folders().run
        control = Control(launch.folders.control_socket, self._actions(), for_group=as_service)
        await control.start()
        if launch.prepared is not None:
            self.console.planned(launch.prepared.plan, launch.prepared.profile.name, self.urls)
        self._tell_troubles()
        show = asyncio.create_task(self._show_progress())
        stopped = asyncio.create_task(self._stop.wait())
        arrival = asyncio.create_task(self._arrive(owners))
        await asyncio.wait([stopped, *owners], return_when=asyncio.FIRST_COMPLETED)
        await _end([show, arrival])
        failed = any(upstream.status().state is State.FAILED for upstream in self.upstreams.values())
        await self._wind_down()
        await gateway.cleanup()
        await control.close()
        await _end([*owners, herald, senses])
        for log in self.logs.values():
            log.close()
        launch.lock.release()
        return 1 if failed else 0

    def _gateway(self) -> web.Application:
        def fault(failure: Failure) -> None:
            self.console.failed("gateway", failure, gives_up=True)

        config = gateway_config(self.launch.config, self.launch.folders)
        on_fault = fault if self.launch.inherited else None
        app = front(self.upstreams, config, alive=lambda: self.herald.alive, on_fault=on_fault)
        self.governing.attach(app)
        return app

    def _start(self) -> list[asyncio.Task[None]]:
        """Each supervisor's owner task; what the launcher spawned is adopted."""
        owners = []
        for model_id, supervisor in self.supervisors.items():
            if model_id in self.launch.children:
                supervisor.adopt(self.launch.children[model_id])
            else:
                supervisor.start()
            owners.append(asyncio.create_task(supervisor.run()))
        return owners

    def _tell_troubles(self) -> None:
        for model_id, upstream in self.upstreams.items():
            failure = upstream.status().failure
            if failure is not None and self.vigil is not None and self.vigil.patience_s:
                self.console.waits(model_id, failure, self.vigil.patience_s)
            elif failure is not None and self.launch.prepared is None:
                self.console.failed(model_id, failure, gives_up=True)
        forgotten = keeping.forgotten(self.launch.folders) if self.launch.inherited else None
        if forgotten is not None:
            self.console.warn(forgotten)

    async def _arrive(self, owners: list[asyncio.Task[None]]) -> None:
        """What could not be planned at start is planned as soon as it can be, and served from then on."""
        if self.vigil is None:
            return
        launch, vigil = self.launch, self.vigil

        def gave_up(failure: Failure) -> None:
            for model_id in vigil.stand_ins:
                self.console.failed(model_id, failure, gives_up=True)

        launch.prepared = await vigil.until(lambda: prepare_present(launch.config, launch.folders), gave_up)
        launch.failure, launch.began_s, launch.spans = None, time.monotonic(), []
        self._supervise(launch.prepared)
        for model_id, stand_in in vigil.stand_ins.items():
            if model_id not in self.supervisors:
                del self.upstreams[model_id]
            stand_in.become(self.supervisors.get(model_id) or next(iter(self.supervisors.values())))
        self.console.planned(launch.prepared.plan, launch.prepared.profile.name, self.urls)
        for task in self._start():
            owners.append(task)
            task.add_done_callback(lambda _: self._stop.set())

    async def _wind_down(self) -> None:
        """Drain, TERM, KILL by the machine's own deadlines; a second signal makes it KILL now."""
        self.launch.notifier.stopping("stopping: open requests may finish", more_s=MORE_S)
        for supervisor in self.supervisors.values():
            supervisor.stop(now=self._stops > 1)
        await asyncio.gather(*(s.settled(State.STOPPED, State.FAILED) for s in self.supervisors.values()))

    def _asked_to_stop(self) -> None:
        self.stop(now=self._stops > 0)

    def stop(self, now: bool = False) -> None:
        self._stops += 1
        self._stop.set()
        if now:
            for supervisor in self.supervisors.values():
                supervisor.stop(now=True)
        elif self._stops == 1:
            self.console.say("stopping: open requests may finish (again to stop at once)")

    async def _show_progress(self) -> None:
        while True:
            rising = [u.status() for u in self.upstreams.values() if u.status().state is State.LOADING]
            for status in rising:
                self.console.progress(status)
            await asyncio.sleep(PROGRESS_LOOK_S if rising else 1.0)

    # --- what changed ------------------------------------------------------------------------------------------------

    def _changed(self, supervisor: Supervisor, before: Machine, after: Machine) -> None:
        if after.state is before.state:
            return
        self.governing.became(supervisor.model_id, after)
        self.console.state(supervisor.status())
        self.herald.tell()
        if after.state is State.READY:
            self._record_start(supervisor, "ready")
            began_s = supervisor.began_s or self.launch.began_s
            self.console.ready(supervisor.status(), time.monotonic() - began_s, self.urls)
        died = before.state in LIVE and after.state in (State.STARTING, State.BACKOFF, State.FAILED)
        if died and after.failure is not None:
            self._record_crash(supervisor, before, after.failure)
            self.console.failed(supervisor.model_id, after.failure, gives_up=after.state is State.FAILED)

    def _record_start(self, supervisor: Supervisor, outcome: str) -> None:
        launch, recorder = self.launch, self.recorder
        if recorder is None:
            return
        if supervisor.restarts == 0:
            recorder.start(supervisor, outcome, launch.began_s, launch.spans, launch.spawn_cpu_s)
        else:
            recorder.start(supervisor, outcome, supervisor.began_s or time.monotonic(), (), None)

    def _record_crash(self, supervisor: Supervisor, before: Machine, failure: Failure) -> None:
        if before.state is not State.READY:
            self._record_start(supervisor, f"failed: {failure.kind}")
        if self.recorder is not None:
            self.recorder.crash(supervisor, before, failure)

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
        """/healthz with what only the owner may see: evidence, pids, folders."""
        statuses = [upstream.status() for upstream in self.upstreams.values()]
        document = healthz(statuses, self.governing.telemetry.status(), time.time() - time.monotonic())
        for status in statuses:
            model = document["models"][status.id]
            model["pid"] = status.pid
            if status.failure is not None:
                model["failure"]["evidence"] = status.failure.evidence
        prepared = self.launch.prepared
        return document | {
            "version": __version__,
            "urls": self.urls,
            "uptime_s": round(time.monotonic() - self.launch.began_s, 1),
            "profile": prepared.profile.name if prepared else None,
            "engine": prepared.plan.engine.id if prepared else None,
            "folders": {"state": str(self.launch.folders.instance_state), "run": str(self.launch.folders.instance_run)},
        }

    def _log_lines(self, model_id: str | None) -> list[str]:
        return [line for name, log in self.logs.items() if model_id in (None, name) for line in log.ring]

    def _restart(self, model_id: str | None) -> list[str]:
        chosen = [s for name, s in self.supervisors.items() if model_id in (None, name)]
        for supervisor in chosen:
            supervisor.restart()
        return [supervisor.model_id for supervisor in chosen]

    async def _reload(self) -> dict[str, Any]:
        return {"schema": 1, "changed": []}


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
