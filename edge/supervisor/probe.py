"""Ask one engine over its private unix socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

# A long prompt may block /health for seconds: a late answer means a busy engine, and the next poll asks again.
HEALTH_TIMEOUT_S = 2.0


class Probe:
    """The HTTP client of one child; a new child gets a new Probe."""

    def __init__(self, socket_path: Path) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(socket_path)))

    async def health(self) -> int | None:
        """Return the status of /health; None when nothing answers."""
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._session.get("http://engine/health", timeout=timeout) as response:
                await response.read()  # closing it half-read would make the engine log a broken connection
                return response.status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return None

    async def get(self, path: str) -> Any | None:
        """Return a JSON document; None when there is none."""
        try:
            async with self._session.get(f"http://engine{path}") as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
            return None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and JSON, without a timeout. Raises aiohttp.ClientError or OSError if the engine goes away."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.post(f"http://engine{path}", json=body, timeout=timeout) as response:
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                return response.status, None

    async def close(self) -> None:
        await self._session.close()
