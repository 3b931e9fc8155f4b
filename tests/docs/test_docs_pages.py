"""Pages of docs/ that are generated, or whose statements can be checked without a board."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from edge.cli import main
from edge.cli.app import build
from edge.daemon.options import parse as up_options
from tests.clients import table
from tests.clients.test_real_clients import EXPECTED
from tests.gateway.test_gateway_engine import PROGRAMS

DOCS = Path(__file__).resolve().parents[2] / "docs"
JETSON = (DOCS / "jetson.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```console board\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", re.MULTILINE)


def _commands() -> list[str]:
    lines = [line for block in _BLOCK.findall(JETSON) for line in block.replace("\\\n", " ").splitlines()]
    found = (re.search(r"(?:^|&& |sudo )(edgellm [^#&]+)", line) for line in lines)
    return [match[1].strip() for match in found if match]


def understood(line: str) -> None:
    """Parse a command line of edgellm without running it. Raises UsageError of typer's own copy of click."""
    words = shlex.split(line)[1:]
    command: Any = get_command(build(words[0]))
    while hasattr(command, "commands"):  # a group; its class depends on the version of typer
        word = words.pop(0)
        assert word in command.commands, f"{line}: no command {word}"
        command = command.commands[word]
    if command.name == "up":
        up_options(words)
    else:
        command.make_context(line, words)


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_first_page_is_short(page: str) -> None:
    lines = (DOCS.parent / page).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150


@pytest.mark.parametrize("line", _commands())
def test_commands_of_the_jetson_page_are_understood(line: str) -> None:
    understood(line)


def test_a_command_with_an_option_that_does_not_exist_is_not_understood() -> None:
    for line in ("edgellm wait --nosuch", "edgellm nosuch", "edgellm up --nosuch", "edgellm key add"):
        with pytest.raises(Exception, match=r"(?i)no such|nosuch|missing"):
            understood(line)


@pytest.mark.parametrize(("board", "model"), _ROW.findall(JETSON))
def test_the_jetson_page_names_the_models_that_the_planner_chooses(
    board: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "--board", board, "--state-dir", str(tmp_path), "--json"])
    (plan,) = json.loads(capsys.readouterr().out)["models"].values()
    assert f"{plan['model']['name']} {plan['model']['quant']}" == model


def _helps(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from _helps(each, (*words, name))


def test_each_help_names_a_page_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    tree = list(_helps(get_command(build()), ()))
    assert len(tree) > 50
    for words in tree:
        with contextlib.suppress(SystemExit):  # argparse, of `up`
            main([*words, "--help"])
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        pages = re.findall(r"[Mm]ore: .*? of the source", shown)
        assert pages, f"{words}: {shown[-200:]}"
        for page in re.findall(r"[\w/-]+\.md", pages[-1]):
            assert (DOCS.parent / page).exists(), f"{words}: {page}"


def test_every_link_of_the_pages_resolves() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_table_of_clients_has_a_row_for_each_check_and_each_program() -> None:
    page = (DOCS / "clients.md").read_text(encoding="utf-8")
    assert page.startswith(table.HEADER), "run python -m tests.clients.table"
    rows = [row.split(" | ") for row in page[len(table.HEADER) :].splitlines()]
    assert Counter(row[0].removeprefix("| ") for row in rows) == EXPECTED | dict.fromkeys(PROGRAMS, 1)
    assert [row for row in rows if row[2] != "✓"] == [], "each is answered here"
    clients = [row[0].removeprefix("| ") for row in rows]
    calls = {
        name for client, row in zip(clients, rows, strict=True) for name in (client, row[1], f"{client}: {row[1]}")
    }
    assert set(table.OF_CALL) <= calls, "what Ollama documents is of calls that are made"


def test_every_promise_names_a_test_that_exists() -> None:
    page = (DOCS / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 40
    for file, name in named:
        assert f"def {name}(" in (DOCS.parent / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert [row for row in rows if "::" not in row] == []
