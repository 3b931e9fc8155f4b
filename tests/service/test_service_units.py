"""The units as text: field cases of services that start wrong, and what systemd's own tools say."""

from __future__ import annotations

import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.plan.choices import LoadChoice, prefetch_helps, write_choice
from edge.resources import data_dir
from edge.service.units import UNITS, UnitFile, UnitSettings, files

SOURCE = data_dir("systemd")
EVERYTHING = UnitSettings(
    jtop=True,
    prefetch=True,
    groups=("video", "render"),
    model_dirs=("/mnt/models",),
    power_mode="MAXN",
    rpc_listen="10.0.0.2:50052",
    rpc_interface="eth1",
)


def values(unit: str, section: str, key: str) -> list[str]:
    """Every value of a key, in order; systemd adds them up."""
    text, current, found = (SOURCE / unit).read_text(), "", []
    for line in text.splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif current == section and line.partition("=")[0] == key:
            found.append(line.partition("=")[2])
    return found


def test_fc_76_hardening_leaves_the_gpu_visible() -> None:
    """FC-76: what hides /dev/nv* or forbids CUDA's compiler is not in the unit that runs the engine."""
    for key in ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute"):
        assert values("edgellm.service", "Service", key) == []
    assert values("edgellm.service", "Service", "ProtectSystem") == ["strict"]
    assert values("edgellm.service", "Service", "NoNewPrivileges") == ["yes"]


def test_fc_76_a_model_folder_at_home_is_not_hidden() -> None:
    text = text_of(UnitSettings(model_dirs=("/home/ann/my models",)), "edgellm.service.d/10-install.conf")
    assert "ProtectHome=tmpfs\n" in text
    assert 'BindReadOnlyPaths="-/home/ann/my models"\n' in text
    assert "ProtectHome" not in text_of(EVERYTHING, "edgellm.service.d/10-install.conf")


def test_fc_77_folders_are_given_and_nothing_is_taken_from_home() -> None:
    """FC-77: writable folders by directives; the engine's HOME and caches are made of them (plan.environment)."""
    assert values("edgellm.service", "Service", "CacheDirectory") == ["edgellm"]
    assert values("edgellm.service", "Service", "StateDirectory") == ["edgellm/state"]
    assert values("edgellm.service", "Service", "RuntimeDirectory") == ["edgellm edgellm/main"]
    assert values("edgellm.service", "Service", "PassEnvironment") == []


def test_fc_79_mounts_are_waited_for_and_not_required() -> None:
    text = text_of(EVERYTHING, "edgellm.service.d/10-install.conf")
    assert "Wants=mnt.mount mnt-models.mount\nAfter=mnt.mount mnt-models.mount\n" in text
    assert "Requires" not in text
    assert values("edgellm.service", "Unit", "RequiresMountsFor") == ["/var/lib/edgellm"]


def test_fc_79_no_line_stands_above_a_section() -> None:
    """FC-79: a drop-in without a section header is ignored."""
    for file in files(EVERYTHING):
        if "systemd/system" in str(file.path):
            lines = [line for line in file.text.splitlines() if line and not line.startswith("#")]
            assert lines[0].startswith("["), file.path


def test_fc_80_boots_offline_and_headless() -> None:
    """FC-80: ordered after, and wanted by, only what every board reaches."""
    never = {"graphical.target", "network-online.target", "jtop.service", "multi-user.target", "nvpmodel.service"}
    for unit in ("edgellm.socket", "edgellm.service", "edgellm-jtop.service", "edgellm-ready.service"):
        for key in ("After", "Requires", "Wants", "BindsTo"):
            assert never.isdisjoint(" ".join(values(unit, "Unit", key)).split()), (unit, key)
    assert values("edgellm.service", "Install", "WantedBy") == ["multi-user.target"]
    assert values("edgellm.socket", "Install", "WantedBy") == ["sockets.target"]


def test_fc_82_memory_may_be_locked() -> None:
    """FC-82: no warning about the limit where a configuration locks memory."""
    assert values("edgellm.service", "Service", "LimitMEMLOCK") == ["infinity"]


