"""The control socket: HTTP on a unix socket in the run folder; the kernel names its peers (SO_PEERCRED)."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from msgspec import Struct, field

from edge import __version__
from edge.daemon.history import PastRecords
from edge.daemon.residents import Residents, Restarted
from edge.errors import EdgeError
from edge.gateway.config import ClientLimits
from edge.gateway.connections import Connections
from edge.gateway.health import healthz
from edge.linux.files import parse_json
from edge.linux.procfs import Ring
from edge.linux.sockets import AT_ONCE, BACKLOG
from edge.paths import Folders
from edge.plan.prepare import Prepared
from edge.service.unit import Unit
from edge.supervisor.status import ModelStatus

GROUP = "edgellm"  # of the service; its members may read status and logs
_PEERCRED = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


class LogQuestion(Struct, frozen=True):
    """A request for log lines: the engines' or edgellm's own. `since`: by stream, how many lines were seen."""

    engine: bool = False
    model: str | None = None
    since: Mapping[str, int] = field(default_factory=dict)


class PageHistory(Struct, frozen=True):
    """Past starts and log lines for the status page; implements the gateway's PastSource."""

    past: PastRecords
    ask: Callable[[LogQuestion], dict[str, Any]]

    def starts(self) -> list[dict[str, Any]]:
        return self.past.starts

    def log(self, engine: bool, model: str | None, since: Mapping[str, int]) -> dict[str, Any]:
        return self.ask(LogQuestion(engine, model, dict(since)))


class Operations(Protocol):
    """The operations that the socket offers, implemented by the application."""

    def status(self) -> dict[str, Any]:
        """Return the whole document, evidence included."""
        ...

    def telemetry(self) -> dict[str, Any]:
        """Return /telemetry without its history, for readers that poll every second."""
        ...

    def logs(self, asked: LogQuestion, /) -> dict[str, Any]:
        """Return `lines`, and `next`, the `since` of the next request."""
        ...

    def stop(self, now: bool, /) -> None: ...

    def restart(self, model_id: str | None, /) -> Restarted:
        """Restart one model, or all that do not sleep."""
        ...

    @property
    def residents(self) -> Residents:
        """The models that hold memory."""
        ...

    async def reload(self) -> dict[str, Any]:
        """Raises EdgeError if the configuration has no plan."""
        ...


class Control:
    """A server of `Operations`. `for_group`: the service's group can read; changes are for the owner and root."""

    def __init__(self, path: Path, operations: Operations, *, for_group: bool = False) -> None:
        self._path = path
        self._operations = operations
        # 0660 for the service's group, 0600 for a user's own instance.
        self._mask = 0o117 if for_group else 0o177
        self._group = _group(GROUP) if for_group else None
        self._runner: web.AppRunner | None = None
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        connections = Connections(_LIMITS, _another_user)
        app = web.Application(middlewares=[_counted(connections)])
        app.router.add_get("/status", self._status)
        app.router.add_get("/telemetry", self._telemetry)
        app.router.add_get("/logs", self._logs)
        app.router.add_post("/stop", _for_owner(self._stop))
        app.router.add_post("/restart", _for_owner(self._restart))
        app.router.add_post("/reload", _for_owner(self._reload))
        app.router.add_post("/load", _for_owner(self._load))
        app.router.add_post("/unload", _for_owner(self._unload))
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1)
        await self._runner.setup()
        self._path.unlink(missing_ok=True)  # left by an earlier holder of our lock
        listener = socket.socket(socket.AF_UNIX)
        # umask, not chmod: between bind and chmod any user could connect.
        mask = os.umask(self._mask)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(mask)
        if self._group is not None and os.geteuid() == 0:
            os.chown(self._path, -1, self._group)
        server = self._runner.server
        assert server is not None, "setup() makes it"
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        # asyncio tries so many accepts in one turn of its loop, and logs each that meets EMFILE.
        self._server = await loop.create_unix_server(connections.protocol(server), sock=listener, backlog=AT_ONCE)
        listener.listen(BACKLOG)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
            with contextlib.suppress(OSError):  # a disk that turned read-only
                self._path.unlink()

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._operations.status())

    async def _telemetry(self, _: web.Request) -> web.Response:
        return web.json_response(self._operations.telemetry())

    async def _logs(self, request: web.Request) -> web.Response:
        query = request.query
        question = LogQuestion(query.get("engine") == "1", query.get("model"), _numbers(query.get("since", "{}")))
        return web.json_response({"schema": 1, **self._operations.logs(question)})

    async def _stop(self, request: web.Request) -> web.Response:
        self._operations.stop(request.query.get("now") == "1")
        return web.json_response({"schema": 1, "stopping": True}, status=202)

    async def _restart(self, request: web.Request) -> web.Response:
        restarted = self._operations.restart(request.query.get("model"))
        found = restarted.restarting or restarted.asleep
        return web.json_response({"schema": 1, **restarted._asdict()}, status=202 if found else 404)

    async def _reload(self, _: web.Request) -> web.Response:
        try:
            return web.json_response(await self._operations.reload())
        except EdgeError as error:
            return _refused(error)

    async def _load(self, request: web.Request) -> web.Response:
        try:
            status = await self._operations.residents.load(request.query.get("model", ""))
        except EdgeError as error:
            return _refused(error)
        return web.json_response({"schema": 1, "model": status.id, "state": status.state.value})

    async def _unload(self, request: web.Request) -> web.Response:
        try:
            self._operations.residents.unload(request.query.get("model", ""))
        except EdgeError as error:
            return _refused(error)
        return web.json_response({"schema": 1, "unloading": request.query["model"]}, status=202)


