"""What can fail in seconds comes before a build that takes an hour."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.cli import main
from edge.daemon import consent
from edge.errors import (
    AddressInUseError,
    BugError,
    DoesNotFitError,
    EdgeError,
    EngineMissingError,
    ModelMissingError,
)
from edge.models import catalogue
from edge.plan.candidates import NOT_DOWNLOADED
from edge.plan.prepare import Prepared
from edge.units import format_bytes
from tests.fakes.gguf_writer import Gguf
from tests.fakes.hub import Hub
from tests.plan.random_gguf import Shape, write
from tests.serving import PATIENCE_S, Up, edgellm, environment, free_port

MISSING = EngineMissingError("no engine is built yet", "run `edgellm build -p cuda`", recipe="cuda")


def prepared(fingerprint: str) -> Any:
    model = SimpleNamespace(model=SimpleNamespace(name="Qwen3.5-4B", quant="Q5_K_M", fingerprint=fingerprint))
    return SimpleNamespace(plan=SimpleNamespace(models={"chat": model}))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; one with `fails` in it fails."""
    commands: list[list[str]] = []

    def run(arguments: Sequence[str], state_dir: Path | None) -> None:
        commands.append(list(arguments))
        if "--check" in arguments and len(commands) == 1 and "unreachable" in str(state_dir):
            raise EdgeError("`edgellm model pull` failed")

    monkeypatch.setattr(consent, "_run", run)
    return commands


def test_the_model_is_checked_before_the_engine_is_built(ran: list[list[str]]) -> None:
    consent.build(MISSING, "cuda", None, lambda: prepared(NOT_DOWNLOADED), yes=True)
    assert ran == [["model", "pull", "--check", "Qwen3.5-4B:Q5_K_M"], ["build", "-p", "cuda", "--fetch-tools"]]


def test_a_model_that_cannot_be_fetched_stops_before_the_build(ran: list[list[str]]) -> None:
    with pytest.raises(EdgeError, match="failed"):
        consent.build(MISSING, "cuda", Path("/unreachable"), lambda: prepared(NOT_DOWNLOADED), yes=True)
    assert not any(command[0] == "build" for command in ran)


def test_a_model_that_does_not_fit_stops_before_the_build(ran: list[list[str]]) -> None:
    def does_not_fit() -> Prepared:
        raise DoesNotFitError("8 GiB are missing")

    with pytest.raises(DoesNotFitError):
        consent.build(MISSING, "cuda", None, does_not_fit, yes=True)
    assert ran == []


def test_a_model_that_is_here_is_not_asked_for(ran: list[list[str]]) -> None:
    consent.build(MISSING, "cpu", None, lambda: prepared("abc"), yes=True)
    assert ran == [["build", "-p", "cpu", "--fetch-tools"]]


# `edgellm up` where the engine is missing, whatever this machine has; a build ends the process once it begins.
WITHOUT_ENGINE = """
import sys
from types import SimpleNamespace
from edge.cli import main
from edge.daemon import consent, planning
from edge.errors import EngineMissingError

def prepare(*_, allow_missing=False):
    if not allow_missing:
        raise EngineMissingError("no engine is built yet", "run `edgellm build -p cuda`", recipe="cuda")
    return SimpleNamespace(plan=SimpleNamespace(models={}))

def run(arguments, _):
    print("ran", *arguments, flush=True)
    sys.exit(99)

planning.prepare, consent._run = prepare, run
sys.exit(main(["up", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("taken", [True, False])
def test_a_taken_port_ends_up_before_the_build(short_dir: Path, taken: bool) -> None:
    """FC-34: an hour of compiling, and then the address belongs to another program."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if taken else free_port()
        command = [sys.executable, "-c", WITHOUT_ENGINE, "--state-dir", str(short_dir), "--yes"]
        done = subprocess.run(
            [*command, "--listen", f"127.0.0.1:{port}"],
            env=environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )
    if taken:
        assert done.returncode == AddressInUseError.exit_code, done.stderr
        assert f"127.0.0.1:{port} is taken by" in done.stderr and "--listen" in done.stderr
        assert "ran" not in done.stdout
    else:
        assert "ran build -p cuda --fetch-tools" in done.stdout, done.stderr
        assert "are taken from PyPI" in done.stdout


