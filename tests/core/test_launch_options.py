"""`up` is parsed by the launcher and shown by typer: one table feeds the one and is compared with the other."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing

import pytest
from typer.testing import CliRunner

from edge.cli import up
from edge.cli.app import build
from edge.errors import UsageError
from edge.launch import given, parse
from edge.options import UP, read
from edge.usage import explain
from tests.serving import ROOT, edgellm

# What nothing before the spawn may import: each costs more than the whole launch is allowed to.
HEAVY = {
    "aiohttp",
    "typer",
    "rich",
    "httpx",
    "asyncio",
    "numpy",
    "psutil",
    "prometheus_client",
    "msgspec",
    "pydantic",
    "xllamacpp",
}


def test_typers_command_has_the_same_options() -> None:
    hints = typing.get_type_hints(up.up, include_extras=True)
    shown = {}
    for name in inspect.signature(up.up).parameters:
        # Python 3.10 wraps a parameter that defaults to None in one more Optional.
        candidates = (hints[name], *typing.get_args(hints[name]))
        kind, option = typing.get_args(next(each for each in candidates if hasattr(each, "__metadata__")))
        names = {option.default, *option.param_decls}  # typer keeps the first name apart
        shown[name] = (names, kind is bool, "list" in str(kind), option.metavar)
    table = {o.dest: ({o.name, o.short} - {None}, o.metavar is None, o.many, o.metavar) for o in UP}
    assert shown == table


def test_given_holds_only_what_was_said() -> None:
    options = parse(["-p", "cpu", "-m", "a=b", "-m", "c", "--yes"])
    assert dict(given(options)) == {"profile": "cpu", "model": ["a=b", "c"], "yes": True}


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["-p", "cpu"],
        ["--profile=cpu", "-m", "a", "--model=b=c", "-y", "--json"],
        ["--set", "n_ctx=1", "--set", "a=-1", "--listen", ":1", "--state-dir", "/x y"],
        ["--profile="],
    ],
)
def test_the_fast_reading_agrees_with_argparse(line: list[str]) -> None:
    assert read(line) == explain(line)


@pytest.mark.parametrize("line", [["--help"], ["-pcpu"], ["--yes=1"], ["-p"], ["-m", "-p"], ["x"], ["--"]])
def test_what_needs_explaining_is_left_to_argparse(line: list[str]) -> None:
    assert read(line) is None


@pytest.mark.parametrize("line", [["--nope"], ["-p"], ["surplus"], ["--prof", "cpu"]])
def test_a_wrong_line_is_a_usage_error(line: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(line)


def test_both_helps_name_every_option() -> None:
    done = edgellm("up", "--help")
    assert done.returncode == 0 and all(option.name in done.stdout for option in UP), done.stdout
    shown = CliRunner().invoke(build(), ["up", "--help"], env={"COLUMNS": "200"}).output
    assert all(option.name in shown for option in UP), shown


def test_nothing_heavy_is_imported_before_the_spawn() -> None:
    code = "import sys, edge.cli, edge.launch; print('\\n'.join(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())
