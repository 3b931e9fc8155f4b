"""The documents: errors, health, names, Ollama's lists, log lines."""

from __future__ import annotations

import json

import pytest

from edge.gateway import access_log, health, model_name, openai
from edge.gateway.access_log import AccessEntry
from edge.gateway.openai import HttpFault, ListedModel, RejectedError
from edge.supervisor.status import Degraded, Failure, Gate, ModelStatus, State

READY = ModelStatus("chat", State.READY)
LESS = ModelStatus("chat", State.READY, degraded=(Degraded("n_ctx", "8192", "4096", "memory"),))
FAILED = ModelStatus("chat", State.FAILED, failure=Failure("bad_model", "/home/me/x.gguf: magic", "pull it again"))


def test_an_error_has_openais_fields_and_says_where_it_comes_from() -> None:
    error = HttpFault(429, "busy", "wait", "later", 1.2, evidence="/secret").document()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert (error["code"], error["type"], error["src"], error["kind"]) == (429, "rate_limit_error", "edgellm", "busy")
    assert "/secret" not in json.dumps(error)


def test_evidence_is_for_the_admin() -> None:
    assert HttpFault(503, "x", "m", evidence="line").document(admin=True)["error"]["evidence"] == "line"


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "1"), (0.2, "1"), (1.2, "2"), (60.0, "60")])
def test_retry_after_is_whole_and_never_zero(seconds: float, text: str) -> None:
    assert openai.retry_after(seconds) == text


@pytest.mark.parametrize(
    ("target", "first"),
    [("/v1/chat/completions", "data: "), ("/v1/messages", "event: error"), ("/v1/responses?x=1", "event: error")],
)
def test_a_broken_stream_ends_with_an_error_in_its_own_dialect(target: str, first: str) -> None:
    event = openai.sse_error(target, HttpFault(502, "died", "gone", "again")).decode()
    assert event.startswith("\n\n" + first)
    assert event.endswith("\n\n")
    document = json.loads(event.partition("data: ")[2])
    assert document.get("type") == ("error" if first.startswith("event") else None)
    assert "gone" in json.dumps(document)


@pytest.mark.parametrize(
    ("statuses", "word"),
    [
        ([READY], "ok"),
        ([LESS], "degraded"),
        ([READY, FAILED], "failed"),
        ([READY, ModelStatus("b", State.LOADING)], "starting"),
        ([READY, ModelStatus("b", State.STOPPED)], "ok"),
        ([READY, ModelStatus("b", State.STOPPED, failure=Failure("too_hot", "", ""))], "starting"),
        ([ModelStatus("b", State.SLEEPING)], "ok"),
        ([ModelStatus("b", State.SLEEPING, failure=Failure("too_hot", "", ""))], "starting"),
        ([], "starting"),
    ],
)
def test_health_in_one_word(statuses: list[ModelStatus], word: str) -> None:
    assert health.overall(statuses) == word


def test_a_model_that_sleeps_serves_unless_the_board_is_too_hot_to_wake_it() -> None:
    asleep = ModelStatus("b", State.SLEEPING)
    assert health.serves(asleep, strict=True)
    assert not health.serves(ModelStatus("b", State.SLEEPING, failure=Failure("too_hot", "", "")), strict=False)


def test_healthz_tells_kind_and_hint_and_the_evidence_only_to_the_admin() -> None:
    public = json.dumps(health.healthz([FAILED], None, 0.0))
    assert "bad_model" in public and "pull it again" in public
    assert "/home/me" not in public
    assert "/home/me" in json.dumps(health.healthz([FAILED], None, 0.0, admin=True))


def test_gates_carry_wall_clock_times() -> None:
    gate = Gate(True, since_s=100.0, took_s=0.25, evidence="1 device", devices={"CUDA0": Gate(True)})
    status = ModelStatus("chat", State.LOADING, gates={"driver": gate, "weights": Gate(blocked_by="context")})
    document = health.healthz([status], {"source": "sysfs"}, 1_700_000_000.0)
    gates = document["models"]["chat"]["gates"]
    assert gates["driver"]["since"] == 1_700_000_100.0
    assert gates["driver"]["devices"]["CUDA0"]["ready"] is True
    assert gates["weights"] == {
        "ready": False,
        "since": None,
        "took_s": None,
        "evidence": None,
        "blocked_by": "context",
    }
    assert health.blocked_by(status) == "weights"


