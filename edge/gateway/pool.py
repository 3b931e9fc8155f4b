"""Connections to the engines: one pool for each child, gone when the child is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp

from edge.units import KIB
from edge.upstream import Endpoint

# llama-server closes idle connections after 5 s or 100 requests; a pool that waits as long loses the race now and then.
ENGINE_KEEPS_S = 5.0
KEEP_S = 3.0
# Connections kept beyond one for each slot. The other two of the engine's threads are for its owner's probes.
SPARE = 2
READ_BYTES = 64 * KIB  # what may wait for a client that reads slowly
HEADER_BYTES = 64 * KIB
_AUTO = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class _Pool:
    def __init__(self, endpoint: Endpoint) -> None:
        self.generation = endpoint.generation
        self.socket_path = endpoint.socket_path
        self.users = 0
        self.session = _session(aiohttp.UnixConnector(path=endpoint.socket_path, limit=0, keepalive_timeout=KEEP_S))
        self._fresh: aiohttp.ClientSession | None = None

    @property
    def fresh(self) -> aiohttp.ClientSession:
        """Each request on a connection of its own."""
        if self._fresh is None:
            self._fresh = _session(aiohttp.UnixConnector(path=self.socket_path, limit=0, force_close=True))
        return self._fresh

    async def close(self) -> None:
        await self.session.close()
        if self._fresh is not None:
            await self._fresh.close()


def _session(connector: aiohttp.UnixConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_AUTO,
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        max_line_size=HEADER_BYTES,
        max_field_size=HEADER_BYTES,
    )


class Pools:
    """By model. A pool whose child was replaced is closed as soon as nobody streams from it."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._old: list[_Pool] = []

    @contextmanager
    def session(
        self, model: str, endpoint: Endpoint, slots: int, *, fresh: bool = False
    ) -> Iterator[tuple[aiohttp.ClientSession, bool]]:
        """A session, and whether its connection may be kept: llama-server has slots + 4 threads that stay, an idle
        connection occupies one of them, and a burst of new ones can then wait seconds for a thread. `fresh`: a
        connection that was not used before, and will not be again."""
        pool = self._pools.get(model)
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
        """Closes what is left of replaced children."""
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
