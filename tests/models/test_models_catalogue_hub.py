"""The command that compares the catalogue with a hub, against the stand-in for it, and the ages of rows."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from edge.cli.model_output import _age
from edge.models.catalogue import CatalogueRow, load
from tests.bench.catalogue import Finding, check
from tests.fakes.hub import COMMIT, Fault, Hub, sha256

ROW = """schema = 1
[sources]
LAI = "a gallery @ 82c191af (2026-08-22)"
LB = "a catalogue (2025-10-17 and newer)"
[[model]]
name = "Tiny"
family = "Tiny"
licence = "MIT"
checked = "never"
[[model.quant]]
quant = "Q8_0"
source = "hf://own/tiny/tiny-Q8_0.gguf{at}"
looked_up = "LB, LAI and others"
approx_bytes = {bytes}
files = [{{ path = "tiny-Q8_0.gguf"{known} }}]
"""
BODY = b"GGUF" + b"\0" * 1000


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    folder = tmp_path / "hub/own/tiny"
    folder.mkdir(parents=True)
    (folder / "tiny-Q8_0.gguf").write_bytes(BODY)
    return Hub(tmp_path / "hub")


def rows(tmp_path: Path, *, known: str = "", size: int = len(BODY), at: str = "") -> tuple[CatalogueRow, ...]:
    path = tmp_path / f"models-{abs(hash((known, size, at)))}.toml"
    path.write_text(ROW.format(known=known, bytes=size, at=at))
    return load(path)


def found(hub: Hub, given: tuple[CatalogueRow, ...]) -> Finding:
    (one,) = check(given, {"HF_ENDPOINT": hub.url})
    return one


def test_a_row_with_the_hubs_revision_size_and_hash_is_the_same(hub: Hub, tmp_path: Path) -> None:
    known = f', bytes = {len(BODY)}, sha256 = "{sha256(hub.root / "own/tiny/tiny-Q8_0.gguf")}"'
    with hub:
        assert found(hub, rows(tmp_path, known=known, at=f"@{COMMIT}")).verdict == "same"
        assert not hub.files_asked(), "no file is fetched"


def test_what_a_row_lacks_is_printed_to_be_written_down(hub: Hub, tmp_path: Path) -> None:
    with hub:
        one = found(hub, rows(tmp_path))
    assert one.verdict == "incomplete"
    digest = sha256(hub.root / "own/tiny/tiny-Q8_0.gguf")
    assert one.what == f"bytes = {len(BODY)}, sha256 = {digest}, revision = {COMMIT}"


@pytest.mark.parametrize(
    "known",
    [", bytes = 7", f', sha256 = "{"0" * 64}"', f", approx_bytes = {len(BODY) * 2}"],
    ids=["size", "hash", "rounded"],
)
def test_what_contradicts_the_hub_is_named(hub: Hub, tmp_path: Path, known: str) -> None:
    with hub:
        one = found(hub, rows(tmp_path, known=known))
    assert one.verdict == "differs" and "tiny-Q8_0.gguf" in one.what


def test_what_is_gone_and_what_could_not_be_asked(hub: Hub, tmp_path: Path) -> None:
    given = rows(tmp_path)
    (hub.root / "own/tiny/tiny-Q8_0.gguf").rename(hub.root / "own/tiny/other.gguf")
    with hub:
        assert found(hub, given).verdict == "gone"
        hub.api_faults += [Fault("503")] * 3
        assert found(hub, given).verdict == "unknown"
    assert found(hub, given).verdict == "unknown", "no hub answers"


def test_a_row_is_as_old_as_the_newest_source_of_its_figures(tmp_path: Path) -> None:
    (row,) = rows(tmp_path)
    assert row.read_on == "2026-08-22"
    assert _age(row.read_on, date(2026, 11, 30)) == "3 months"
    assert _age(row.read_on, date(2026, 9, 1)) == "10 days"
    assert _age(row.read_on, date(1970, 1, 1)) == "2026-08-22", "a board whose clock is not set"
    assert _age(None, date(2026, 11, 30)) == "?"
