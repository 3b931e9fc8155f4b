"""`[[device]]` and the addresses that RPC may use: it has no authentication."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.config.devices import DeviceConfig, rpc_address
from edge.config.load import file_layer
from edge.errors import ConfigError

PRIVATE = [ip_network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")]


@pytest.mark.parametrize("text", ["127.0.0.1:50052", "127.9.9.9:1", "localhost:50052"])
def test_loopback_needs_no_interface(text: str) -> None:
    assert rpc_address(text).loopback


@pytest.mark.parametrize("host", ["10.0.0.2", "172.31.255.1", "192.168.55.100", "169.254.1.1", "100.100.1.2"])
def test_a_private_address_needs_the_name_of_its_interface(host: str) -> None:
    assert str(rpc_address(f"{host}:50052", "eth1")) == f"{host}:50052"
    with pytest.raises(ConfigError, match="needs the name of its private interface"):
        rpc_address(f"{host}:50052")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.0.0.0:50052", "open on every interface"),
        ("8.8.8.8:50052", "no private address"),
        ("172.32.0.1:50052", "no private address"),
        ("[::1]:50052", "no IPv6"),
        ("[fd00::1]:50052", "no IPv6"),
        ("orin.local:50052", "no host name"),
        ("10.0.0.2", "not the address"),
        ("10.0.0.2:0", "not the address"),
        ("10.0.0.2:65536", "not the address"),
        ("50052", "not the address"),
        ("", "not the address"),
    ],
)
def test_every_other_address_is_refused_with_a_sentence(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        rpc_address(text, "eth0")
    assert refused.value.hint


@given(st.integers(0, 2**32 - 1), st.sampled_from(["", "eth0"]))
def test_what_is_accepted_is_loopback_or_private_and_named(number: int, interface: str) -> None:
    address = IPv4Address(number)
    try:
        found = rpc_address(f"{address}:50052", interface)
    except ConfigError:
        return
    shared = address in ip_network("100.64.0.0/10")
    assert address.is_loopback or (interface and (shared or any(address in network for network in PRIVATE)))
    assert str(found) == f"{address}:50052"


def devices(tmp_path: Path, text: str) -> tuple[DeviceConfig, ...] | None:
    file = tmp_path / "edgellm.toml"
    file.write_text(text)
    layer = file_layer(file)
    assert layer is not None
    return layer.devices


def test_the_tables_of_a_file(tmp_path: Path) -> None:
    text = '[[device]]\nrpc = "10.0.0.2:50052"\ninterface = "eth1"\nmemory = "6GiB"\nabsent = "without"\n'
    found = devices(tmp_path, text + '[[device]]\nrpc = "localhost:50053"\n')
    assert found is not None
    assert (found[0].rpc, found[0].interface, found[0].memory, found[0].absent) == (
        "10.0.0.2:50052",
        "eth1",
        6 << 30,
        "without",
    )
    assert (found[1].rpc, found[1].memory, found[1].absent) == ("127.0.0.1:50053", 0, "wait")
    assert devices(tmp_path, "") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[device]]\nrpc = "10.0.0.2:50052"\n', "device 1: RPC has no authentication"),
        ('[[device]]\ninterface = "eth1"\n', "rpc is missing"),
        ('[[device]]\nrpc = "127.0.0.1:1"\nabsent = "never"\n', "wants one of wait, without"),
        ('[[device]]\nrpc = "127.0.0.1:1"\ncolour = 1\n', "unknown key colour"),
        ('[[device]]\nrpc = "127.0.0.1:1"\n[[device]]\nrpc = "localhost:1"\n', "stands in two"),
        ('device = "127.0.0.1:1"\n', "wants tables"),
    ],
)
def test_a_wrong_table_is_named_with_its_file(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        devices(tmp_path, text)
    assert "edgellm.toml" in str(refused.value)
