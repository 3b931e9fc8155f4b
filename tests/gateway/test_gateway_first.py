"""The spine: hold, pass on, answer probes."""

from __future__ import annotations

import asyncio

from tests.gateway.conftest import Rigs
from tests.gateway.raw import until


async def test_a_request_before_the_model_is_ready_is_held_and_then_answered(rig: Rigs) -> None:
    here = await rig(loading=True)
    early = asyncio.ensure_future(here.client.post("/v1/chat/completions", data=b"x" * 1000))
    await until(lambda: here.model.waiting)
    async with here.client.get("/health") as probe:
        assert probe.status == 503
        assert (await probe.json())["error"]["message"] == "Loading model"
    await here.model.ready(str(here.engine.path))
    async with await early as answer:
        assert answer.status == 200
        assert await answer.json() == {"ok": True, "body_bytes": 1000}
    async with here.client.get("/health") as probe:
        assert await probe.json() == {"status": "ok"}