def _refused(error: EdgeError) -> web.Response:
    fault = {"message": str(error), "kind": error.kind, "hint": error.hint, "table": error.table}
    return web.json_response({"schema": 1, "error": fault}, status=422)


def _numbers(text: str) -> dict[str, int]:
    with contextlib.suppress(ValueError):
        raw = parse_json(text)
        if isinstance(raw, dict):
            return {str(name): value for name, value in raw.items() if isinstance(value, int)}
    return {}


def _group(name: str) -> int | None:
    with contextlib.suppress(KeyError):
        return grp.getgrnam(name).gr_gid
    return None


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# A member of the group may look, and must not take the gateway's descriptors with connections that it keeps.
_LIMITS = ClientLimits(connections=64, connections_per_peer=8)


def _counted(connections: Connections) -> Any:
    """Return a middleware that notes when requests begin and end."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        connections.request_began(request.transport)
        try:
            return await handler(request)
        finally:
            connections.request_ended(request.transport)

    return count


def _another_user(transport: asyncio.BaseTransport) -> str | None:
    uid = _uid(transport)
    return None if uid in (0, os.getuid()) else f"user {uid}"


def _for_owner(handler: Handler) -> Handler:
    async def checked(request: web.Request) -> web.StreamResponse:
        if request.transport is None or _uid(request.transport) not in (0, os.getuid()):
            error = {"message": "only the owner and root may change a running edgellm", "kind": "forbidden"}
            return web.json_response({"schema": 1, "error": error}, status=403)
        return await handler(request)

    return checked


def _uid(transport: asyncio.BaseTransport) -> int | None:
    peer = transport.get_extra_info("socket")
    if peer is None:
        return None
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    uid: int = _PEERCRED.unpack(raw)[1]
    return uid


# The documents of the control socket: the whole status, and log lines.


def overview(
    folders: Folders,
    prepared: Prepared | None,
    statuses: Iterable[ModelStatus],
    telemetry: Mapping[str, Any],
    urls: Sequence[str],
    began_s: float,
    unit: Unit | None,
) -> dict[str, Any]:
    """Return /healthz with the fields that only the owner may see: evidence, pids, folders.

    `unit`: the systemd unit that opened the sockets, None if started by hand.
    """
    known = list(statuses)
    document = healthz(known, telemetry, time.time() - time.monotonic())
    for status in known:
        model = document["models"][status.id]
        model["pid"] = status.pid
        if prepared and status.id in prepared.plan.models:
            model["files"] = list(prepared.plan.models[status.id].model.shards)
        if status.failure is not None:
            model["failure"]["evidence"] = status.failure.evidence
    return document | {
        "version": __version__,
        "urls": list(urls),
        "uptime_s": round(time.monotonic() - began_s, 1),
        "profile": prepared.profile.name if prepared else None,
        "engine": prepared.plan.engine.id if prepared else None,
        "service": unit.document() if unit else None,
        "folders": {"state": str(folders.instance_state), "run": str(folders.instance_run)},
    }


def log_lines(asked: LogQuestion, own: Ring, engines: Mapping[str, Ring]) -> dict[str, Any]:
    """Return the lines that the reader has not seen; `next` goes into its next `since`."""
    rings = {"": own}
    if asked.engine:
        rings = {name: ring for name, ring in engines.items() if asked.model in (None, name)}
    lines = [line for name, ring in rings.items() for line in ring.since(asked.since.get(name, 0))]
    return {"lines": lines, "next": {name: ring.count for name, ring in rings.items()}}
