from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.config.devices import rpc_address
from edge.errors import AddressInUseError, ConfigError
from edge.linux import sockets
from edge.linux.sockets import split_host_port


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("[::1]:80", ("::1", 80)),
        (":8080", ("127.0.0.1", 8080)),
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("0.0.0.0", ("0.0.0.0", 8080)),
        ("[::]", ("::", 8080)),
        ("http://0.0.0.0:11434", ("0.0.0.0", 11434)),
        ("127.0.0.1:8080/", ("127.0.0.1", 8080)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("[::ffff:127.0.0.1]:80", ("::ffff:127.0.0.1", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert sockets.parse_address(text) == address


BROKEN = [
    "[::1:80",
    "::1]:80",
    "[[::1]]:80",
    "[]:80",
    "]:80",
    "[:80",
    "::1:80",
    "[::1]x:80",
    "[127.0.0.1]:80",
    "x[::1]:80",
]
BROKEN += [
    "localhost]:80",
    "1.2.3.4:80:90",
    "user@host:80",
    "a b:80",
    "\x1b[2J:80",
    "1.2.3.4:" + "1" * 5000,
    "1" * 5000,
]


@pytest.mark.parametrize(
    "text", ["", "http://", "a:b", "https://127.0.0.1:1", "1.2.3.4:70000", "1.2.3.4:-1", "1.2.3.4:", *BROKEN]
)
def test_what_is_no_address(text: str) -> None:
    """One reader for --listen, an rpc-server's address and the Host header."""
    with pytest.raises(ConfigError):
        sockets.parse_address(text)
    with pytest.raises(ConfigError):
        rpc_address(text, "eth0")
    assert not sockets.only_this_machine([text])


def test_a_name_that_begins_as_loopback_is_none() -> None:
    assert sockets.only_this_machine(["127.9.9.9:80"]) and not sockets.only_this_machine(["127.example.com:80"])


@given(st.text(st.sampled_from("[]:1.af%x/@ "), max_size=12))
def test_what_is_split_is_the_text_again(text: str) -> None:
    found = split_host_port(text)
    if found is not None:
        host, port = found
        assert text.partition("]:" if ":" in host else ":")[0].strip("[]") == host
        assert ("[" in text) == (":" in host) and text.count("[") == text.count("]") <= 1
        assert port is None or int(text.rpartition(":")[2]) == port


@pytest.mark.parametrize(
    "host",
    ["a" * 300, "..", "x..y", "é" * 70, "é..", "\udcff"],
    ids=["long", "dots", "label missing", "long label", "no label", "no UTF-8"],
)
def test_what_is_no_host_is_an_error_of_the_configuration(host: str) -> None:
    """The codec of international names raises UnicodeError for some of them."""
    before = open_descriptors()
    with pytest.raises(ConfigError) as caught:
        sockets.bind(["127.0.0.1:0", f"{host}:0"])
    assert str(caught.value).startswith(("cannot listen on", "not an address"))
    assert open_descriptors() == before


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def taken() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as owner:
        yield owner.getsockname()[1]


def test_fc34_a_taken_port_is_named_and_nothing_stays_open(taken: int) -> None:
    before = open_descriptors()
    with pytest.raises(AddressInUseError, match=str(taken)):
        sockets.bind(["127.0.0.1:0", f"127.0.0.1:{taken}"])
    assert open_descriptors() == before


def test_fc34_a_connection_in_time_wait_is_no_owner() -> None:
    first = sockets.bind(["127.0.0.1:0"])[0]
    port = first.getsockname()[1]
    with closing(socket.create_connection(("127.0.0.1", port))) as client:
        served, _ = first.accept()
        served.close()  # the side that closes first keeps TIME_WAIT: ours
        assert client.recv(1) == b""
    first.close()
    again = sockets.bind([f"127.0.0.1:{port}"])[0]
    assert sockets.url(again, tls=False) == f"http://127.0.0.1:{port}"
    again.close()


def test_a_unix_socket_is_named_by_its_path(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as local:
        local.bind(str(tmp_path / "s"))
        assert sockets.url(local, tls=True).startswith("unix:")


def test_variables_of_another_process_are_removed_and_not_believed() -> None:
    env = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
    assert sockets.inherited(env) == [] and env == {"HOME": "/"}
    for odd in ("x", "\u00b2", "9" * 5000, "-1"):
        assert sockets.inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": odd}) == []
