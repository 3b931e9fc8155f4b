from __future__ import annotations

import json
from typing import Any

import pytest

from edge.cli.timeline import chrome_trace, comparison, instants, is_whole, waterfall
from edge.daemon.start_timeline import Instants, Span, spans, start_record, with_limit, with_service_start

MARKS = {"load": 10.3, "header": 10.32, "tensors_begin": 10.4, "tensors_end": 11.4, "kv": 11.5, "reserve": 11.45}


def record(
    engine_ready_s: float | None = 11.9, outcome: str = "ready", *, since_boot: bool = False
) -> dict[str, object]:
    instants = Instants(10.0, 10.2, engine_ready_s, 12.0 if engine_ready_s else None, 12.0)
    found = spans(instants, [Span("plan", None, 0.05, 0.2)], MARKS, weights_bytes=1_000_000_000)
    return start_record(
        start_id="s",
        boot_id="b",
        model="chat",
        engine="e",
        rung=0,
        resident_ratio=0.5,
        instants=instants,
        spans=found,
        weights_bytes=1_000_000_000,
        spawn_cpu_s=0.12345,
        outcome=outcome,
        args=("--keep", "4"),
        file="/m.gguf",
        samples=[[0.5, 7.25, 100, None], [0.6, 8.0, None, 41.5]],
        gates={"driver": 10.2, "kv_cache": 11.5},
        since_boot=since_boot,
        load_mode="dio",
    )


def test_a_record_has_the_published_shape() -> None:
    document = record()
    assert json.loads(json.dumps(document)) == document
    assert document["args"] == ["--keep", "4"]
    assert document["schema"] == 1 and document["clock"] == "monotonic + boot offset"
    assert (document["spawn_s"], document["engine_ready_s"], document["ready_s"]) == (0.2, 1.9, 2.0)
    assert document["cache_state"] == {"resident_ratio": 0.5, "load_mode": "dio"}
    assert document["spawn_cpu_s"] == 0.1235
    assert set(document["limit"]) == {"bytes", "rate", "fixed_s", "total_s"}
    for span in document["spans"]:
        assert set(span) == {"name", "parent", "start_s", "end_s", "bytes", "source"}


def test_stages_are_relative_and_only_whole_ones_are_told() -> None:
    by_name = {span["name"]: span for span in record()["spans"]}
    assert by_name["weights"] == {
        "name": "weights",
        "parent": "engine",
        "start_s": 0.4,
        "end_s": 1.4,
        "bytes": 1_000_000_000,
        "source": "log",
    }
    assert "graph" not in by_name, "its end was stamped before its begin"
    assert "fit" not in by_name and "slots" not in by_name


def test_a_start_that_failed_has_no_readiness() -> None:
    failed = record(None, "failed: bad_model")
    assert failed["engine_ready_s"] is None and failed["ready_s"] is None
    assert "engine" not in [span["name"] for span in failed["spans"]]
    assert "failed: bad_model" in waterfall(failed)[0]


def test_the_waterfall_tells_size_and_rate() -> None:
    text = "\n".join(waterfall(record()))
    assert "953.7 MiB at 953.7 MiB/s" in text and "READY" in text and "50% of the model" in text


@pytest.mark.parametrize(
    "damage", [{"spans": None}, {"spans": [{"name": "x"}]}, {"gates": {"warm": "x"}}, {"limit": 0}]
)
def test_a_part_of_a_record_is_none(damage: dict[str, Any]) -> None:
    """A full disk or another version left it: `timeline` showed a traceback in place of the other starts."""
    assert is_whole(record()) and not is_whole({**record(), **damage}) and not is_whole({"schema": 1})


