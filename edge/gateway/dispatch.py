"""Dispatch a request to an engine: choose the model, wait for it and for a slot, proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from edge.gateway import access_log, own_routes
from edge.gateway.accounting import RequestRecord, UsageCounter
from edge.gateway.admission import Admission, SlotLease
from edge.gateway.body import Body
from edge.gateway.context import Context
from edge.gateway.embed_input import cut_texts
from edge.gateway.health import DEGRADED, degraded_header
from edge.gateway.model_name import asks_for_stream, named_model, serves
from edge.gateway.ollama import OllamaCall, read_call
from edge.gateway.ollama_answer import NDJSON, OllamaAnswer
from edge.gateway.openai import HttpFault, RejectedError, sse_error
from edge.gateway.proxy import Exchange, forward
from edge.gateway.routes import ADMIN, OLLAMA, Route, wakes
from edge.gateway.streams import HEADER, check_stream
from edge.gateway.waiting_room import ByteReservation, WaitingQueue, failed_fault
from edge.supervisor.status import ModelStatus, State
from edge.supervisor.upstream import Endpoint, Upstream
from edge.telemetry.energy import EnergyMeter
from edge.units import MIB

# Acquire an engine's slot for a request: wait for the model, then in the queue, reading the body meanwhile.


Taken = tuple[Endpoint, SlotLease]  # an endpoint that can be used now, and the request's slot there


def slot_now(admission: Admission, exchange: Exchange, *, slot: bool) -> Taken | None:
    """Return a slot, None where the request has to wait. `slot`: it runs inference."""
    endpoint = _endpoint(exchange)
    lease = None if endpoint is None else admission.enter_now(exchange.upstream, slot=slot)
    return None if endpoint is None or lease is None else (endpoint, lease)


async def acquire_slot(waiting: WaitingQueue, admission: Admission, exchange: Exchange, *, slot: bool) -> Taken:
    """Return a slot, after a wait where it is needed. Raises RejectedError."""
    taken = slot_now(admission, exchange, slot=slot)
    if taken is not None:
        return taken
    upstream = exchange.upstream
    # A model that failed is answered at once: nothing would end the wait before its time is up.
    status = upstream.status()
    if status.state is State.FAILED:
        raise RejectedError(failed_fault(status))
    with waiting.ticket(upstream, exchange.body, exchange.reserved, exchange.wait_until_s) as ticket:
        is_ready = _endpoint(exchange) is not None
        if not is_ready:
            await ticket.endpoint(first=slot)
        lease = await admission.enter(upstream, ticket.wait, patient=not is_ready, slot=slot)
        try:
            await ticket.body_read()
            # Meanwhile the engine may have been replaced, or its memory may have been given to another model.
            return _endpoint(exchange) or await ticket.endpoint(first=slot), lease
        except BaseException:
            lease.leave()
            raise


def _endpoint(exchange: Exchange) -> Endpoint | None:
    """Return where to send the request now; None too while another model waits for the memory of this one."""
    upstream = exchange.upstream
    held = upstream.held and wakes(exchange.request.method, exchange.target)
    return None if held else upstream.endpoint()


@contextmanager
def measured(meter: EnergyMeter | None, record: RequestRecord, model: str) -> Iterator[None]:
    """Write the estimate from the request's slot to the end of its answer into `record.joules`.

    While a stream runs its chunks stand for tokens, so that parallel requests share the energy by their work.
    """
    if meter is None:
        yield
        return
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    usage = record.usage
    work = meter.begin(began_s, model, (lambda: usage.chunks) if usage is not None else None)
    try:
        yield
    except BaseException:
        meter.cancel(work, loop.time())
        raise
    tokens = usage.tokens().completion if usage is not None else None
    record.joules = meter.request(began_s, loop.time(), tokens or 0, work)


# Write comments into an event stream while its request waits, so that clients and proxies keep the connection.

INTERVAL_S = 5.0  # for a request that asks for comments where `heartbeat_s` is 0


class Heartbeat:
    """Opens the stream after `first_s` and writes a comment each `interval_s`, until stop() or the end of `with`.

    `streams` returns whether the client awaits an event stream. Until the stream is open an error keeps its status.
    """

    def __init__(
        self,
        request: web.Request,
        headers: Callable[[], Mapping[str, str]],
        status: Callable[[], ModelStatus],
        streams: Callable[[], bool],
        *,
        first_s: float,
        interval_s: float,
    ) -> None:
        self._request = request
        self._headers = headers
        self._status = status
        self._streams = streams
        self._first_s = first_s
        self._interval_s = interval_s
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.opened: web.StreamResponse | None = None

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await self._task

    async def stop(self) -> web.StreamResponse | None:
        """End the comments, the last one whole. Return the open stream, None if there is none."""
        assert self._task is not None
        self._stopped.set()
        with contextlib.suppress(ConnectionError):
            await self._task
        return self.opened

    async def _beat(self) -> None:
        pause_s = self._first_s
        while not await self._stopped_within(pause_s):
            if self.opened is None:
                if not self._streams():
                    return
                kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "Server": "edgellm"}
                self.opened = web.StreamResponse(headers={**kind, **self._headers()})
                await self.opened.prepare(self._request)
            await self.opened.write(_comment(self._status()))
            pause_s = self._interval_s

    async def _stopped_within(self, pause_s: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), pause_s)
        return self._stopped.is_set()


def _comment(status: ModelStatus) -> bytes:
    """Return `: waiting LOADING 63 %`. SSE parsers ignore lines that start with a colon (HTML standard 9.2.6)."""
    progress = "" if status.progress is None else f" {status.progress * 100:.0f} %"
    return f": waiting {status.state.value}{progress}\n\n".encode()


# Above this the search for `model` runs in a thread: 1 MiB takes 0.7 to 2 ms (x86 server), all other requests wait.
_PARSE_INLINE_BYTES = 1 * MIB


async def dispatch(
    context: Context, request: web.Request, found: Route, record: RequestRecord, extra: Mapping[str, str]
) -> web.StreamResponse:
    """Return the engine's answer; `extra` are headers to add to it. Raises RejectedError."""
    body = Body(request, context.config, context.connections)
    with context.waiting.reserve() as reserved:
        # Before a slot is taken, so that a slow upload holds none; what is read by now can be sent twice.
        arrive = partial(reserved.arrive, make_room=context.connections.end_slow_upload)
        await body.read(context.config.limits.replay_bytes, arrive)
        reserved.arrived()
        call = await _read_call(found, body, reserved) if found.name in OLLAMA else None
        if call is None:
            upstream = await _choose(context, request, found, body, reserved)
        else:
            upstream = _choose_by_name(context, call)
        record.model = upstream.model_id
        if context.config.log_prompts and body.complete:
            record.prompt = access_log.prompt(body.data)
        stats = context.stats.model(upstream.model_id)
        record.usage = UsageCounter(record.began_s, stats.between_tokens_s)
        wait_until_s = record.began_s + _max_wait_s(request, context.config.hold_seconds)
        exchange = Exchange(request, upstream, found.target, body, reserved, record, record.usage, wait_until_s, extra)
        exchange.hide_paths = found.name in ADMIN and context.keys.needed and not record.admin
        if context.keys.needed and record.key is not None:
            made = request.headers.getall(HEADER, ())
            check_stream(context.stream_owners, request.method, found.target, made, body, record)
        if call is not None:
            return await _send_call(context, exchange, found, call)
        taken = slot_now(context.admission, exchange, slot=found.slot)
        # A request that goes ahead at once needs no task and no timer.
        heartbeat = None if taken is not None else _heartbeat(context, exchange, found)
        if heartbeat is None:
            return await _send(context, exchange, found, taken=taken)
        async with heartbeat:
            return await _send_with_heartbeat(context, exchange, found, heartbeat)