def test_a_degraded_model_serves_unless_strict() -> None:
    assert health.serves(LESS, strict=False) and not health.serves(LESS, strict=True)
    assert health.degraded_header(LESS) == "n_ctx: 4096 instead of 8192"
    odd = ModelStatus("c", State.READY, degraded=(Degraded("gpu", "ü\r\nSet-Cookie: a", "x", ""),))
    assert "\n" not in health.degraded_header(odd) and health.degraded_header(odd).isascii()


@pytest.mark.parametrize(
    ("body", "kind", "target", "expected"),
    [
        (b'{"messages":[],"model":"last"}', "application/json", "/x", "last"),
        (b'{"messages":[{"model":"inner"}]}', "application/json", "/x", None),
        (b'{"model": 3}', "application/json", "/x", None),
        (b"[1]", "application/json", "/x", None),
        (None, "application/json", "/props?model=a%2Fb", "a/b"),
        (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nw\r\n--b--',
            "multipart/form-data; boundary=b",
            "/x",
            "w",
        ),
    ],
)
def test_which_model_a_request_names(body: bytes | None, kind: str, target: str, expected: str | None) -> None:
    assert model_name.named_model(body, kind, target) == expected


@pytest.mark.parametrize("body", [b"\xff\xfe{", b"{", b'{"a":' * 100_000, b'{"model": "\xc3\x28"}'])
def test_a_body_that_is_no_json_is_a_400(body: bytes) -> None:
    with pytest.raises(RejectedError) as error:
        model_name.named_model(body, "application/json", "/x")
    assert error.value.fault.status == 400


GATE_CASES = [
    ({}, None),
    ({"driver": Gate(True), "weights": Gate(), "warm": Gate(blocked_by="weights")}, "weights"),
    ({"driver": Gate(True), "weights": Gate(True), "warm": Gate()}, "warm"),
    ({"driver": Gate(), "context": Gate(blocked_by="driver")}, "driver"),
    # It died while loading: the context was open, and is closed with its process.
    ({"driver": Gate(True), "context": Gate(), "weights": Gate(), "warm": Gate(blocked_by="weights")}, "weights"),
    ({"driver": Gate(True), "context": Gate(), "weights": Gate(), "warm": Gate()}, "warm"),
]


@pytest.mark.parametrize(("gates", "expected"), GATE_CASES)
def test_the_gate_that_failed_is_the_one_that_blocks(gates: dict[str, Gate], expected: str | None) -> None:
    assert health.blocked_by(ModelStatus("chat", State.FAILED, gates=gates)) == expected


def test_models_are_listed_in_llama_servers_shape() -> None:
    document = openai.models_document([ListedModel("chat", ("c",), {"n_ctx_train": 8192})], 5)
    assert document["object"] == "list"
    assert document["data"][0]["id"] == "chat" and document["data"][0]["meta"] == {"n_ctx_train": 8192}
    assert document["models"][0]["model"] == "chat"


ENTRY = AccessEntry(
    "POST", "/v1/chat/completions", 200, 1.5, key="my laptop", model="chat", prompt_tokens=31, tokens_per_s=41.26
)


def test_a_log_line_is_one_line() -> None:
    line = access_log.render_text(ENTRY)
    assert line == 'POST /v1/chat/completions 200 ok 1.500s key="my laptop" model=chat tokens=31+? 41.3 tok/s'
    forged = access_log.render_text(AccessEntry("GET", "other", 200, 0.1, key="a\nGET / 200", prompt="x\ny"))
    assert "\n" not in forged
    assert json.loads(access_log.render_json(ENTRY))["prompt_tokens"] == 31
    assert "first_token_s" not in json.loads(access_log.render_json(ENTRY))
