"""`up --lan`, and the commands that `up` prints: they work as they stand."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import httpx
import pytest
import trustme
from msgspec.structs import replace

from edge.cli import main
from edge.config import Config
from edge.daemon.consent import for_the_network
from edge.daemon.console import addresses, example
from edge.errors import UsageError
from edge.linux.sockets import network_addresses
from edge.paths import folders
from tests.plan.random_gguf import Shape, write
from tests.serving import PATIENCE_S, Up, edgellm, environment, eventually, free_port


def test_the_example_fits_the_model() -> None:
    chat = shlex.split(example("http://box:1", "a.b", "chat", keyed=True))
    assert chat[1] == "http://box:1/v1/chat/completions"
    assert "Authorization: Bearer $EDGELLM_API_KEY" in chat
    assert json.loads(chat[-1])["model"] == "a.b"
    assert shlex.split(example("http://box:1", "e", "embedding", keyed=False))[1].endswith("/v1/embeddings")
    assert "documents" in json.loads(shlex.split(example("http://box:1", "r", "rerank", keyed=False))[-1])


def test_a_wildcard_is_shown_as_addresses_to_connect_to() -> None:
    own = network_addresses(socket.AF_INET)
    assert addresses("http://0.0.0.0:80") == [*(f"http://{each}:80" for each in own), "http://127.0.0.1:80"]
    assert addresses("http://127.0.0.1:80") == ["http://127.0.0.1:80"]
    assert addresses("unix:/run/x.sock") == []


def test_without_a_terminal_no_key_is_made(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    with pytest.raises(UsageError) as caught:
        for_the_network(Config(), places, {"json": False, "listen": []})
    assert caught.value.hint == "edgellm key add NAME"
    assert not (places.config / "keys.toml").exists()


def test_a_terminal_is_shown_the_new_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places, options = folders({}, tmp_path), {"json": False, "listen": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        config = for_the_network(Config(listen=("127.0.0.1:81",)), places, options)
        shown = capsys.readouterr().out
        assert config.listen == ("0.0.0.0:81",) and options["listen"] == ["0.0.0.0:81"]
        assert "export EDGELLM_API_KEY=sk-edge-" in shown
        for_the_network(config, places, options)
        assert capsys.readouterr().out == ""
    assert (places.config / "keys.toml").stat().st_mode & 0o777 == 0o600


@pytest.mark.e2e
def test_the_network_is_served_with_a_key_only(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ("--state-dir", str(tmp_path))
    assert edgellm("up", "--lan", "--listen", ":0", "-p", "cpu", "-m", str(smollm2), *state).returncode == 64
    assert main(["key", "add", "phone", *state]) == 0
    secret = capsys.readouterr().out.strip()
    with Up(tmp_path, "--lan", "-p", "cpu", "-m", f"a={smollm2}", "-m", f"b={smollm2}", "--set", "n_ctx=512") as up:
        up.wait_for("ok")
        assert up.status()["urls"] == [f"http://0.0.0.0:{up.port}"]
        for url in addresses(f"http://0.0.0.0:{up.port}"):
            for headers, status in (({}, 401), ({"Authorization": f"Bearer {secret}"}, 200)):
                assert httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code == status
        if shutil.which("curl"):
            for model in ("a", "b"):
                line = example(addresses(f"http://0.0.0.0:{up.port}")[0], model, "chat", keyed=True)
                env = {**os.environ, "EDGELLM_API_KEY": secret, "no_proxy": "*"}
                done = subprocess.run(f"{line} -sS", shell=True, env=env, capture_output=True, text=True, timeout=120)
                assert json.loads(done.stdout)["choices"], done.stdout + done.stderr
        env = {"EDGELLM_API_KEY": secret}
        asked = edgellm("chat", "Say hello.", "--max-tokens", "2", *state, env=env)
        assert asked.returncode == 0 and "cut after 2 tokens" in asked.stderr, asked.stderr


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> dict[str, Path]:
    """Models of random weights, by what they are for: two that chat, one for embeddings, one that ranks."""
    folder = tmp_path_factory.mktemp("small")
    tiny = Shape(arch="qwen3", layers=2, embd=128, heads=2, kv_heads=2, ff=128, tied=True, ctx=1024)
    kinds = {"chat": None, "other": None, "embed": gguf.PoolingType.MEAN, "rank": gguf.PoolingType.RANK}
    return {
        name: write(folder / f"{name.title()}-F16.gguf", replace(tiny, pooling=pooling), smollm2)
        for name, pooling in kinds.items()
    }


def printed_lines(state: Path, models: dict[str, Path], *arguments: str) -> Iterator[list[str]]:
    """Start `up` as on a terminal, and yield the curl commands that it printed once every model is ready."""
    words = [word for name, path in models.items() for word in ("-m", f"{name}={path}")]
    command = [sys.executable, "-m", "edge", "up", "-p", "cpu", "--state-dir", str(state), *words, *arguments]
    command += ["--set", "n_ctx=512", "--set", "n_threads=1"]
    log = state / "up.log"
    with log.open("wb") as out:
        up = subprocess.Popen(
            command, env=environment(None), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )

    def lines() -> list[str] | None:
        assert up.poll() is None, log.read_text()
        found = [line.strip() for line in log.read_text().split("\n")[:-1] if line.strip().startswith("curl ")]
        return found if len(found) == len(models) else None

    try:
        yield eventually(lines, log.read_text)
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(PATIENCE_S)


FIELDS = {"chat": "choices", "other": "choices", "embed": "data", "rank": "results"}


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("curl") is None, reason="the printed commands are run as they stand")
@pytest.mark.parametrize("way", ["open", "keys", "tls"])
def test_each_curl_command_that_up_prints_works_as_it_stands(
    tmp_path: Path, small_models: dict[str, Path], way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models that chat, one for embeddings and one that ranks: a line each, with the key where one is wanted."""
    arguments = ["--listen", f"127.0.0.1:{free_port()}"]
    secret = "unset"
    if way == "keys":
        assert main(["key", "add", "phone", "--state-dir", str(tmp_path)]) == 0
        secret = capsys.readouterr().out.strip()
    if way == "tls":
        certificate = trustme.CA().issue_cert("box.example")
        certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
        file = tmp_path / "config" / "edgellm.toml"
        file.parent.mkdir()
        lines = f'tls_cert = "{tmp_path / "cert.pem"}"\ntls_key = "{tmp_path / "key.pem"}"\n'
        file.write_text(f"schema = 1\n[gateway]\n{lines}", encoding="utf-8")
    for commands in printed_lines(tmp_path, small_models, *arguments):
        seen = set()
        for command in commands:
            env = {**os.environ, "EDGELLM_API_KEY": secret, "no_proxy": "*"}
            done = subprocess.run(f"{command} -sS", shell=True, env=env, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, command + done.stderr
            answer, model = json.loads(done.stdout), json.loads(shlex.split(command)[-1])["model"]
            assert answer.get(FIELDS[model]), (command, answer)
            seen.add(model)
            assert ("EDGELLM_API_KEY" in command) == (way == "keys")
            assert ("-k" in shlex.split(command)) == (way == "tls")
        assert seen == set(FIELDS)
