from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edge.errors import AddressInUseError, ConfigError
from edge.linux import sockets


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
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert sockets.parse_address(text) == address


@pytest.mark.parametrize("text", ["", "http://", "a:b", "https://127.0.0.1:1", "1.2.3.4:70000", "1.2.3.4:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError):
        sockets.parse_address(text)


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
    assert sockets.inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x"}) == []
