"""`up --lan`, and the commands that `up` prints: they work as they stand."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from edge.cli import main
from edge.config import Config
from edge.daemon.consent import for_the_network
from edge.daemon.console import addresses, example
from edge.errors import UsageError
from edge.linux.sockets import network_addresses
from edge.paths import folders
from tests.serving import PATIENCE_S, Up, edgellm


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
