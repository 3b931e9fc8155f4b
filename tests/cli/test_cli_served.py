"""A model that is being served is not removed by accident; an engine by the name `embedded`; the nearest name."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import httpx
import pytest

from edge.builder import install
from edge.cli import main
from edge.paths import folders
from tests.fakes.gguf_writer import Gguf
from tests.serving import PATIENCE_S, Up, edgellm


@pytest.mark.e2e
def test_a_served_model_is_removed_by_force_only(tmp_path: Path, smollm2: Path) -> None:
    models = tmp_path / "data" / "models"
    models.mkdir(parents=True)
    shutil.copy(smollm2, models / "Demo-Q4_1.gguf")
    Gguf("llama").model().save(models / "Other-Q5_K_M.gguf")
    state = ("--state-dir", str(tmp_path))
    with Up(tmp_path, "-p", "cpu", "-m", "chat=Demo", "--set", "n_ctx=512") as up:
        up.wait_for("ok")
        refused = edgellm("model", "remove", "Demo", *state)
        assert refused.returncode == 64
        assert (
            "Demo:Q4_1 is served by" in refused.stderr and "as chat" in refused.stderr and "--force" in refused.stderr
        )
        assert (models / "Demo-Q4_1.gguf").exists()
        assert edgellm("model", "remove", "Other", *state).returncode == 0
        unknown = edgellm("restart", "chta", *state)
        assert unknown.returncode == 69
        assert "no model 'chta' is served; did you mean chat?" in unknown.stderr
        unknown = edgellm("restart", "nosuch", *state)
        assert unknown.returncode == 69
        assert "no model 'nosuch' is served" in unknown.stderr and "the models are chat" in unknown.stderr
        assert "did you mean chat?" in edgellm("logs", "-m", "chta", *state).stderr
        assert edgellm("model", "remove", "Demo", "--force", *state).returncode == 0
    assert not (models / "Demo-Q4_1.gguf").exists()


def test_a_key_that_clients_use_is_revoked_by_force_or_consent_only(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ("--state-dir", str(tmp_path))
    secrets = {name: edgellm("key", "add", name, *state).stdout.strip() for name in ("laptop", "phone", "unused")}
    with Up(tmp_path, "-p", "cpu", "-m", f"chat={smollm2}", "--set", "n_ctx=512") as up:
        up.wait_for("ok")

        def listed(name: str) -> int:
            headers = {"Authorization": f"Bearer {secrets[name]}"}
            return httpx.get(f"{up.url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code

        assert [listed(name) for name in ("laptop", "phone", "phone")] == [200, 200, 200]
        assert edgellm("key", "revoke", "unused", *state).returncode == 0
        refused = edgellm("key", "revoke", "phone", *state)
        assert refused.returncode == 64
        assert f"key phone was accepted by the edgellm in {folders({}, tmp_path).instance_run}" in refused.stderr
        assert "in 2 requests" in refused.stderr and "--force" in refused.stderr and listed("phone") == 200
        assert edgellm("key", "revoke", "phone", "--force", *state).returncode == 0
        assert listed("phone") == 401
        for answer, code in (("n", 64), ("y", 0)):
            monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
            assert main(["key", "revoke", "laptop", *state]) == code
            assert "in 1 request: revoke it?" in capsys.readouterr().out


class Terminal(io.StringIO):
    """A standard input that a person types on."""

    def isatty(self) -> bool:
        return True


def test_the_embedded_engine_is_selected_by_its_name(tmp_path: Path) -> None:
    engines = tmp_path / "data" / "engines"
    engines.mkdir(parents=True)
    install.write_selection(engines, install.SelectedEngine("built-1", None))
    assert main(["engine", "use", "embedded", "--state-dir", str(tmp_path)]) == 0
    selected = install.read_selection(engines)
    assert (selected.current, selected.previous) == (None, "built-1")


def test_the_nearest_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Gguf("llama").model().save(tmp_path / "data" / "models" / "Qwen3.5-4B-Q5_K_M.gguf")
    assert main(["model", "show", "Qwen3.5-4b:Q5_K_N", "--state-dir", str(tmp_path)]) == 69
    assert "did you mean Qwen3.5-4B:Q5_K_M?" in capsys.readouterr().err
