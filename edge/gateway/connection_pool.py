"""Pool connections to the engines: one pool for each engine process, closed with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from edge.supervisor.engine_connection import EngineConnection
from edge.supervisor.upstream import Endpoint

# cpp-httplib in llama-server closes a connection after 5 s of idleness or 100 requests (CPPHTTPLIB_KEEPALIVE_*). A pool
# that keeps it as long sends a request into the closing connection now and then.
ENGINE_KEEPS_S = 5.0
KEEP_S = 3.0
# Connections kept beyond one for each slot: llama-server has slots + 4 HTTP threads, and an idle connection occupies
# one. The other two are for the supervisor's probes.
SPARE = 2


class _Pool:
    """The connections to one engine process. `users` counts those in use."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.users = 0
        self._idle: list[EngineConnection] = []  # the one that was used last at the end
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, *, fresh: bool, keep: bool) -> EngineConnection:
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.reusable:
                break
            connection.close()  # the engine has closed it
        else:
            connection = EngineConnection(self.endpoint)
        connection.keep = keep
        return connection

    def put_back(self, connection: EngineConnection) -> None:
        if self._closed or not connection.reusable:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.rest(loop.time())
        self._idle.append(connection)
        if self._timer is None:
            self._timer = loop.call_later(KEEP_S, self._expire)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and loop.time() - self._idle[0].idle_since_s >= KEEP_S:
            self._idle.pop(0).close()
        self._timer = loop.call_at(self._idle[0].idle_since_s + KEEP_S, self._expire) if self._idle else None

    def close(self) -> None:
        """Close what is idle now, and each other connection once it is put back."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for each in self._idle:
            each.close()
        self._idle.clear()


class Pools:
    """Pools by model. The connections to a replaced engine end with their streams."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    @contextmanager
    def connection(
        self, model: str, endpoint: Endpoint, slots: int, *, fresh: bool = False
    ) -> Iterator[EngineConnection]:
        """Yield a connection for one request, which ends the work at the engine if the answer was not read to its end.

        Beyond `slots` + SPARE it is not kept: a burst of new connections would wait seconds for an HTTP thread of the
        engine behind idle ones. `fresh`: open a new connection and close it after use.
        """
        pool = self._pools.get(model)
        # A restarted engine has the same path: its generation tells it from the one that died.
        now = (endpoint.generation, endpoint.socket_path)
        if pool is None or now != (pool.endpoint.generation, pool.endpoint.socket_path):
            if pool is not None:
                pool.close()
            pool = self._pools[model] = _Pool(endpoint)
        pool.users += 1
        connection = pool.take(fresh=fresh, keep=not fresh and pool.users <= slots + SPARE)
        try:
            yield connection
        finally:
            pool.users -= 1
            pool.put_back(connection)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
