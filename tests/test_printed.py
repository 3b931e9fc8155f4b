"""Nothing printed that does not work, nothing accepted that does nothing.

Each command and each key in messages, help texts and documents exists; each key of the configuration is read somewhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from edge.cli.app import build
from edge.config.devices import DEVICE_KEYS
from edge.config.load import KEYS
from edge.config.values import CHOICE_KEYS, CONFIG_KEYS, MODEL_KEYS, SETTINGS, TIER_KEYS

ROOT = Path(__file__).parents[1]
PLACE = "X"  # stands for a value that a message fills in
# `edgellm …` where a reader takes it for a command: in backticks, at the start of a line, behind a colon or sudo.
COMMAND = re.compile(r"(?:^[ $]*|`|: |sudo |&& )edgellm ((?:[^\s`'\"();,:|&…#]+ ?)+)", re.MULTILINE)
SETTING = re.compile(r"--set[ =]+([a-z_.]+)=")
# A setting in prose: `fallback = "cpu"`, set n_ctx=4096.
ASSIGNED = re.compile(r"(?:`|\bset |\bwrite |, or )([a-z][a-z_.]*[a-z]) ?= ?(?:\"|'|[0-9]|true|false|[A-Z]{2,}|\[)")
# Sentences that begin with the program's name, and the fields of other files.
PROSE = re.compile(
    r"(as|before|can|cannot|changes|does|has|is|itself|knows|made|may|offers|reader|reads|refused|runs|sets|started|starts|tiny"
    r"|wheel|-$)\b"
)
OTHER_KEYS = {"schema", "sha256", "key", "restore", "systemd", "extends"}
# Parts of a query of the control socket, in docs/http.md.
OTHER_KEYS |= {"now", "model"}


def strings(path: Path) -> Iterator[str]:
    """Every text of a module that may be printed: constants and f-strings, and the docstrings of commands."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(part.value if isinstance(part, ast.Constant) else PLACE for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


@cache
def texts() -> tuple[tuple[str, str], ...]:
    return tuple(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "edge").rglob("*.py")):
        for text in strings(path):
            yield path.relative_to(ROOT).as_posix(), text
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "profiles").glob("*.md")]:
        if path.name != "CHANGELOG.md":
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in [*(ROOT / "build").glob("*.toml"), *(ROOT / "profiles").glob("*.toml"), *(ROOT / "systemd").iterdir()]:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


TREE: Any = get_command(build())


def wrong(words: list[str]) -> str | None:
    """Return what is wrong with a command line behind `edgellm`; None for one that could be run."""
    if words[0].startswith("-"):
        return None if words[0] in ("--version", "--help", "-h", "--install-completion") else f"no option {words[0]}"
    command = TREE.commands.get(words[0])
    if command is None:
        return f"no command {words[0]}"
    rest = words[1:]
    if hasattr(command, "commands"):
        if not rest:
            return None  # the noun itself prints its verbs
        if rest[0] in ("--help", "-h"):
            return None
        if rest[0] not in command.commands:
            return f"no command {words[0]} {rest[0]}" if re.fullmatch("[a-z-]+", rest[0]) else None
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    for word in rest:
        if word == "--":
            return None
        option = word.partition("=")[0]
        joined = re.match("-[a-z]{2}", option)  # -j2, -ngl of an engine
        if re.fullmatch("--?[a-z][a-z-]*", option) and option not in known and not joined:
            return f"{' '.join(words[:2])} has no option {word}"
    return None


def found(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    return [(file, match) for file, text in texts() for match in pattern.findall(text)]


def test_each_command_that_is_printed_exists() -> None:
    bad = []
    commands = found(COMMAND)
    for file, line in commands:
        words = line.rstrip(".!?").split()
        if not words or PROSE.match(words[0]) or not re.match("[a-z-]", words[0]):
            continue
        if fault := wrong(words):
            bad.append(f"{file}: edgellm {line.strip()}: {fault}")
    assert bad == []
    assert len(commands) > 100, "the pattern finds the commands"


@pytest.mark.parametrize("pattern", [SETTING, ASSIGNED], ids=["--set", "in prose"])
def test_each_key_that_is_printed_exists(pattern: re.Pattern[str]) -> None:
    known = {
        *KEYS,
        *MODEL_KEYS,
        *DEVICE_KEYS,
        *SETTINGS,
        *TIER_KEYS,
        *CHOICE_KEYS,
        *OTHER_KEYS,
        *(key.rpartition(".")[2] for key in KEYS),
    }
    assert [f"{file}: {key}" for file, key in found(pattern) if key not in known] == []


@cache
def read_names() -> frozenset[str]:
    """Every attribute that edge reads outside the configuration, dotted as it is written: `.section.hold.bytes`."""
    names = set()
    for path in (ROOT / "edge").rglob("*.py"):
        if path.parent.name != "config":
            tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            names |= {"." + ast.unparse(node) for node in tree if isinstance(node, ast.Attribute)}
    return frozenset(names)


@pytest.mark.parametrize("key", sorted({*CONFIG_KEYS, *MODEL_KEYS, *SETTINGS}))
def test_each_key_is_read_by_something(key: str) -> None:
    """The table of engine options reads its keys by name."""
    name = key.split(".", 1)[-1] if key.count(".") == 2 else key.rpartition(".")[2]
    files = ("edge/plan/engine_options.py", "edge/plan/engine_args.py")
    table = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    assert any(read.endswith(f".{name}") for read in read_names()) or f'"{name}"' in table


@cache
def every_read() -> frozenset[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "edge").rglob("*.py"))
    return frozenset(ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))


ROWS = {"device": DEVICE_KEYS, "tier": TIER_KEYS, "choice": CHOICE_KEYS}


@pytest.mark.parametrize(("row", "key"), [(row, key) for row, keys in ROWS.items() for key in keys])
def test_each_key_of_a_further_table_is_read(row: str, key: str) -> None:
    """By the variable that holds a row: their names are those of other things too."""
    assert every_read() & {f"{row}.{key}", f"{row}.{key}_bytes"}
