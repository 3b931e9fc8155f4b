"""Every field case that code, tests and docs name is in docs/field-cases.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CATALOGUE = HERE / "docs" / "field-cases.md"
_SUFFIXES = {".py", ".toml", ".md", ".sh", ".c", ".service", ".socket"}
# `FC-28`, `B-10` in prose, `fc28` in a test's name. Hex and UUIDs do not match: no letter or digit may stand beside.
_CASE = re.compile(r"(?<![A-Za-z0-9])(?:FC-(\d\d)|fc(\d\d))(?![0-9A-Za-z])")
_LOG = re.compile(r"(?<![A-Za-z0-9-])([ABD]-\d\d)(?![0-9A-Za-z-])")
_LINE = re.compile(r"^- \*\*((?:FC|[ABD])-\d\d)\*\* \S", re.MULTILINE)


def _files() -> Iterator[Path]:
    for folder in ("edge", "tests", "build", "profiles", "systemd", "docs"):
        for path in sorted((HERE / folder).rglob("*")):
            if path.suffix in _SUFFIXES and path not in (CATALOGUE, Path(__file__).resolve()):
                yield path
    yield from sorted(HERE.glob("*.md"))


def _named(text: str) -> set[str]:
    cases = {f"FC-{prose or name}" for prose, name in _CASE.findall(text)}
    return cases | set(_LOG.findall(text))


def test_every_reference_resolves() -> None:
    known = set(_LINE.findall(CATALOGUE.read_text()))
    dangling = {
        str(path.relative_to(HERE)): sorted(missing)
        for path in _files()
        if (missing := _named(path.read_text(errors="replace")) - known)
    }
    assert dangling == {}


def test_every_case_stands_once() -> None:
    found = _LINE.findall(CATALOGUE.read_text())
    assert len(found) == len(set(found)) > 70


def test_references_are_recognized() -> None:
    assert _named("FC-07, (FC-28); def test_fc34_a(): # D-11 B-10 GPU-D-12 fc341 0xfc12ab") == {
        "B-10",
        "FC-07",
        "FC-28",
        "FC-34",
        "D-11",
    }


def test_nothing_refers_to_a_document_that_is_not_here() -> None:
    private = "DESIGN" + ":"
    assert [str(path.relative_to(HERE)) for path in _files() if private in path.read_text(errors="replace")] == []
