"""Drop-ins: words are escaped as systemd reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.errors import ConfigError, UsageError
from edge.service.units import UnitSettings, drop_ins, endpoint, escaped, mount_units, quoted, read_record, within

PRINTABLE = st.text(
    st.characters(min_codepoint=32, blacklist_characters="\x7f", blacklist_categories=["Cs"]), max_size=30
)


def unquoted(text: str) -> str:
    """As systemd reads one quoted word: backslash escapes, then `%%`."""
    assert text[0] == text[-1] == '"'
    inside, out, index = text[1:-1], "", 0
    while index < len(inside):
        assert inside[index] != '"'
        if inside[index] == "\\":
            index += 1
        elif inside[index] == "%":
            assert inside[index + 1] == "%"
            index += 1
        out += inside[index]
        index += 1
    return out


@settings(max_examples=200, deadline=None)
@given(PRINTABLE)
def test_quoting_loses_nothing(text: str) -> None:
    assert unquoted(quoted(text)) == text


def test_control_characters_are_refused() -> None:
    with pytest.raises(UsageError):
        quoted("/opt/a\nExecStartPre=/bin/evil")


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=30), st.builds("{}:{}".format, st.text(max_size=20), st.integers(0, 65535))))
def test_an_address_adds_no_line_and_no_specifier(address: str) -> None:
    """A line break in `listen` of a user's configuration must not become a directive of a root-owned unit."""
    try:
        value = endpoint(address)
    except (ConfigError, UsageError):
        return
    assert re.fullmatch(r"[0-9.]+:\d+|\[[0-9a-f:.]+\]:\d+", value)


@pytest.mark.parametrize(
    ("address", "value"),
    [(":9000", "127.0.0.1:9000"), ("localhost:1", "127.0.0.1:1"), ("[::1]:8080", "[::1]:8080"), ("0.0.0.0:80",) * 2],
)
def test_addresses_as_up_takes_them(address: str, value: str) -> None:
    assert endpoint(address) == value


@pytest.mark.parametrize("address", ["%H:80", "127.0.0.1\nExecStartPre=/bin/sh:80", "[fe80::1%eth0]:80", "board:80"])
def test_addresses_that_a_socket_unit_cannot_hold(address: str) -> None:
    with pytest.raises((ConfigError, UsageError)):
        endpoint(address)


@pytest.mark.skipif(shutil.which("systemd-escape") is None, reason="systemd-escape is not installed")
@pytest.mark.parametrize("path", ["/mnt/models", "/srv/my models 100%/a-b", "/.hidden/ü", "/a_b:c.d", "//x//y/"])
def test_mount_names_are_systemds(path: str) -> None:
    said = subprocess.run(["systemd-escape", "--path", path], capture_output=True, text=True, check=True)
    assert escaped(path) == said.stdout.strip()


def test_every_mount_on_the_way() -> None:
    assert mount_units("/mnt/nvme/models") == ["mnt.mount", "mnt-nvme.mount", "mnt-nvme-models.mount"]
    assert mount_units("/") == []


def test_the_usual_machine_needs_almost_nothing() -> None:
    assert drop_ins(UnitSettings()) == {}
    assert set(drop_ins(UnitSettings(groups=("video",)))) == {"edgellm.service"}


def test_another_python_and_user_are_everywhere_they_matter() -> None:
    texts = drop_ins(UnitSettings(python="/srv/edge 1%/bin/python", run_as="ann", listen=(":9000",)))
    assert (
        'ExecStart=\nExecStart="/srv/edge 1%%/bin/python" -I -X faulthandler -m edge up\n' in texts["edgellm.service"]
    )
    assert "User=ann\n" in texts["edgellm-ready.service"]  # quotes would be part of the name: 217/USER
    assert "ListenStream=\nListenStream=127.0.0.1:9000\n" in texts["edgellm.socket"]
    assert "-m edge.service.power restore" in texts["edgellm-power.service"]


def test_within_is_about_folders_not_letters() -> None:
    assert within("/home/ann/models", ("/home",))
    assert within("/home", ("/home",))
    assert not within("/homes/ann", ("/home",))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(JSON, st.fixed_dictionaries({"schema": st.just(1), "units": JSON})))
def test_no_record_stops_an_installation(tmp_path: Path, document: object) -> None:
    path = tmp_path / "service.json"
    path.write_text(json.dumps(document))
    assert read_record(path) is None or isinstance(read_record(path), UnitSettings)