async def _send(
    context: Context, exchange: Exchange, found: Route, heartbeat: Heartbeat | None = None, taken: Taken | None = None
) -> web.StreamResponse:
    """Wait for a slot unless it is `taken`, end the heartbeat if there is one, and proxy. Raises RejectedError."""
    upstream = exchange.upstream
    stats = context.stats.model(upstream.model_id)
    endpoint, lease = taken or await acquire_slot(context.waiting, context.admission, exchange, slot=found.slot)
    with lease:
        # A comment in the middle of an event would break it: the heartbeat ends before the answer begins.
        exchange.opened = None if heartbeat is None else await heartbeat.stop()
        exchange.extra = _with_degraded(context, upstream, exchange.extra)
        exchange.reserved.cover_unpacking(exchange.body)
        if exchange.opened is not None:
            exchange.record.code = 200
            await _comment_degraded(exchange.opened, exchange.extra)
        stats.in_flight += 1
        try:
            with measured(context.energy if found.slot else None, exchange.record, upstream.model_id):
                if exchange.translation is not None:
                    await cut_texts(context.pools, exchange, exchange.translation.call, endpoint)
                return await forward(context.pools, exchange, endpoint)
        finally:
            stats.in_flight -= 1


async def _read_call(found: Route, body: Body, reserved: ByteReservation) -> OllamaCall:
    """Read a request of an Ollama client and translate it. Raises RejectedError."""
    reserved.cover(body)
    await body.read(grow=reserved.grow)
    data = body.data
    if data is None or len(data) <= _PARSE_INLINE_BYTES:
        return read_call(found.name, data)
    return await asyncio.to_thread(read_call, found.name, data)


