"""What is lost at power-off, by what is mounted where."""

from __future__ import annotations

from pathlib import Path

from edge.daemon.volatile_dirs import filesystem, lost_on_reboot
from edge.paths import Folders

LINES = [
    "1 0 8:1 / / rw - ext4 /dev/root rw",
    "2 1 0:30 / /var/lib/edgellm/state rw - tmpfs tmpfs rw",
    "3 1 8:2 / /mnt/with\\040space rw - ext4 /dev/sda2 rw",
    "4 1 0:31 / /var rw - overlay overlay rw",
    "broken",
]


def test_the_longest_mount_point_counts() -> None:
    assert filesystem(Path("/var/lib/edgellm/state/main"), LINES) == "tmpfs"
    assert filesystem(Path("/var/lib/edgellm"), LINES) == "overlay"
    assert filesystem(Path("/mnt/with space/x"), LINES) == "ext4"
    assert filesystem(Path("/variety"), LINES) == "ext4"
    assert filesystem(Path("/x"), []) is None


def test_it_is_said_where_state_is_in_memory(tmp_path: Path) -> None:
    folders = Folders(tmp_path, tmp_path / "state", tmp_path / "cache", tmp_path / "run", tmp_path / "etc")
    table = tmp_path / "mountinfo"
    table.write_text("1 0 8:1 / / rw - ext4 /dev/root rw\n")
    assert lost_on_reboot(folders, table) is None
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/root rw\n2 1 0:1 / {tmp_path} rw - tmpfs tmpfs rw\n")
    said = lost_on_reboot(folders, table)
    assert said is not None
    assert "the history of starts and crashes is lost at power-off" in said
