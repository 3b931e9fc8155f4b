"""Clients from their registries, in environments of their own, against the real engine through the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.gateway import dispatch, keys
from edge.gateway.config import GatewayOptions
from edge.supervisor.status import ModelStatus, State
from tests.fakes.upstream.model import FakeModel
from tests.fakes.upstream.real import real_engine
from tests.gateway.conftest import Rig, Rigs, rig, sockets
from tests.kept import kept, python_of

__all__ = ["rig", "sockets"]  # fixtures
pytestmark = [pytest.mark.full, pytest.mark.e2e]
HERE = Path(__file__).parent
EXPECTED = {
    "openai": 23,
    "anthropic": 8,
    "langchain": 7,
    "llm": 4,
    "ollama": 13,
    "langchain_ollama": 4,
    "litellm": 9,
    "open_webui": 11,
    "node": 16,
}
# Installed without what its wheel requires beyond requirements-open-webui.txt.
ALONE = {"requirements-open-webui.txt": "open-webui==0.12.4"}
MEAN_POOLING = 1
HEARTBEAT_S = 0.02


@pytest.fixture(scope="module")
def engines(smollm2: Path) -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        chat, embedding = Path(folder, "chat.sock"), Path(folder, "emb.sock")
        template = (HERE / "tools.jinja").read_text()
        with (
            real_engine(smollm2, chat, model_alias=["chat"], n_ctx=8192, use_jinja=True, chat_template=template),
            real_engine(smollm2, embedding, model_alias=["emb"], embedding=True, pooling_type=MEAN_POOLING),
        ):
            yield {"chat": chat, "emb": embedding}


def requirements_of(client: str) -> Path:
    """Return what is installed for a client. Several clients share an environment."""
    apart = HERE / f"requirements-{client.replace('_', '-')}.txt"
    return apart if apart.exists() else HERE / "requirements.txt"


def environment(cache: Path, requirements: Path) -> Path:
    """Return the interpreter of an environment, which is made once."""
    alone = ALONE.get(requirements.name, "")
    folder = cache / f"clients-{requirements.stem}-{sys.version_info[0]}.{sys.version_info[1]}"
    python = python_of(folder)

    def make(_: Path) -> None:
        venv.create(folder, with_pip=True)
        pip: list[str | Path] = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "-r", requirements], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", alone], check=True)

    kept(folder, make, stamp="requirements.txt", key=requirements.read_text() + alone)
    return python


def node_client(cache: Path) -> list[str | Path]:
    """Return the command of the node clients; their packages are fetched once.

    npm takes a package for installed as soon as its package.json is there, also where it was cut off after that.
    """
    folder = cache / "clients-node"

    def make(_: Path) -> None:
        folder.mkdir()
        shutil.copy(HERE / "package.json", folder)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True)

    kept(folder, make, stamp="installed", key=(HERE / "package.json").read_text())
    shutil.copy(HERE / "node_client.mjs", folder)
    return ["node", folder / "node_client.mjs"]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    made = keys.new_secret()
    keys.write(tmp_path / "keys.toml", [keys.make("clients", made, admin=False, created="", others=())])
    return made


async def run(
    rig: Rigs, engines: dict[str, Path], folder: Path, secret: str, command: list[str | Path], *, naps: bool = False
) -> list[str]:
    """The names of the checks that passed. Fails with all that did not. `naps`: the model is asleep before each."""
    models = {name: FakeModel(name, str(path)) for name, path in engines.items()}
    models["chat"].slots = 2
    more: dict[str, Any] = {"heartbeat_s": HEARTBEAT_S} if naps else {}
    here = await rig(models=models, config=GatewayOptions(keys_file=folder / "keys.toml", **more))
    napping = asyncio.ensure_future(nap(models["chat"], str(engines["chat"]))) if naps else None
    try:
        return await checked(here, secret, command)
    finally:
        if napping is not None:
            napping.cancel()


async def nap(model: FakeModel, path: str) -> None:
    """Let each request wait for some comments, and let the model sleep again after it."""
    while True:
        await model.lost(State.SLEEPING)
        while not model.waiting:
            await asyncio.sleep(0.005)
        await asyncio.sleep(10 * HEARTBEAT_S)
        await model.ready(path)
        while model.open or model.waiting:
            await asyncio.sleep(0.005)


async def checked(here: Rig, secret: str, command: list[str | Path]) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {"BASE": f"http://127.0.0.1:{here.port}", "KEY": secret, "PYTHONPATH": str(HERE)}
    child = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, complaints = await asyncio.wait_for(child.communicate(), 400)
    done = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    failed = [f"{each['check']}: {each['seen']}" for each in done if not each["ok"]]
    assert failed == [], complaints.decode()[-2000:]
    assert child.returncode == 0, complaints.decode()[-2000:]
    assert secret not in out.decode()
    return [each["check"] for each in done]


@pytest.mark.parametrize("client", [name for name in EXPECTED if name != "node"])
async def test_a_client_does_all_that_it_does_with_the_bare_engine(
    rig: Rigs, engines: dict[str, Path], test_cache: Path, tmp_path: Path, secret: str, client: str
) -> None:
    if client == "open_webui" and not (3, 11) <= sys.version_info < (3, 13):
        pytest.skip("Open WebUI needs Python 3.11 or 3.12")
    python = await asyncio.to_thread(environment, test_cache, requirements_of(client))
    passed = await run(rig, engines, tmp_path, secret, [python, HERE / f"{client}_client.py"])
    assert len(passed) == EXPECTED[client]


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm: apt-get install nodejs npm")
async def test_the_node_clients(
    rig: Rigs, engines: dict[str, Path], test_cache: Path, tmp_path: Path, secret: str
) -> None:
    passed = await run(rig, engines, tmp_path, secret, await asyncio.to_thread(node_client, test_cache))
    assert len(passed) == EXPECTED["node"]


@pytest.mark.parametrize("client", ["openai", "anthropic"])
async def test_a_client_reads_streams_that_had_to_wait(
    rig: Rigs, engines: dict[str, Path], test_cache: Path, tmp_path: Path, secret: str, client: str
) -> None:
    """Their SSE parsers pass over the comments, before the first event and before an error."""
    python = await asyncio.to_thread(environment, test_cache, requirements_of(client))
    comments, comment = [], dispatch._comment

    def counted(status: ModelStatus) -> bytes:
        comments.append(status)
        return comment(status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_comment", counted)
        passed = await run(rig, engines, tmp_path, secret, [python, HERE / f"{client}_client.py"], naps=True)
    assert len(passed) == EXPECTED[client] and comments