def _choose_by_name(context: Context, call: OllamaCall) -> Upstream:
    """Return the model of an Ollama client. Raises RejectedError."""
    upstream, only = context.by_name(call.model), context.only(call.target)
    if upstream is None and only is not None and context.config.unknown_model != "strict":
        return only
    return _that_serves(upstream or _named(context, call.model), call.target)


async def _send_call(context: Context, exchange: Exchange, found: Route, call: OllamaCall) -> web.StreamResponse:
    """Answer a translated request. One without a prompt loads the model, or lets it sleep. Raises RejectedError."""
    exchange.translation = OllamaAnswer(call, asyncio.get_running_loop().time, context.wall)
    if call.keep_alive_s is not None:
        exchange.upstream.keep_alive(call.keep_alive_s)
    # Ollama's clients load a model before the user has typed, and unload it when they close.
    if call.only_loads:
        if call.keep_alive_s != 0 and not exchange.upstream.held:  # held: its engine is there, no other has to end
            _, lease = await acquire_slot(context.waiting, context.admission, exchange, slot=False)
            lease.leave()
        kind = {"Content-Type": NDJSON if call.stream else "application/json"}
        return web.Response(body=exchange.translation.loaded(), headers={"Server": "edgellm", **kind, **exchange.extra})
    exchange.target = call.target
    exchange.body.replace(call.body)
    return await _send(context, exchange, found)


def _heartbeat(context: Context, exchange: Exchange, found: Route) -> Heartbeat | None:
    """Return the heartbeat for a request that waits; `Edgellm-Heartbeat` 1 starts it at once, 0 turns it off."""
    upstream, request = exchange.upstream, exchange.request
    asked, every_s = request.headers.get("Edgellm-Heartbeat"), context.config.heartbeat_s
    at_once = asked == "1"
    if not at_once and (asked == "0" or not found.slot or every_s <= 0):
        return None

    def headers() -> Mapping[str, str]:
        status = upstream.status()
        return {**exchange.extra, DEGRADED: degraded_header(status)} if status.degraded else exchange.extra

    def streams() -> bool:
        return at_once or (exchange.body.complete and asks_for_stream(exchange.body.data))

    # The header is for clients that show progress; they want it more often than proxies need it.
    interval_s = min(INTERVAL_S, every_s or INTERVAL_S) if at_once else every_s
    return Heartbeat(
        request, headers, upstream.status, streams, first_s=0.0 if at_once else every_s, interval_s=interval_s
    )


