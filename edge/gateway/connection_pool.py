"""Pool connections to the engines: one pool for each engine process, closed with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from edge.supervisor.upstream import Endpoint
from edge.supervisor.warmup_run import connector
from edge.units import KIB

# cpp-httplib in llama-server closes a connection after 5 s of idleness or 100 requests (CPPHTTPLIB_KEEPALIVE_*). A pool
# that keeps it as long sends a request into the closing connection now and then.
ENGINE_KEEPS_S = 5.0
KEEP_S = 3.0
# Connections kept beyond one for each slot: llama-server has slots + 4 HTTP threads, and an idle connection occupies
# one. The other two are for the supervisor's probes.
SPARE = 2
READ_BYTES = 64 * KIB  # buffered for a client that reads slowly
HEADER_BYTES = 64 * KIB
_AUTO = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class _Pool:
    def __init__(self, endpoint: Endpoint) -> None:
        self.generation = endpoint.generation
        self.socket_path = endpoint.socket_path
        self.port = endpoint.port
        self.users = 0
        self.session = _session(connector(self.socket_path, self.port, limit=0, keepalive_timeout=KEEP_S))
        self._fresh: aiohttp.ClientSession | None = None

    @property
    def fresh(self) -> aiohttp.ClientSession:
        """Return a session that opens a connection for each request."""
        if self._fresh is None:
            self._fresh = _session(connector(self.socket_path, self.port, limit=0, force_close=True))
        return self._fresh

    async def close(self) -> None:
        await self.session.close()
        if self._fresh is not None:
            await self._fresh.close()


def _session(to_engine: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=to_engine,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_AUTO,
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )


class Pools:
    """Pools by model. The pool of a replaced engine is closed when its last stream has ended."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._old: list[_Pool] = []

    @contextmanager
    def session(
        self, model: str, endpoint: Endpoint, slots: int, *, fresh: bool = False
    ) -> Iterator[tuple[aiohttp.ClientSession, bool]]:
        """Yield a session, and whether its connection may be kept: a burst of new connections would wait seconds for
        an HTTP thread of the engine behind idle ones. `fresh`: open a new connection and close it after use."""
        pool = self._pools.get(model)
        # A restarted engine has the same path: its generation tells it from the one that died.
        if pool is None or pool.generation != endpoint.generation or pool.socket_path != endpoint.socket_path:
            if pool is not None:
                self._old.append(pool)
            pool = self._pools[model] = _Pool(endpoint)
        pool.users += 1
        try:
            if fresh:
                yield pool.fresh, False
            else:
                yield pool.session, pool.users <= slots + SPARE
        finally:
            pool.users -= 1

    async def sweep(self) -> None:
        """Close the pools of replaced engines that are not in use."""
        for pool in [old for old in self._old if old.users == 0]:
            self._old.remove(pool)
            await pool.close()

    @property
    def stale(self) -> bool:
        return bool(self._old)

    async def close(self) -> None:
        pools = [*self._pools.values(), *self._old]
        self._pools.clear()
        self._old.clear()
        for pool in pools:
            await pool.close()
