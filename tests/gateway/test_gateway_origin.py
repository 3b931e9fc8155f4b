from __future__ import annotations

import pytest

from edge.gateway.origin import OriginPolicy, host_name, is_loopback


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Box.Local:8080", "box.local"),
        ("[::1]:8080", "::1"),
        ("[::1]", "::1"),
        ("127.0.0.1", "127.0.0.1"),
        ("localhost.", "localhost"),
        ("::1", "::1"),
    ],
)
def test_the_name_in_a_host(host: str, name: str) -> None:
    assert host_name(host) == name


OURS = ["localhost:1", "127.0.0.1:80", "127.9.9.9", "[::1]:80", "chat.localhost", "box:1", "0.0.0.0:80", "[::]:80"]


@pytest.mark.parametrize("host", OURS)
def test_our_own_names_are_let_in(host: str) -> None:
    assert OriginPolicy.of(("box",), ()).check_host(host, lambda: "127.0.0.1") is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.7",
        "0x7f000001",
        "0.0.0.1",
        "0.0.0.0.evil.example",
    ],
)
def test_a_foreign_name_is_not(host: str) -> None:
    fault = OriginPolicy.of(("box",), ()).check_host(host, lambda: "127.0.0.1")
    assert fault is not None
    assert (fault.status, fault.kind) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    [
        "[::1:80",
        "[::1]evil.example",
        "[localhost]",
        "[::1]:x",
        "[::1]:80:80",
        "localhost:99999999",
        "a[.localhost",
        "/x",
    ],
)
def test_what_is_no_host_is_no_name_of_ours(host: str) -> None:
    fault = OriginPolicy.of(("box", "[", "[box"), ()).check_host(host, lambda: "127.0.0.1")
    assert fault is not None and fault.status == 400
    assert OriginPolicy.of((), ()).check_host(host, lambda: None) is None, "on a unix socket any"


def test_a_zone_belongs_to_ipv6_only() -> None:
    assert not is_loopback("127.0.0.1%evil") and is_loopback("::1%lo")


def test_the_address_of_the_connection_itself_is_a_name() -> None:
    door = OriginPolicy.of((), ())
    assert door.check_host("10.0.0.7:8080", lambda: "10.0.0.7") is None
    assert door.check_host("10.0.0.7:8080", lambda: "10.0.0.8") is not None
    assert door.check_host("192.168.0.5", lambda: "::ffff:192.168.0.5") is None


def test_no_host_on_a_unix_socket_and_any_host_where_the_owner_says_so() -> None:
    assert OriginPolicy.of((), ()).check_host("evil.example", lambda: None) is None
    assert OriginPolicy.of(("*",), ()).check_host("evil.example", lambda: "10.0.0.7") is None


def test_own_names_and_addresses_are_let_in_and_lookalikes_are_not() -> None:
    door = OriginPolicy.of((), ())
    own = {"box", "box.local", "192.168.1.5", "fe80::1"}
    for host in ("box", "BOX.local:8080", "192.168.1.5:80", "[fe80::1]:80"):
        assert door.check_host(host, lambda: "127.0.0.1", lambda: own) is None
    for host in ("box.evil.example", "local", "box.local.evil.example", "192.168.1.6", "192.168.1.5.evil.example"):
        assert door.check_host(host, lambda: "127.0.0.1", lambda: own) is not None


LOCAL = [
    "http://localhost:3000",
    "https://127.0.0.1",
    "http://[::1]:5173",
    "vscode-webview://1a2b",
    "app://obsidian.md",
]
LOCAL += ["tauri://localhost", "http://tauri.localhost", "http://0.0.0.0:3000"]


@pytest.mark.parametrize("origin", LOCAL)
def test_local_pages_may_act_on_loopback_only(origin: str) -> None:
    door = OriginPolicy.of((), ())
    assert door.check_origin("POST", origin, "localhost:1", "http", loopback=True) is None
    assert door.cors(origin, loopback=True)["Access-Control-Allow-Origin"] == origin
    assert "Access-Control-Allow-Headers" in door.preflight(origin, {}, loopback=True)
    assert door.check_origin("POST", origin, "10.0.0.7", "http") is not None
    assert door.cors(origin) == {}


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "null",
        "x:",
        "http://[",
    ],
)
def test_other_pages_may_not_act_on_loopback_either(origin: str) -> None:
    door = OriginPolicy.of((), ())
    assert door.check_origin("POST", origin, "localhost:1", "http", loopback=True) is not None
    assert door.cors(origin, loopback=True) == {"Vary": "Origin"}


def test_a_page_elsewhere_may_look_but_not_act() -> None:
    door = OriginPolicy.of((), ("https://chat.example",))
    assert door.check_origin("GET", "https://evil.example", "localhost:1", "http") is None
    assert door.cors("https://evil.example") == {"Vary": "Origin"}
    refused = door.check_origin("POST", "https://evil.example", "localhost:1", "http")
    assert refused is not None
    assert refused.status == 403
    assert door.check_origin("POST", "null", "localhost:1", "http") is not None
    assert door.check_origin("POST", "https://chat.example", "localhost:1", "http") is None
    assert door.check_origin("POST", "http://localhost:1", "localhost:1", "http") is None
    assert door.check_origin("POST", None, "localhost:1", "http") is None


def test_cors_names_the_origin_and_never_a_star() -> None:
    door = OriginPolicy.of((), ("*",))
    assert door.cors("https://a.example")["Access-Control-Allow-Origin"] == "https://a.example"
    asked = {"Access-Control-Request-Headers": "authorization, x-api-key"}
    answer = door.preflight("https://a.example", asked)
    assert answer["Access-Control-Allow-Headers"] == "authorization, x-api-key"
    assert "Access-Control-Allow-Origin" not in OriginPolicy.of((), ()).preflight("https://a.example", asked)


def test_loopback_addresses() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("nonsense")
