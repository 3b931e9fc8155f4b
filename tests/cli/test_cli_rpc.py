"""`edgellm rpc`: addresses without authentication are refused before anything starts."""

from __future__ import annotations

import pytest

from tests.serving import edgellm, free_port


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("--listen", "0.0.0.0:50052"), 78, "open on every interface"),
        (("--listen", "0.0.0.0:50052", "--interface", "lo"), 78, "open on every interface"),
        (("--listen", "8.8.8.8:50052", "--interface", "lo"), 78, "no private address"),
        (("--listen", "10.99.99.99:50052"), 78, "needs the name of its private interface"),
        (("--listen", "10.99.99.99:50052", "--interface", "lo"), 75, "lo has no address 10.99.99.99"),
        (("--listen", "board.local:50052"), 78, "no host name"),
    ],
)
def test_an_address_that_others_may_reach_is_refused(words: tuple[str, ...], code: int, why: str) -> None:
    done = edgellm("rpc", "serve", *words)
    assert done.returncode == code and why in done.stderr, done.stderr
    assert "hint:" in done.stderr


def test_asking_a_server_that_is_not_there() -> None:
    done = edgellm("rpc", "ask", f"127.0.0.1:{free_port()}")
    assert done.returncode == 75 and "no rpc-server at" in done.stderr


def test_a_limit_without_a_cache_is_refused() -> None:
    done = edgellm("rpc", "serve", "--cache-limit", "1GiB")
    assert done.returncode == 64 and "add --cache" in done.stderr, done.stderr


def test_a_limit_that_is_no_size_is_refused() -> None:
    done = edgellm("rpc", "serve", "--cache", "--cache-limit", "plenty")
    assert done.returncode == 64 and "not a size: 'plenty'" in done.stderr, done.stderr
