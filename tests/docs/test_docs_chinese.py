"""The Chinese pages against the English ones: the same headings, commands, tables and links, in the same order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {"README.md": "README.zh-CN.md", "docs/jetson.md": "docs/zh-CN/jetson.md"}
# Fenced blocks, and indented ones after an empty line.
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)((?: {4}[^\n]*\n)+)")
_COMMENT = re.compile(r"(?:^|\s{2,})#\s.*$")


def english(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def chinese(name: str) -> str:
    return (ROOT / PAIRS[name]).read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """Every line of the code blocks, without the comments: those are translated."""
    blocks = _FENCED.findall(text) + _INDENTED.findall(_FENCED.sub("", text))
    lines = (_COMMENT.sub("", line).strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def headings(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", _FENCED.sub("", text), re.MULTILINE)]


def code_of_tables(text: str) -> list[list[str]]:
    """The code in each row of each table."""
    rows = re.findall(r"^\|.*\|$", _FENCED.sub("", text), re.MULTILINE)
    return [sorted(re.findall(r"`([^`]+)`", row)) for row in rows]


def numbers_of_tables(text: str) -> list[list[str]]:
    rows = re.findall(r"^\|.*\|$", _FENCED.sub("", text), re.MULTILINE)
    return [re.findall(r"\d+(?:\.\d+)?", row) for row in rows]


def linked(page: Path, text: str) -> set[str]:
    """Files of the repository that the page links, and addresses; not the page in the other language."""
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    found = {each if "://" in each else str((page.parent / each).resolve().relative_to(ROOT)) for each in targets}
    back = {other: own for own, other in PAIRS.items()}
    return {back.get(each, each) for each in found}


@pytest.mark.parametrize("name", PAIRS)
def test_the_chinese_page_has_the_headings_commands_tables_and_links_of_the_english_one(name: str) -> None:
    there, here = english(name), chinese(name)
    assert commands(here) == commands(there), f"keep {PAIRS[name]} in step with {name}"
    assert headings(here) == headings(there)
    assert code_of_tables(here) == code_of_tables(there)
    assert numbers_of_tables(here) == numbers_of_tables(there)
    assert linked(ROOT / name, there) - {name} <= linked(ROOT / PAIRS[name], here)


@pytest.mark.parametrize("name", PAIRS)
def test_the_first_paragraphs_of_the_chinese_page_name_the_mirrors(name: str) -> None:
    first = chinese(name).partition("\n## ")[0].partition("```")[0]
    assert "`export HF_ENDPOINT=https://hf-mirror.com`" in first
    assert re.search(r"`[^`]*modelscope://[\w-]+/[\w.-]+:\w+`", first)


@pytest.mark.parametrize("name", PAIRS)
def test_the_pages_name_each_other(name: str) -> None:
    there, here = (ROOT / name).parent, (ROOT / PAIRS[name]).parent
    assert (ROOT / PAIRS[name]).resolve() in {
        (there / each).resolve() for each in re.findall(r"\]\(([^)]+)\)", english(name))
    }
    assert (ROOT / name).resolve() in {(here / each).resolve() for each in re.findall(r"\]\(([^)]+)\)", chinese(name))}


@pytest.mark.parametrize("name", PAIRS)
def test_the_chinese_page_is_chinese(name: str) -> None:
    """A paragraph that was added in English only would pass as a translation."""
    prose = re.sub(r"`[^`]*`", "", _INDENTED.sub("", _FENCED.sub("", chinese(name))))
    for paragraph in re.split(r"\n\s*\n", prose):
        if len(paragraph) > 80 and not paragraph.lstrip().startswith("|"):
            assert len(re.findall(r"[\u4e00-\u9fff]", paragraph)) > 15, paragraph


@pytest.mark.parametrize("page", [page for pair in PAIRS.items() for page in pair if "jetson" in page])
def test_a_board_that_was_set_up_from_the_page_has_what_make_install_and_the_build_need(page: str) -> None:
    """The packages that the hints of the preflight name, and what the page itself runs."""
    text = (ROOT / page).read_text(encoding="utf-8")
    installed = set(re.findall(r"\S+", "".join(re.findall(r"apt-get install -y ([^\n]+)", text))))
    sources = [*(ROOT / "edge/builder").glob("*.py"), ROOT / "Makefile"]
    named = re.findall(r"sudo apt(?:-get)? install ([\w +.-]*\w)", "".join(path.read_text() for path in sources))
    wanted = {package for line in named for package in line.split()}
    assert {"cmake", "ninja-build", "build-essential", "python3-venv"} <= wanted, "the pattern above reads the hints"
    assert {"cmake", "ninja-build", "build-essential", "python3-venv", "git", "curl"} <= installed
    # JetPack 5 has Python 3.8: the page names the command that gets uv, and the option that names the Python.
    assert "https://astral.sh/uv/install.sh" in text and re.search(r"make install PYTHON=\S", text)
