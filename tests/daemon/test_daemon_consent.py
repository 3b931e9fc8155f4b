"""What can fail in seconds comes before a build that takes an hour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.daemon import consent
from edge.errors import DoesNotFitError, EdgeError, EngineMissingError
from edge.plan.candidates import NOT_DOWNLOADED
from edge.plan.prepare import Prepared

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