def test_how_the_unit_is_stopped() -> None:
    assert values("edgellm.service", "Service", "Type") == ["notify"]
    assert values("edgellm.service", "Service", "KillMode") == ["mixed"]
    assert values("edgellm.service", "Service", "OOMPolicy") == ["continue"]
    assert values("edgellm.service", "Unit", "StartLimitIntervalSec") == ["0"]


def test_jtops_group_is_nowhere_but_in_its_reader() -> None:
    for file in files(EVERYTHING):
        if file.path.name != "edgellm-jtop.service":
            assert "SupplementaryGroups=jtop" not in file.text
    assert values("edgellm-jtop.service", "Service", "PrivateNetwork") == ["yes"]
    assert UNITS.index("edgellm-jtop.service")
    assert not [file for file in files(UnitSettings()) if "jtop" in file.path.name]


def test_a_board_that_only_lends_memory_gets_one_unit() -> None:
    paths = [str(file.path) for file in files(replace(EVERYTHING, rpc_only=True)) if "systemd" in str(file.path)]
    assert paths == [
        "etc/systemd/system/edgellm-rpc.service",
        "etc/systemd/system/edgellm-rpc.service.d/10-install.conf",
    ]


def test_the_rpc_server_is_installed_only_when_asked() -> None:
    assert not [file for file in files(UnitSettings()) if "rpc" in str(file.path)]
    unit = "edgellm-rpc.service"
    (drop_in,) = [file for file in files(EVERYTHING) if file.path.parent.name == f"{unit}.d"]
    line = '"/opt/edgellm/bin/python" -I -m edge rpc serve --listen 10.0.0.2:50052 --interface eth1'
    assert drop_in.text.splitlines()[-2:] == ["ExecStart=", f"ExecStart={line}"]
    assert values(unit, "Service", "RuntimeDirectoryPreserve") == ["yes"], "it is the folder of edgellm.service too"
    assert values(unit, "Service", "RestrictAddressFamilies") == ["AF_UNIX AF_INET AF_NETLINK"]


def test_reading_ahead_waits_for_the_models_mount_and_gives_way_to_the_rest_of_the_boot() -> None:
    unit = "edgellm-prefetch.service"
    assert values(unit, "Unit", "RequiresMountsFor") == ["/var/lib/edgellm /opt/edgellm"]
    assert values(unit, "Service", "IOSchedulingClass") == ["idle"]
    assert values(unit, "Install", "WantedBy") == ["sysinit.target"]
    text = text_of(EVERYTHING, f"{unit}.d/10-install.conf")
    assert '[Unit]\nRequiresMountsFor="/mnt/models"\n' in text
    at_home = text_of(UnitSettings(prefetch=True, model_dirs=("/home/ann/models",)), f"{unit}.d/10-install.conf")
    assert 'BindReadOnlyPaths="-/home/ann/models"' in at_home and "RequiresMountsFor" not in at_home


def test_reading_ahead_is_installed_only_where_it_was_measured_to_help(tmp_path: Path) -> None:
    assert not [file for file in files(UnitSettings()) if "prefetch" in file.path.name]
    measured = LoadChoice("board", "engine", "/", 1, "full", "none", 3.0, prefetch=True)
    for helps in (False, True):
        write_choice(tmp_path / "load_modes.json", replace(measured, prefetch=helps))
        assert prefetch_helps(tmp_path / "absent.json", tmp_path / "load_modes.json") is helps


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_exposure() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager"]
    most = {"edgellm": 25, "edgellm-ready": 15, "edgellm-jtop": 15, "edgellm-power": 30, "edgellm-rpc": 25}
    most["edgellm-prefetch"] = 15
    for unit, threshold in most.items():
        judged = [*command, f"--threshold={threshold}", str(SOURCE / f"{unit}.service")]
        done = subprocess.run(judged, capture_output=True, text=True)
        if "unrecognized option" in done.stderr:
            pytest.skip("systemd-analyze security --offline needs systemd 250")
        assert done.returncode == 0, done.stdout[-400:]


def test_every_unit_has_its_sections_and_a_description() -> None:
    for unit in UNITS:
        parser = RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string((SOURCE / unit).read_text())
        assert parser["Unit"]["Description"]


def text_of(settings: UnitSettings, name: str) -> str:
    found: list[UnitFile] = [file for file in files(settings) if file.path == Path("etc/systemd/system") / name]
    return found[0].text
