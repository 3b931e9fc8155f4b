from __future__ import annotations

import json

from edge.cli.timeline import chrome_trace, comparison, waterfall
from edge.daemon.start_timeline import Instants, Span, spans, start_record

MARKS = {"load": 10.3, "header": 10.32, "tensors_begin": 10.4, "tensors_end": 11.4, "kv": 11.5, "reserve": 11.45}


def record(engine_ready_s: float | None = 11.9, outcome: str = "ready") -> dict[str, object]:
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
    )


def test_a_record_has_the_published_shape() -> None:
    document = record()
    assert json.loads(json.dumps(document)) == document
    assert document["schema"] == 1 and document["clock"] == "monotonic + boot offset"
    assert (document["spawn_s"], document["engine_ready_s"], document["ready_s"]) == (0.2, 1.9, 2.0)
    assert document["cache_state"] == {"resident_ratio": 0.5} and document["spawn_cpu_s"] == 0.1235
    assert set(document["limit"]) == {"bytes", "rate", "fixed_s", "total_s"}  # type: ignore[call-overload]
    for span in document["spans"]:  # type: ignore[attr-defined]
        assert set(span) == {"name", "parent", "start_s", "end_s", "bytes", "source"}


def test_stages_are_relative_and_only_whole_ones_are_told() -> None:
    by_name = {span["name"]: span for span in record()["spans"]}  # type: ignore[attr-defined]
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
    assert "engine" not in [span["name"] for span in failed["spans"]]  # type: ignore[attr-defined]
    assert "failed: bad_model" in waterfall(failed)[0]


def test_the_waterfall_tells_size_and_rate() -> None:
    text = "\n".join(waterfall(record()))
    assert "953.7 MiB at 953.7 MiB/s" in text and "READY" in text and "50% of the model" in text


def test_a_comparison_and_a_trace() -> None:
    slow = record()
    text = "\n".join(comparison(slow, record()))
    assert "+0 ms" in text and "weights" in text
    events = chrome_trace(slow)["traceEvents"]
    assert {event["ph"] for event in events} == {"X"} and events[0]["dur"] == 150_000