def test_a_comparison_and_a_trace() -> None:
    slow = record()
    text = "\n".join(comparison(slow, record()))
    assert "+0 ms" in text and "weights" in text
    events = chrome_trace(slow)["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "C", "i"} and events[0]["dur"] == 150_000


def test_a_start_at_boot_is_told_from_the_kernels_start() -> None:
    """The process began 10 s after the kernel, its service 0.4 s before."""
    booted = with_service_start(record(since_boot=True), start_id="s", service_s=9.6)
    assert booted["boot"] == {"process_s": 10.0, "service_s": 9.6}
    assert with_service_start(record(), start_id="another", service_s=9.6)["boot"]["service_s"] is None
    last = waterfall(booted)[-1]
    assert "the service at 9.6 s, the process at 10.0 s, READY at 12.0 s" in last
    assert not any("kernel" in line for line in waterfall(record())), "a restart of the engine is no part of a boot"
    events = {event["name"]: event for event in chrome_trace(booted)["traceEvents"]}
    assert (events["boot"]["ts"], events["boot"]["dur"]) == (0, 9_600_000)
    assert (events["service"]["ts"], events["service"]["dur"]) == (9_600_000, 400_000)
    assert events["plan"]["ts"] == 10_050_000 and events["READY"]["ts"] == 12_000_000
    late = booted | {"boot": {"process_s": 86_400.0, "service_s": 86_399.0}}
    assert "boot" not in {event["name"] for event in chrome_trace(late)["traceEvents"]}
    assert not any("kernel" in line for line in waterfall(late))


def test_gates_and_readiness_stand_in_their_order() -> None:
    names = [name for name, _ in instants(record())]
    assert names == ["gate driver", "gate kv_cache", "engine ready", "first token", "READY"]
    assert instants({"spans": []}) == [], "a record of an older edgellm"


def test_a_start_states_its_limit_and_the_distance_from_it() -> None:
    """1 GB at 2 GB/s, and the 0.7 s in which the engine read no weights: 1.2 s, of which 1.7 s is 1.417 times."""
    found = with_limit(record(), file="/m.gguf", bytes_s=2_000_000_000, streams=4)
    assert found["limit"] == {
        "bytes": 1_000_000_000,
        "rate": 2_000_000_000,
        "streams": 4,
        "fixed_s": 0.7,
        "total_s": 1.2,
        "distance": 1.417,
    }
    assert "1.42 times that" in waterfall(found)[-1] and "(4 direct streams)" in waterfall(found)[-1]
    assert with_limit(found, file="/m.gguf", bytes_s=1, streams=1) == found, "it keeps the rate of its own time"
    assert with_limit(record(), file="/other.gguf", bytes_s=1, streams=1) == record()
    assert with_limit(record(None), file="/m.gguf", bytes_s=1, streams=1) == record(None)


def test_the_limit_of_a_start_that_read_weights_in_other_stages_takes_the_shortest_of_those() -> None:
    """After a cold start with mmap 13.7 s lie outside the weights, page faults among them; a warm start took 0.7 s."""
    cold = record(24.9)

    def limit(*others: dict[str, object]) -> dict[str, object]:
        found = with_limit(cold, file="/m.gguf", bytes_s=2_000_000_000, streams=4, others=others)["limit"]
        assert isinstance(found, dict)
        return found

    assert (limit()["fixed_s"], limit()["distance"]) == (13.7, 1.035)
    assert (limit(record(), cold)["fixed_s"], limit(record())["distance"]) == (0.7, 12.25)
    assert limit(record() | {"engine": "another"}, record(None)) == limit()


def test_the_trace_has_counters_for_power_memory_and_heat_and_marks_for_readiness() -> None:
    events = chrome_trace(record())["traceEvents"]
    counters = [(event["name"], event["ts"], event["args"]["value"]) for event in events if event["ph"] == "C"]
    assert counters == [
        ("power (W)", 500000, 7.25),
        ("memory (bytes)", 500000, 100),
        ("power (W)", 600000, 8.0),
        ("temperature (°C)", 600000, 41.5),
    ]
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert marks == ["gate driver", "gate kv_cache", "engine ready", "first token", "READY"]
