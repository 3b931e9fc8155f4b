from __future__ import annotations

from edge.gateway.headers import to_client, to_upstream


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