# `edgellm up` whose supervisor has a bug.
BROKEN = """
import sys
from edge.cli import main
from edge.supervisor.supervisor import Supervisor

async def run(self):
    raise RuntimeError("a bug of ours")

Supervisor.run = run
sys.exit(main(["up", *sys.argv[1:]]))
"""


@pytest.mark.e2e
def test_a_bug_in_a_supervisor_ends_up_with_70(short_dir: Path, smollm2: Path) -> None:
    """The service manager starts it anew; a process that stayed would answer 503 until someone looks."""
    with Up(short_dir, "-p", "cpu", "-m", str(smollm2), "--set", "n_ctx=512", program=("-c", BROKEN)) as up:
        assert up.process.wait(PATIENCE_S) == BugError.exit_code == 70, up.output
        assert "RuntimeError: a bug of ours" in up.output


@pytest.fixture
def hub(tmp_path: Path, smollm2: Path) -> Iterator[Hub]:
    """It has a tiny model, to draft for itself."""
    shape = Shape(layers=2, embd=128, heads=2, kv_heads=2, ff=128)
    path = tmp_path / "hub/acme/Tiny-GGUF/Tiny-F16.gguf"
    path.parent.mkdir(parents=True)
    write(path, shape, smollm2)
    with Hub(tmp_path / "hub") as running:
        yield running


@pytest.mark.e2e
def test_a_drafter_that_is_not_here_is_fetched_with_consent(tmp_path: Path, short_dir: Path, hub: Hub) -> None:
    model, draft = tmp_path / "hub/acme/Tiny-GGUF/Tiny-F16.gguf", "hf://acme/Tiny-GGUF:F16"
    place = ("-p", "cpu", "-m", f"chat={model}", "--set", "n_ctx=512", "--set", f"draft={draft}")
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN": ""}
    refused = edgellm("up", *place, "--state-dir", str(short_dir), env=env)
    assert refused.returncode == ModelMissingError.exit_code, refused.stderr
    assert f"{draft} is not downloaded" in refused.stderr
    assert f"edgellm model pull {draft}, or start with --yes" in refused.stderr
    assert hub.files_asked() == []
    with Up(short_dir, *place, "--yes", env=env) as up:
        up.wait_for("ok")
        assert f"fetching {draft}" in up.output
        timings = up.chat(max_tokens=8).json()["timings"]
        assert timings["draft_n"] > 0, timings


@pytest.mark.parametrize("quant", ["", ":Q8_0"])
def test_a_drafter_of_the_catalogue_is_offered_with_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quant: str
) -> None:
    row = next(each for each in catalogue.load() if each.quant("Q8_0") and each.quant("Q5_K_M"))
    model = Gguf("llama").model().save(tmp_path / "a.gguf")
    words = ("-p", "cpu", "-m", str(model), "--set", f"draft={row.name}{quant}", "--state-dir", str(tmp_path / "s"))
    assert main(["plan", *words]) == ModelMissingError.exit_code
    said = capsys.readouterr().err
    shown = "Q8_0" if quant else "Q5_K_M"
    size = next(each.bytes for each in row.quants if each.quant == shown)
    assert f"edgellm model pull {row.name}:{shown} ({format_bytes(size)}), or start with --yes" in said


def test_a_drafter_that_no_catalogue_has_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Gguf("llama").model().save(tmp_path / "a.gguf")
    for draft in ("Nonesuch", "https://127.0.0.1:1/x.gguf?token=secret"):
        words = ("-p", "cpu", "-m", str(model), "--set", f"draft={draft}", "--state-dir", str(tmp_path / "s"))
        assert main(["plan", *words]) == ModelMissingError.exit_code
        said = capsys.readouterr().err
        assert "draft: " in said and "secret" not in said


def test_a_drafter_is_judged_once_its_model_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of the catalogue has no vocabulary to compare with."""
    drafter = Gguf("llama").model().save(tmp_path / "Draft-Q5_K_M.gguf")
    row = next(each for each in catalogue.load() if each.role == "chat")
    words = ("-p", "cpu", "-m", row.name, "--set", f"draft={drafter}", "--state-dir", str(tmp_path / "s"))
    assert main(["plan", "--board", "agx-orin-64", *words]) == 0
    assert "is not downloaded" in capsys.readouterr().out
