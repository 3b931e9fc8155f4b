from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.gateway.accounting import Histogram, TokenUsage, UsageCounter, parse_tokens

TIMINGS = {"cache_n": 4, "prompt_n": 26, "prompt_ms": 31.25, "predicted_n": 8, "predicted_per_second": 96.5}


def test_fc83_a_usage_chunk_with_empty_choices_is_counted() -> None:
    usage = {
        "choices": [],
        "usage": {"completion_tokens": 8, "prompt_tokens": 30, "total_tokens": 38},
        "timings": TIMINGS,
    }
    stream = (
        b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
        + f"data: {json.dumps(usage)}\n\n".encode()
        + b"data: [DONE]\n\n"
    )
    assert parse_tokens(stream) == TokenUsage(30, 8, 96.5, 31.25)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"timings": TIMINGS}, (30, 8)),
        ({"usage": {"input_tokens": 5, "output_tokens": 7}}, (5, 7)),
        ({"usage": {"prompt_tokens": 5, "total_tokens": 5}}, (5, None)),
        ({"content": "x", "tokens_predicted": 9, "tokens_evaluated": 3}, (3, 9)),
        ({"ok": True}, (None, None)),
    ],
)
def test_every_dialect_says_its_tokens_in_its_own_way(answer: dict[str, object], expected: tuple[int, int]) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        found = parse_tokens(json.dumps(answer, separators=separators).encode())
        assert (found.prompt, found.completion) == expected


def test_a_text_that_talks_about_usage_is_not_usage() -> None:
    text = json.dumps({"content": '{"completion_tokens": 99999, "prompt_tokens": 1}'}).encode()
    assert parse_tokens(text) == TokenUsage()


@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    parse_tokens(data)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=40))
def test_the_tail_is_found_however_it_is_cut_into_chunks(sizes: list[int]) -> None:
    whole = b"x" * 9000 + json.dumps({"usage": {"completion_tokens": 8, "prompt_tokens": 30}}).encode()
    tally = UsageCounter(0.0)
    at, turn = 0, 0
    while at < len(whole):
        size = sizes[turn % len(sizes)]
        tally.chunk(whole[at : at + size], float(turn))
        at, turn = at + size, turn + 1
    assert tally.tokens().completion == 8
    assert tally.size_bytes == len(whole)


def test_times_are_to_the_first_chunk_and_between_chunks() -> None:
    between = Histogram((0.5, 1.0))
    tally = UsageCounter(10.0, between)
    for at in (10.5, 10.75, 11.75, 14.0):
        tally.chunk(b'{"usage":{"completion_tokens":5}}', at)
    assert tally.to_first_s == 0.5
    assert between.counts == [1, 1, 1]
    assert tally.per_s() == pytest.approx(4 / 3.5)


def test_a_histogram_counts_cumulatively() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 102.0


def test_arguments_of_a_tool_call_are_no_figures() -> None:
    forged = '{"prompt_tokens":999999999999,"completion_tokens":888888888888,"predicted_per_second":5,'
    forged += '"usage":{"prompt_n":7}}'
    answer = '{"content":[{"type":"tool_use","id":"1","name":"f","input":' + forged + "}],"
    answer += '"usage":{"input_tokens":10,"output_tokens":5}}'
    assert parse_tokens(answer.encode()) == TokenUsage(10, 5, None, None)
