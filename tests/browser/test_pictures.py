"""The pictures of the README, taken by a command."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from tests.browser import pictures
from tests.browser.chromium import installed
from tests.serving import ROOT

MOST_BYTES = 200_000
PICTURE = re.compile(r"!\[([^\]]+)\]\((docs/images/[^)]+)\)")


def size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    return width, height


def test_the_readme_shows_every_picture_with_a_description() -> None:
    shown = PICTURE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert sorted(path for _, path in shown) == ["docs/images/status.png", "docs/images/top.png"]
    assert all(len(text) > 20 for text, _ in shown)
    for path in pictures.IMAGES.iterdir():
        assert path.stat().st_size < MOST_BYTES and min(size(path)) > 300, path


@pytest.mark.full
@pytest.mark.skipif(installed() is None, reason="no chromium: apt-get install chromium")
def test_the_command_takes_them(tmp_path: Path) -> None:
    pictures.take(tmp_path, seconds=3)
    assert size(tmp_path / "status.png") == (pictures.PAGE_WIDTH, pictures.PAGE_HEIGHT)
    assert size(tmp_path / "top.png")[0] > 700
