"""Fetches llama.cpp's own server tests and lays out what they need. Nothing of it is committed."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tarfile
import venv
import zlib
from dataclasses import dataclass
from pathlib import Path

from edge.builder.download import download
from edge.builder.source import pins
from edge.resources import data_dir, load_toml

HERE = Path(__file__).resolve().parent
HUB_PORT = 9978
WANTED = ("tools/server/tests/", "tools/mtmd/", "models/templates/", "models/ggml-vocab-bert-bge.gguf")
TOOLS = ("gguf", "numpy", "pytest-timeout")
TINY = ("tiny.gguf", {
    "ggml-org/test-model-stories260K/stories260K-F32.gguf",
    "ggml-org/models/tinyllamas/stories260K.gguf",
    "ggml-org/stories15M_MOE/stories15M_MOE-F16.gguf",
    "ggml-org/tinygemma3-GGUF/tinygemma3-Q8_0.gguf",
    "ggml-org/tiny-llamas/stories15M-q4_0.gguf",
    "ggml-org/test-model-router-download/model-F16.gguf",
})  # fmt: skip
OTHERS = {
    "tiny-fim.gguf": "ggml-org/test-model-stories260K-infill/stories260K-infill-F32.gguf",
    "bge-rnd.gguf": "ggml-org/models/bert-bge-small/ggml-model-f16.gguf",
    "rerank-rnd.gguf": "ggml-org/models/jina-reranker-v1-tiny-en/ggml-model-f16.gguf",
    "lora-tiny.gguf": "ggml-org/stories15M_MOE/moe_shakespeare15M.gguf",
    "mmproj-tiny.gguf": "ggml-org/tinygemma3-GGUF/mmproj-tinygemma3.gguf",
}
PRESET = (
    "[tinygemma3-preset]\nhf-repo = ggml-org/tinygemma3-GGUF:Q8_0\nc = 1024\n\n"
    "[stories260K-test]\nhf-repo = ggml-org/test-model-stories260K\nc = 512\n"
)


@dataclass(frozen=True)
class Layout:
    """`tests` is where the suite's pytest runs; `python` its interpreter; `hub` what the fake hub serves."""

    tests: Path
    python: Path
    hub: Path
    smollm2_hub: Path


def prepare(cache: Path, smollm2: Path) -> Layout:
    """Once; then it is there. Takes the sdist that build/llama.cpp.toml pins by its hash."""
    folder = cache / "llama-suite"
    folder.mkdir(parents=True, exist_ok=True)
    pin = pins(load_toml(data_dir("build") / "llama.cpp.toml"))[0]
    tree = folder / pin.id
    if not tree.is_dir():
        _unpack(download(pin.pypi, cache / "src", lambda _: None), pin.pypi["inside"], tree)
    python = folder / f"venv-{sys.version_info[0]}.{sys.version_info[1]}" / "bin" / "python"
    tests = tree / "tools" / "server" / "tests"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
        requirements = ["-r", tests / "requirements.txt", *TOOLS]
        subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)
    models = folder / "models"
    if not (models / "mmproj-tiny.gguf").exists():
        vocabulary = tree / "models" / "ggml-vocab-bert-bge.gguf"
        subprocess.run([python, HERE / "models.py", smollm2, vocabulary, models], check=True, capture_output=True)
    hub, other = folder / "hub", folder / "hub-smollm2"
    if not hub.exists():
        _hub(hub, models, models / "tiny.gguf", tree)
        _hub(other, models, smollm2, tree)
    (tests / "tmp").mkdir(exist_ok=True)
    return Layout(tests, python, hub, other)


def _unpack(archive: Path, inside: str, tree: Path) -> None:
    partial = tree.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as sdist:
        for member in sdist:
            name = member.name.removeprefix(inside + "/")
            if member.isfile() and name.startswith(WANTED):
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                source = sdist.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
    for file in (partial / "tools" / "server" / "tests" / "unit").glob("*.py"):
        file.write_text(file.read_text().replace("https://huggingface.co/", f"http://127.0.0.1:{HUB_PORT}/"))
    partial.rename(tree)


def _hub(hub: Path, models: Path, chat: Path, tree: Path) -> None:
    """The repositories that the tests ask for; `chat` stands for every chat model."""
    for name in TINY[1]:
        _link(chat, hub / name)
    for source, name in OTHERS.items():
        _link(models / source, hub / name)
    for number in (1, 2, 3):
        name = f"ggml-org/models/tinyllamas/split/stories15M-q8_0-0000{number}-of-00003.gguf"
        _link(models / f"tiny-split-0000{number}-of-00003.gguf", hub / name)
    pictures = hub / "ggml-org/tinygemma3-GGUF/test"
    _link(tree / "tools" / "mtmd" / "test-1.jpeg", pictures / "11_truck.png")
    (pictures / "91_cat.png").write_bytes(_png(64))
    preset = hub / "ggml-org/test-preset-ci/preset.ini"
    preset.parent.mkdir(parents=True)
    preset.write_text(PRESET)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source.resolve())


def _png(size: int) -> bytes:
    """A grey square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + b"\x70" * size for _ in range(size)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
