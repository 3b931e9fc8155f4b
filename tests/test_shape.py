"""The shape of the source: sizes, names, words and references. `python tests/test_shape.py` prints the figures."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EDGE = ROOT / "edge"
FLAT = {"errors", "paths", "resources", "units"}
# Shorter than 40 lines, each for its own reason.
SHORT: frozenset[str] = frozenset()
MAX_LINES, MIN_LINES, MAX_FUNCTION = 400, 40, 50
BANNED = re.compile(
    r"\b(whoever|somebody|everybody|shall|seldom|for good|for ever|says so|all the same|heralds?|vigils?|lore"
    r"|wish|wishes|wished|tidy|untidy|crew|manners|luck)\b|(?<![`'\"(=/:@])\bnobody\b(?![`'\":/])",
    re.IGNORECASE,
)
PROSE = ("docs", "build", "profiles", "systemd")
# Quotes of other programs, licences and upstream texts.
BANNED_EXCEPT = {"LICENSE", "tests/test_shape.py", "CHANGELOG.md"}
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
SOURCE_PATH = re.compile(
    r"\b((?:edge|tests|build|profiles|systemd|docs)/[\w./-]+\.(?:py|md|toml|sh|cmake|html|service|socket))\b"
)


def modules() -> list[Path]:
    return [path for path in sorted(EDGE.rglob("*.py")) if path.name not in ("__init__.py", "__main__.py")]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def texts() -> Iterator[Path]:
    """Every file whose words people read."""
    yield from sorted(EDGE.rglob("*.py"))
    yield from sorted(path for path in (ROOT / "tests").rglob("*.py") if "trees" not in path.parts)
    yield from sorted(ROOT.glob("*.md"))
    for folder in PROSE:
        yield from sorted(
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".md", ".toml", ".cmake", ".html", ".service")
        )


def documents() -> list[Path]:
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *(ROOT / d / "README.md" for d in PROSE[1:]),
    ]


def test_no_file_is_too_short_or_too_long() -> None:
    wrong = {name(path): lines(path) for path in modules() if not MIN_LINES <= lines(path) <= MAX_LINES}
    assert {file: size for file, size in wrong.items() if file not in SHORT} == {}
    assert len(SHORT) < 6
    assert {file for file in SHORT if file not in wrong} == set(), "long enough by now: off the list"


def test_no_function_is_too_long() -> None:
    assert [(name(path), *each) for path in modules() for each in functions(path) if each[1] > MAX_FUNCTION] == []


def test_no_module_stands_loose_at_the_top() -> None:
    assert {path.stem for path in EDGE.glob("*.py") if not path.stem.startswith("__")} == FLAT


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name(path))
    assert {cls: where for cls, where in places.items() if len(where) > 1} == {}


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by their base name: a second one of the same name ends the collection."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("folder", ["edge", "tests", ""])
def test_no_private_words(folder: str) -> None:
    found = []
    for path in texts():
        file = name(path)
        if file in BANNED_EXCEPT or (folder != (file.split("/")[0] if file.startswith(("edge/", "tests/")) else "")):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := BANNED.search(line):
                found.append(f"{file}:{number}: {match.group(0)}")
    assert found == []


def test_links_and_paths_in_documents_resolve() -> None:
    missing = []
    for path in documents():
        if path.name == "CHANGELOG.md":
            continue  # speaks of what has been
        text = path.read_text(encoding="utf-8")
        missing += [f"{name(path)}: {link}" for link in LINK.findall(text) if not (path.parent / link).exists()]
        missing += [f"{name(path)}: {file}" for file in SOURCE_PATH.findall(text) if not (ROOT / file).exists()]
    assert missing == []


def comment_lines(path: Path) -> int:
    with path.open("rb") as file:
        return len({token.start[0] for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT})


def figures() -> dict[str, object]:
    """The figures of the source; single importers count imports of one module of edge by others."""
    paths = modules()
    all_files = sorted(EDGE.rglob("*.py"))
    total = sum(lines(path) for path in all_files)
    comments = sum(comment_lines(path) for path in all_files)
    importers: dict[str, set[str]] = defaultdict(set)
    known = {name(path)[:-3].replace("/", ".") for path in paths}
    for path in all_files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for target in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & known:
                    importers[target].add(name(path))
    sizes = Counter(lines(path) < MIN_LINES for path in paths)
    return {
        "files": len(paths),
        "lines": total,
        "flat modules": len([path for path in paths if path.parent == EDGE]),
        "modules with one importer": sum(len(who) == 1 for who in importers.values()),
        "files under 40 lines": sizes[True],
        "comment share": f"{comments / total:.1%}",
        "packages": len([p for p in EDGE.iterdir() if (p / "__init__.py").exists()]),
    }


if __name__ == "__main__":
    for key, value in figures().items():
        print(f"{key:28} {value}")


def test_the_troubleshooting_page_is_what_the_code_says() -> None:
    from tests.docs import troubleshooting  # this file is also run as a script

    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert page == troubleshooting.page(), "write it anew: python -m tests.docs.troubleshooting"
