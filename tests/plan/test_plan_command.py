"""`edgellm plan`: for this machine, for boards that are not here, as text and as the document."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge.cli import main
from edge.config import load
from edge.errors import DoesNotFitError, UnavailableError
from edge.paths import folders
from edge.plan.calibration_file import calibration_path, record
from edge.plan.plan import LaunchPlan, Measured, Settings
from edge.plan.prepare import HostView, prepare
from edge.units import GIB
from tests.fakes.gguf_writer import Gguf
from tests.trees import trees

DOMAIN = {
    *("available_bytes", "reserve_bytes", "weights_bytes", "kv_bytes", "compute_bytes", "context_bytes"),
    *("prompt_cache_bytes", "page_cache_bytes", "claim_bytes", "required_bytes", "headroom_bytes"),
}
SETTINGS = {
    *("n_ctx", "n_parallel", "n_gpu_layers", "kv_type_k", "kv_type_v", "flash_attention", "load_mode", "n_threads"),
    *("cache_ram_bytes", "devices"),
}


@pytest.fixture
def state(tmp_path: Path, smollm2: Path) -> list[str]:
    models = folders({}, tmp_path).models
    models.mkdir(parents=True)
    (models / smollm2.name).symlink_to(smollm2)
    return ["--state-dir", str(tmp_path)]


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_document_is_the_agreed_one(capsys: pytest.CaptureFixture[str], state: list[str]) -> None:
    found = document(capsys, "--root", str(trees.tree("orin-nano-8")), *state)
    assert found["schema"] == 1
    assert set(found["engine"]) == {"id", "kind", "version", "commit", "era"}
    (model,) = found["models"].values()
    assert set(model["model"]) >= {"path", "quant", "bytes", "fingerprint"}
    rung = model["ladder"][model["chosen"]]
    assert rung["rung"] == model["chosen"]
    assert rung["fits"] is True
    assert set(rung["settings"]) >= SETTINGS
    assert {domain: set(values) for domain, values in rung["memory"].items()} == {"unified": DOMAIN}
    assert rung["argv"].count("{socket}") == 1
    assert rung["env"]["LC_ALL"] == "C"
    assert all(set(reason) == {"subject", "value", "because", "origin"} for reason in rung["reasons"])
    for each in model["ladder"]:
        memory = each["memory"]["unified"]
        parts = sum(memory[f"{part}_bytes"] for part in ("weights", "kv", "compute", "context", "prompt_cache"))
        assert memory["required_bytes"] == parts + memory["page_cache_bytes"]


def test_a_plan_that_a_jetson_user_would_sign(capsys: pytest.CaptureFixture[str], state: list[str]) -> None:
    assert main(["plan", "--root", str(trees.tree("orin-nano-8")), "-v", *state]) == 0
    printed = capsys.readouterr().out
    for words in ("Jetson Orin Nano (8GB)", "L4T 36.4.3", "everything on CUDA0", "headroom", "--fit off", "{socket}"):
        assert words in printed
    assert "planned for an engine built there with `edgellm build -p orin`" in printed


def test_memory_by_hand_and_boards_by_name(capsys: pytest.CaptureFixture[str], state: list[str]) -> None:
    board = ["--board", "orin-nano-8", *state]
    rich = document(capsys, *board)
    poor = document(capsys, *board, "--memory", "1.9GiB")
    rungs = [next(iter(found["models"].values())) for found in (rich, poor)]
    assert rungs[0]["chosen"] < rungs[1]["chosen"]
    assert main(["plan", *board, "--memory", "1.2GiB"]) == 75
    error = capsys.readouterr().err
    assert "does not fit" in error
    assert "hint:" in error
    assert main(["plan", *board, "--root", "/"]) == 64
    assert main(["plan", "--board", "orin-nanu-8", *state]) == 64
    assert main(["plan", *board, "--memory", "lots"]) == 64


@pytest.mark.parametrize("named", ["Demo", "Demo:Q8_0", "Demo:Q5_K_M"])
def test_does_not_fit_speaks_of_the_nearest_candidate(
    capsys: pytest.CaptureFixture[str], state: list[str], tmp_path: Path, named: str
) -> None:
    """Not of the biggest quantization, nor of the one that was named: its smaller ones are steps of the ladder."""
    for quant, file_type, kind in (("Q8_0", 7, "Q8_0"), ("Q5_K_M", 17, "Q5_K"), ("Q4_K_M", 15, "Q4_K")):
        model = Gguf("llama").model(file_type=file_type, type=kind).tensor("extra.weight", 4096, 1_000_000, type=kind)
        model.save_sparse(folders({}, tmp_path).models / f"Demo-{quant}.gguf")
    assert main(["plan", "--board", "orin-nano-8", "--memory", "1.2GiB", "-m", named, *state]) == 75
    assert capsys.readouterr().err.startswith("error: Demo (Demo Q4_K_M) does not fit: ")


def test_a_profile_and_a_model_by_flag(capsys: pytest.CaptureFixture[str], state: list[str]) -> None:
    found = document(capsys, "-p", "cpu", "-m", "chat=smollm2-135m-instruct", "--set", "n_ctx=2048", *state)
    (rung,) = [model["ladder"][model["chosen"]] for model in found["models"].values()]
    assert list(found["models"]) == ["chat"]
    assert (rung["settings"]["n_ctx"], rung["settings"]["n_gpu_layers"]) == (2048, 0)
    assert {"subject": "n_ctx", "value": "2048"}.items() <= rung["reasons"][1].items()
    assert rung["reasons"][1]["origin"] == "--set"


def test_here_the_real_engine_is_planned_for(capsys: pytest.CaptureFixture[str], state: list[str]) -> None:
    found = document(capsys, "-p", "cpu", "--engine", "embedded", *state)
    assert found["engine"]["kind"] == "embedded"
    assert main(["plan", "-p", "cpu", "--engine", "no-such-engine", *state]) == 64


def test_the_last_start_is_shown_beside_the_estimate(
    capsys: pytest.CaptureFixture[str], state: list[str], tmp_path: Path
) -> None:
    engine = document(capsys, "-p", "cpu", "--engine", "embedded", *state)["engine"]["id"]
    start = LaunchPlan(0, Settings(2048, 1, 0, "f16", "f16", "on", "mmap", 2, 0), {}, (), {})
    measured = Measured("SmolLM2 Q4_1, 2048 tokens", 96_000_000, 47_000_000, 17_000_000, 90_000_000)
    record(calibration_path(folders({}, tmp_path)), engine, "llama", start, measured)
    assert main(["plan", "-p", "cpu", "--engine", "embedded", *state]) == 0
    assert "last measured (SmolLM2 Q4_1, 2048 tokens): weights 91.6 MiB, KV 44.8 MiB" in capsys.readouterr().out


def test_a_store_of_twenty_models_is_planned_by_names(
    capsys: pytest.CaptureFixture[str], state: list[str], tmp_path: Path, smollm2: Path
) -> None:
    """Only the headers of what is considered are read."""
    models = folders({}, tmp_path).models
    for number in range(20):
        (models / f"Broken-{number}B-Q4_K_M.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    shutil.copy(smollm2, models / "Named-Q4_1.gguf")
    found = document(capsys, "-p", "cpu", "-m", "Named", "--engine", "embedded", *state)
    assert list(found["models"]) == ["Named"]


def test_planning_imports_the_standard_library_only() -> None:
    """The child comes first: nothing heavy on the path of `up` before the spawn."""
    code = (
        "import sys, edge.plan.prepare, edge.config, edge.board.probe, edge.engine.choose; "
        "heavy = {'numpy', 'rich', 'typer', 'httpx', 'aiohttp', 'psutil', 'gguf', 'xllamacpp', 'asyncio'}; "
        "print(*sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


@pytest.mark.parametrize("memory", ["32GiB", "5.2", "0"])
def test_memory_that_the_board_cannot_have_is_refused(
    memory: str, capsys: pytest.CaptureFixture[str], state: list[str]
) -> None:
    """5.2 without a unit is five bytes."""
    assert main(["plan", "--board", "orin-nano-8", "--memory", memory, *state]) == 64
    assert "write a unit: --memory 5.2GiB" in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["", "-1GiB", "nan"])
def test_memory_that_is_no_size_is_refused(memory: str, capsys: pytest.CaptureFixture[str], state: list[str]) -> None:
    assert main(["plan", "--board", "orin-nano-8", "--memory", memory, *state]) == 64
    assert "not a size" in capsys.readouterr().err


def test_hidden_gpus_are_hidden_from_the_plan(
    capsys: pytest.CaptureFixture[str], state: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 03: the plan that is printed is the one that `up` would launch."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = document(capsys, "--root", str(trees.tree("rtx-4090")), "-p", "cpu", *state)
    assert found["board"]["gpus"] == []


def two_cards(folder: Path, kind: str = "GPU") -> Path:
    """The tree of a machine with a small old card and a larger newer one."""
    root = trees.copy("rtx-4090", folder / "tree")
    head = (root / "nvidia-smi.csv").read_text().splitlines()[0]
    cards = (
        "0, GPU-20000000-0000-0000-0000-000000000000, Quadro P2000, 00000000:01:00.0, 5120, 4950, 6.1, [N/A], 580.82",
        "1, GPU-50000000-0000-0000-0000-000000000000, RTX A5000, 00000000:02:00.0, 24564, 24000, 8.6, [N/A], 580.82",
    )
    (root / "nvidia-smi.csv").write_text("\n".join((head, *cards)).replace("GPU-", f"{kind}-") + "\n")
    return root


P2000, A5000 = ("GPU-20000000-0000-0000-0000-000000000000", "GPU-50000000-0000-0000-0000-000000000000")


@pytest.mark.parametrize(
    ("selectors", "used"),
    [
        (["GPU-2000"], P2000),
        ([P2000], P2000),
        (["0"], P2000),
        (["p2000"], P2000),
        (["GPU-5000"], A5000),
        (["1"], A5000),
        (["A5000"], A5000),
        (["P2000", "1"], A5000),
        ([], A5000),
    ],
)
def test_the_gpus_of_all_models_are_chosen_by_uuid_index_or_name(
    capsys: pytest.CaptureFixture[str], state: list[str], tmp_path: Path, selectors: list[str], used: str
) -> None:
    setting = f"gpus={json.dumps(selectors)}"
    found = document(capsys, "--root", str(two_cards(tmp_path)), "-p", "cuda", "--set", setting, *state)
    assert len(found["board"]["gpus"]) == (2 if len(selectors) != 1 else 1)
    (model,) = found["models"].values()
    rung = model["ladder"][model["chosen"]]
    assert rung["env"]["CUDA_VISIBLE_DEVICES"] == used
    assert set(rung["memory"]) == {"host", used} and rung["settings"]["n_gpu_layers"] == 31


@pytest.mark.parametrize("selector", ["GPU-9", "2", "RTX 4090"])
def test_a_gpu_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], state: list[str], tmp_path: Path, selector: str
) -> None:
    setting = f"gpus={json.dumps([selector])}"
    assert main(["plan", "--json", "--root", str(two_cards(tmp_path)), "-p", "cuda", "--set", setting, *state]) == 78
    said = capsys.readouterr().err
    assert f"no GPU is '{selector}'" in said and "1: RTX A5000 (GPU-5000" in said


@pytest.mark.parametrize(
    ("hidden", "value"),
    [("P2000", "GPU-5000"), ("P2000", "1"), ("A5000", "GPU-2"), ("A5000", "0"), ("P2000", "MIG-5000")],
)
def test_case_03_plan_board_and_doctor_see_the_cards_that_up_would_use(
    capsys: pytest.CaptureFixture[str],
    state: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hidden: str,
    value: str,
) -> None:
    """A short UUID, also of a MIG instance, and an index, as in CUDA; `build` compiles for what `board` shows."""
    root = two_cards(tmp_path, "MIG" if value.startswith("MIG") else "GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    shown = "A5000" if hidden == "P2000" else "P2000"
    tree = ("--root", str(root))
    found = document(capsys, *tree, "-p", "cpu", *state)["board"]["gpus"]
    assert len(found) == 1 and shown in found[0]["name"]
    main(["board", *tree, "--json"])
    (gpu,) = json.loads(capsys.readouterr().out)["board"]["gpus"]
    assert shown in gpu["name"]
    main(["doctor", *tree, *state])
    said = capsys.readouterr().out
    assert shown in said and hidden not in said


def test_a_service_is_planned_for_the_memory_after_boot(tmp_path: Path, smollm2: Path) -> None:
    """An instance that runs while the service is installed holds memory which is free after the next boot."""
    places = folders({}, tmp_path)
    root = trees.copy("x86-vm", tmp_path / "tree")
    (root / "proc/meminfo").write_text("MemTotal: 16000000 kB\nMemFree: 900000 kB\nMemAvailable: 900000 kB\n")
    config = load(places, {"profile": "cpu", "engine": "embedded", "model": [f"m={smollm2}"]}, {})
    with pytest.raises(DoesNotFitError):
        prepare(config, places, HostView(root), allow_missing=True)
    booted = prepare(config, places, HostView(root, at_boot=True), allow_missing=True)
    budget = booted.plan.models["m"].ladder.plans[0].budget["host"]
    assert budget.available_bytes == 16_000_000 * 1024 - 3 * GIB // 2


def test_memory_that_cannot_be_read_is_unknown_and_not_missing(tmp_path: Path, smollm2: Path) -> None:
    """A container that masks /proc/meminfo: "does not fit" sent its user to a smaller model."""
    places = folders({}, tmp_path)
    root = trees.copy("x86-vm", tmp_path / "tree")
    (root / "proc/meminfo").write_text("")
    config = load(places, {"profile": "cpu", "engine": "embedded", "model": [f"m={smollm2}"]}, {})
    with pytest.raises(UnavailableError, match="unknown: /proc/meminfo cannot be read"):
        prepare(config, places, HostView(root), allow_missing=True)
