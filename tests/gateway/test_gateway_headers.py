from __future__ import annotations

import pytest

from edge.gateway.headers import to_client, to_upstream
from edge.supervisor.engine_connection import Pairs, request_head


def test_what_belongs_to_a_connection_or_to_us_stays_here() -> None:
    sent = [
        ("Host", "box"),
        ("Connection", "keep-alive, X-Mine"),
        ("X-Mine", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Transfer-Encoding", "chunked"),
        ("Upgrade", "h2c"),
        ("Authorization", "Bearer secret"),
        ("X-Api-Key", "secret"),
        ("Expect", "100-continue"),
        ("Edgellm-Max-Wait", "2"),
        ("X-Conversation-Id", "a::b"),
        ("Accept-Encoding", "gzip"),
    ]
    assert to_upstream(sent) == [("Host", "box"), ("X-Conversation-Id", "a::b"), ("Accept-Encoding", "gzip")]


def test_a_client_cannot_have_the_framing_dropped() -> None:
    sent = [("Connection", "Content-Length, Host"), ("Content-Length", "3"), ("Host", "box")]
    assert to_upstream(sent) == [("Content-Length", "3"), ("Host", "box")]


def test_the_engines_cors_answer_is_dropped_and_doubled_headers_stay_double() -> None:
    answered = [
        ("Server", "llama.cpp"),
        ("Access-Control-Allow-Origin", "*"),
        ("access-control-allow-credentials", "true"),
        ("Keep-Alive", "timeout=5, max=100"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
    ]
    assert to_client(answered) == [("Server", "llama.cpp"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]


@pytest.mark.parametrize(
    ("method", "pairs", "body_bytes", "frame"),
    [
        ("POST", [], 2, "Content-Length: 2"),
        ("POST", [("content-length", "2")], 2, "content-length: 2"),
        ("POST", [], 0, "Content-Length: 0"),
        ("DELETE", [], 0, "Content-Length: 0"),
        ("POST", [], None, "Transfer-Encoding: chunked"),
        ("POST", [("Content-Length", "9")], None, "Content-Length: 9"),
        ("GET", [], 0, None),
        ("HEAD", [], 0, None),
        ("GET", [], 2, "Content-Length: 2"),
    ],
)
def test_a_body_is_framed_once(method: str, pairs: Pairs, body_bytes: int | None, frame: str | None) -> None:
    first, *rows = request_head(method, "/x?a=1", pairs, body_bytes, keep=True).decode().split("\r\n")
    assert (first, rows[-2:]) == (f"{method} /x?a=1 HTTP/1.1", ["", ""])
    assert [row for row in rows if row.lower().startswith(("content-length", "transfer-"))] == [frame] * bool(frame)
    assert "Host: engine" in rows and "Connection: close" not in rows


def test_what_only_a_client_needs_is_not_sent() -> None:
    head = request_head("GET", "/x#part", [("host", "board.local")], 0, keep=False)
    assert head == b"GET /x HTTP/1.1\r\nhost: board.local\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\rb"])
def test_a_line_break_makes_no_second_header(value: str) -> None:
    heads: list[tuple[Pairs, str]] = [([("X-A", value)], "/x"), ([(value, "a")], "/x"), ([], value)]
    for pairs, target in heads:
        with pytest.raises(ValueError, match="line break"):
            request_head("GET", target, pairs, 0, keep=True)
