"""A copied tree never leads out of itself."""

from __future__ import annotations

import os
from pathlib import Path

from edge.linux.tree import Tree
from tests.trees.trees import write


def test_absolute_links_stay_inside_the_copy(tmp_path: Path) -> None:
    write(tmp_path, "sys/firmware/devicetree/base/model", b"Board\0")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/device-tree").symlink_to("/sys/firmware/devicetree/base")
    assert Tree(tmp_path).word("/proc/device-tree/model") == "Board"


def test_links_upwards_end_at_the_root_of_the_copy(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    write(tmp_path, "secret", "outside")
    write(root, "etc/here", "inside")
    (root / "etc/up").symlink_to("../../../../secret")
    (root / "etc/loop").symlink_to("loop")
    assert Tree(root).text("/etc/up") is None
    assert Tree(root).text("/etc/loop") is None
    assert Tree(root).text("/../etc/here") == "inside"


def test_what_cannot_be_read_is_absent(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    write(tmp_path, "empty", "")
    write(tmp_path, "text", "max\n")
    assert (tree.text("/nothing"), tree.number("/empty"), tree.number("/text"), tree.word("/empty")) == (None,) * 4
    assert tree.children("/nothing") == []
    for number in (0, 2, 10):
        write(tmp_path, f"cpu/cpu{number}", "")
    assert tree.children("/cpu") == ["cpu0", "cpu2", "cpu10"]


def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """Without a writer an open that blocks would keep `up` silent."""
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/nvpmodel.conf")
    assert Tree(tmp_path).word("/etc/nvpmodel.conf") is None
    writer = os.open(tmp_path / "etc/nvpmodel.conf", os.O_RDWR)
    try:
        assert Tree(tmp_path).word("/etc/nvpmodel.conf") is None, "one that is open and empty"
    finally:
        os.close(writer)
