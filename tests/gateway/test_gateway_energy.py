"""A request's joules: from its turn to the end of its answer, beside others, and when it is cancelled."""

import asyncio

import pytest

from edge.gateway.access_log import render_json, render_text
from edge.gateway.accounting import RequestRecord, UsageCounter
from edge.gateway.dispatch import measured
from edge.telemetry.energy import EnergyMeter


def visit() -> RequestRecord:
    began_s = asyncio.get_running_loop().time()
    return RequestRecord(
        "POST", began_s, route="/v1/chat/completions", code=200, model="chat", usage=UsageCounter(began_s)
    )


async def feed(meter: EnergyMeter, watts: float, samples: int) -> None:
    for _ in range(samples):
        meter.add(asyncio.get_running_loop().time(), watts)
        await asyncio.sleep(0.002)


async def test_the_estimate_is_left_in_the_visit_and_in_the_log() -> None:
    meter = EnergyMeter()
    await feed(meter, 1000.0, 1)  # power at the start is known only from a sample before it
    one = visit()
    with measured(meter, one, "chat"):
        assert meter.open("chat") == 1
        await feed(meter, 1000.0, 5)
        one.usage.chunk(b'{"usage":{"completion_tokens":12}}', one.began_s)
        assert meter.tokens("chat") == 1  # its chunks, while it runs
    assert meter.open() == 0
    assert meter.by_model["chat"].tokens == 12
    assert one.joules is not None and one.joules > 1000 * 0.008
    entry = one._entry(one.began_s + 1.0)
    assert f"~{one.joules:.1f} J" in render_text(entry)
    assert '"joules": ' in render_json(entry)


async def test_too_few_samples_is_nothing_not_zero() -> None:
    meter, one = EnergyMeter(), visit()
    with measured(meter, one, "chat"):
        await feed(meter, 10.0, 2)
    assert one.joules is None
    assert " J" not in render_text(one._entry(one.began_s + 1.0))


async def test_a_client_that_leaves_counts_no_token() -> None:
    meter, one = EnergyMeter(), visit()
    with pytest.raises(asyncio.CancelledError), measured(meter, one, "chat"):
        one.usage.chunk(b"data: x", one.began_s)
        raise asyncio.CancelledError
    assert meter.open() == 0
    assert meter.tokens("chat") == 0


async def test_without_telemetry_nothing_is_measured() -> None:
    one = visit()
    with measured(None, one, "chat"):
        pass
    assert one.joules is None