async def _send_with_heartbeat(
    context: Context, exchange: Exchange, found: Route, heartbeat: Heartbeat
) -> web.StreamResponse:
    try:
        return await _send(context, exchange, found, heartbeat)
    except RejectedError as refused:
        opened = await heartbeat.stop()
        if opened is None:
            raise
        exchange.record.code = 200
        exchange.record.failed()
        await opened.write(sse_error(exchange.target, refused.fault))
        return opened


async def _comment_degraded(opened: web.StreamResponse, extra: Mapping[str, str]) -> None:
    """Write what the headers of an open stream do not say as an SSE comment."""
    sent, now = opened.headers.get(DEGRADED), extra.get(DEGRADED)
    if now != sent:
        await opened.write(f": degraded {now}\n\n".encode() if now else b": no longer degraded\n\n")


async def _choose(
    context: Context, request: web.Request, found: Route, body: Body, reserved: ByteReservation
) -> Upstream:
    """Return the model by /upstream/{id}, else by the name or the path where it matters. Raises RejectedError."""
    if found.model is not None:
        return _named(context, found.model)
    path = found.path
    only = context.only(path) if len(context.upstreams) == 1 else None
    if only is not None and context.config.unknown_model != "strict":
        return only
    if not context.upstreams:
        raise RejectedError(
            HttpFault(503, "no_model", "no model is configured", "edgellm model list shows what could be", 5.0)
        )
    reserved.cover(body)
    await body.read(grow=reserved.grow)  # a client may send `model` as the last member
    # Two models with one alias are refused by the configuration, so a name means one model.
    name = await _model_name(request, body, found.target)
    return by_name_or_path(context, name, path)


def by_name_or_path(context: Context, name: str | None, path: str) -> Upstream:
    """Return the named model, the only one that serves the path, or the default. Raises RejectedError."""
    named, only = None if name is None else context.by_name(name), context.only(path)
    # A client of one engine often has to name a model: "whisper-1" is what SDKs write for audio.
    if named is None and only is not None and (name is None or context.config.unknown_model != "strict"):
        return only
    if name is None:
        name = context.config.default_model or None
    return _that_serves(named or _named(context, name), path)


def _that_serves(upstream: Upstream, path: str) -> Upstream:
    """Return the model. Raises RejectedError if its engine does not serve the path."""
    if serves(upstream, path):
        return upstream
    message = f"model {upstream.model_id!r} does not serve {path[:100]}"
    hint = f"it serves {', '.join(upstream.routes or ())}; others are under /upstream/{upstream.model_id}/"
    raise RejectedError(HttpFault(404, "no_route", message, hint))


async def _model_name(request: web.Request, body: Body, target: str) -> str | None:
    data = body.data
    if data is None or len(data) <= _PARSE_INLINE_BYTES:
        return named_model(data, request.content_type, target)
    return await asyncio.to_thread(named_model, data, request.content_type, target)


def _named(context: Context, name: str | None) -> Upstream:
    upstream = None if name is None else context.by_name(name)
    if upstream is None:
        raise RejectedError(own_routes.unknown_model(context, name))
    return upstream


def _max_wait_s(request: web.Request, most_s: float) -> float:
    """Return `Edgellm-Max-Wait` in seconds, at most `most_s`. Raises RejectedError."""
    value = request.headers.get("Edgellm-Max-Wait")
    if value is None:
        return most_s
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        fault = HttpFault(400, "bad_header", "Edgellm-Max-Wait is not a number of seconds", "e.g. Edgellm-Max-Wait: 2")
        raise RejectedError(fault)
    return min(seconds, most_s)


def _with_degraded(context: Context, upstream: Upstream, extra: Mapping[str, str]) -> Mapping[str, str]:
    """Return `extra` and the Edgellm-Degraded header where the model needs it. Raises RejectedError with `strict`."""
    # Asked after the wait: the restart of an engine may have changed what it serves.
    status = upstream.status()
    if not status.degraded:
        return extra
    less = degraded_header(status)
    if context.config.strict:
        raise RejectedError(
            HttpFault(503, "degraded", f"model {upstream.model_id!r} is degraded: {less}", "edgellm status")
        )
    return {**extra, DEGRADED: less}
