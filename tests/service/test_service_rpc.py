"""`edgellm service install --rpc-listen`: what it takes, and a board that only lends memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge.errors import ConfigError, EngineMissingError, UsageError
from edge.paths import folders, system_folders
from edge.service.contents import Contents
from edge.service.request import RECORD, InstallRequest, unit_settings
from edge.service.units import UnitSettings, write_record
from tests.builder.installing import put


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service's data folder of a machine without one."""
    there = system_folders()._replace(data=tmp_path / "lib")
    monkeypatch.setattr("edge.service.request.system_folders", lambda: there)
    monkeypatch.setattr("edge.service.contents.system_folders", lambda: there)
    return there.data / RECORD


def request(tmp_path: Path, **changes: Any) -> InstallRequest:
    return InstallRequest(folders({}, tmp_path / "s"), root=tmp_path, **changes)


def test_the_address_is_judged_when_it_is_installed(tmp_path: Path) -> None:
    made = unit_settings(request(tmp_path, rpc_listen="10.0.0.2:50052", rpc_interface="eth1"))
    assert (made.rpc_listen, made.rpc_interface) == ("10.0.0.2:50052", "eth1")
    for listen, interface, error in (
        ("0.0.0.0:50052", "eth1", ConfigError),
        ("10.0.0.2:50052", "", ConfigError),
        ("10.0.0.2:50052", "eth1 --listen", UsageError),
    ):
        with pytest.raises(error):
            unit_settings(request(tmp_path, rpc_listen=listen, rpc_interface=interface))


def test_a_repeated_install_keeps_it_and_an_empty_address_removes_it(tmp_path: Path, recorded: Path) -> None:
    recorded.parent.mkdir(parents=True)
    write_record(recorded, UnitSettings(rpc_listen="127.0.0.1:50052"))
    assert unit_settings(request(tmp_path)).rpc_listen == "127.0.0.1:50052"
    assert unit_settings(request(tmp_path, rpc_listen="")).rpc_listen == ""


def test_only_lending_needs_an_address_and_an_engine_with_rpc(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rpc-only lends memory at an address"):
        unit_settings(request(tmp_path, rpc_only=True))
    asked = request(tmp_path, rpc_only=True, rpc_listen="127.0.0.1:50052")
    settings = unit_settings(asked)
    assert settings.rpc_only and not settings.jtop
    engines = asked.source.engines
    for engine_id, rpc in (("a-cpu-1", False), ("a-cpu-rpc-1", True)):
        put(engines, engine_id, rpc=rpc)
        (engines / "selected.json").write_text(f'{{"schema": 1, "current": "{engine_id}", "previous": null}}')
        contents = Contents(asked, settings, None)
        if rpc:
            assert engine_id in contents.lending_engine().what
        else:
            with pytest.raises(EngineMissingError, match="has no RPC"):
                contents.lending_engine()
