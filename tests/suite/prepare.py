"""Fetches llama.cpp's own server tests and lays out what they need. Nothing of it is committed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import venv
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from edge.builder.download import download
from edge.builder.source import pins
from edge.resources import data_dir, load_toml
from tests.kept import kept, locked, python_of

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
    """`tests` is where the suite's pytest runs; `python` its interpreter; `hub` what the fake hub serves.

    `key` changes with the models, so that no copy of former ones is taken for theirs.
    """

    tests: Path
    python: Path
    hub: Path
    smollm2_hub: Path
    hub_port: int
    key: str


@contextlib.contextmanager
def only_run(cache: Path) -> Iterator[None]:
    """Hold the suite's folders: a second run would make the tree anew for its own port, under the first one's tests."""
    with locked(cache / "llama-suite" / "run"):
        yield


def prepare(cache: Path, smollm2: Path) -> Layout:
    """Once; then it is there. Takes the sdist that build/llama.cpp.toml pins by its hash. Within `only_run`."""
    folder = cache / "llama-suite"
    pin = pins(load_toml(data_dir("build") / "llama.cpp.toml"))[0]
    hub_port = unused_port(HUB_PORT)
    tree = kept(
        folder / pin.id,
        lambda tree: _unpack(download(pin.pypi, cache / "src", lambda _: None), pin.pypi["inside"], tree, hub_port),
        key=f"{WANTED} {hub_port}",
    )
    tests = tree / "tools" / "server" / "tests"
    python = _environment(folder, tests / "requirements.txt")
    key = sha256((HERE / "models.py").read_bytes() + repr((TINY[0], sorted(TINY[1]), OTHERS, PRESET)).encode())
    name = key.hexdigest()[:8]

    def make_models(models: Path) -> None:
        vocabulary = tree / "models" / "ggml-vocab-bert-bge.gguf"
        subprocess.run([python, HERE / "models.py", smollm2, vocabulary, models], check=True, capture_output=True)

    models = kept(folder / f"models-{name}", make_models)
    of = f"{smollm2.resolve()} {tree}"
    hub = kept(folder / f"hub-{name}", lambda hub: _hub(hub, models, models / "tiny.gguf", tree), key=of)
    other = kept(folder / f"hub-smollm2-{name}", lambda hub: _hub(hub, models, smollm2, tree), key=of)
    shutil.rmtree(tests / "tmp", ignore_errors=True)  # slots that a former run saved
    (tests / "tmp").mkdir()
    return Layout(tests, python, hub, other, hub_port, name)


def unused_port(first: int) -> int:
    """Return the first port from this one on that no process has. Not an ephemeral one: servers come and go there."""
    for port in range(first, first + 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {first} to {first + 99} is unused")


def _environment(folder: Path, requirements: Path) -> Path:
    home = folder / f"venv-{sys.version_info[0]}.{sys.version_info[1]}"

    def make(_: Path) -> None:
        venv.create(home, with_pip=True)
        subprocess.run([python_of(home), "-m", "pip", "install", "-q", "-r", requirements, *TOOLS], check=True)

    kept(home, make, key=requirements.read_text() + " ".join(TOOLS))
    return python_of(home)


def _unpack(archive: Path, inside: str, tree: Path, hub_port: int) -> None:
    with tarfile.open(archive) as sdist:
        for member in sdist:
            name = member.name.removeprefix(inside + "/")
            if member.isfile() and name.startswith(WANTED):
                target = tree / name
                target.parent.mkdir(parents=True, exist_ok=True)
                source = sdist.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
    for file in (tree / "tools" / "server" / "tests" / "unit").glob("*.py"):
        file.write_text(file.read_text().replace("https://huggingface.co/", f"http://127.0.0.1:{hub_port}/"))


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
