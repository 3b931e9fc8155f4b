"""A model that is being served is not removed by accident; an engine by the name `embedded`; the nearest name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge.builder import install
from edge.cli import main
from tests.fakes.gguf_writer import Gguf
from tests.serving import Up, edgellm


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
        assert edgellm("restart", "chta", *state).returncode == 69
        assert "did you mean chat?" in edgellm("logs", "-m", "chta", *state).stderr
        assert edgellm("model", "remove", "Demo", "--force", *state).returncode == 0
    assert not (models / "Demo-Q4_1.gguf").exists()


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
