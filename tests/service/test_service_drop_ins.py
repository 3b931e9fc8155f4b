"""Installed files against those that `install` would write, and drop-ins that hide the GPU (FC-76)."""

from __future__ import annotations

from pathlib import Path

from edge.service import units as layout
from edge.service.drop_ins import conflicts, diff
from edge.service.units import UnitSettings, read_record, record_text

SETTINGS = UnitSettings(groups=("video",), listen=("0.0.0.0:8080",))


def install(root: Path, settings: UnitSettings) -> None:
    for file in layout.files(settings):
        (root / file.path).parent.mkdir(parents=True, exist_ok=True)
        (root / file.path).write_text(file.text)


def test_changed_missing_stale_and_yours(tmp_path: Path) -> None:
    install(tmp_path, SETTINGS)
    assert diff(SETTINGS, tmp_path) == []
    units = tmp_path / layout.UNIT_DIR
    (units / "edgellm.service").write_text("[Service]\nUser=root\n")
    (units / "edgellm.socket").unlink()
    (units / "edgellm-jtop.service").write_text("")
    (units / "edgellm.service.d/override.conf").write_text("[Service]\nNice=5\n")
    found = {one.path.name: one for one in diff(SETTINGS, tmp_path)}
    assert {name: one.kind for name, one in found.items()} == {
        "edgellm.service": "changed",
        "edgellm.socket": "missing",
        "edgellm-jtop.service": "stale",
        "override.conf": "yours",
    }
    assert "-User=root" in found["edgellm.service"].lines
    assert found["override.conf"].warnings == ()


def test_fc_76_drop_ins_that_hide_the_gpu() -> None:
    text = "[Service]\nPrivateDevices=yes\nDevicePolicy=closed\n#ProtectClock=yes\nMemoryDenyWriteExecute = true\n"
    assert [warning.split("=")[0] for warning in conflicts(text)] == [
        "PrivateDevices",
        "DevicePolicy",
        "MemoryDenyWriteExecute",
    ]
    assert list(conflicts("[Service]\nPrivateDevices=no\nDevicePolicy=auto\n")) == []


def test_fc_76_one_allowed_device_closes_all_others() -> None:
    assert "DeviceAllow=/dev/ttyUSB0 rw closes" in next(conflicts("[Service]\nDeviceAllow=/dev/ttyUSB0 rw\n"))
    gpu = "[Service]\nDevicePolicy=closed\nDeviceAllow=/dev/ttyUSB0 rw\nDeviceAllow=char-nvidia-uvm rw\n"
    assert list(conflicts(gpu)) == []
    assert list(conflicts("[Service]\nDeviceAllow=\n")) == []


def test_fc_79_a_line_above_any_section() -> None:
    assert list(conflicts("Environment=A=1\n[Service]\nNice=1\n")) == [
        "Environment= stands above any [Section] and is ignored"
    ]


def test_the_settings_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    path.write_text(record_text(SETTINGS))
    assert read_record(path) == SETTINGS
    path.write_text('{"schema": 1, "units": {"run_as": "ann", "of a later version": 1}}')
    assert read_record(path) == UnitSettings(run_as="ann")
    for broken in ("", "[]", '{"schema": 9, "units": {}}'):
        path.write_text(broken)
        assert read_record(path) is None
    assert read_record(tmp_path / "none") is None
