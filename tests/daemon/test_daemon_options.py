"""The options of `up`: argparse in the launcher and typer's help come from one table."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from edge.cli.app import build
from edge.daemon.options import UP, given, parse
from edge.errors import UsageError
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
    "tomli_w",
    "pydantic",
    "xllamacpp",
}


def test_typers_command_has_the_same_options() -> None:
    shown = {each.name: each for each in get_command(build("up")).commands["up"].params if each.name != "help"}  # type: ignore[attr-defined]
    assert list(shown) == [option.dest for option in UP]
    for option in UP:
        made = shown[option.dest]
        assert set(made.opts) == set(option.names) and made.help == option.help
        assert (made.is_flag, made.multiple) == (option.metavar is None, option.many)
        assert option.metavar is None or made.metavar == option.metavar


def test_given_holds_only_what_was_said() -> None:
    options = parse(["-p", "cpu", "-m", "a=b", "-m", "c", "--yes"])
    assert dict(given(options)) == {"profile": "cpu", "model": ["a=b", "c"], "yes": True}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ([], {}),
        (["-p", "cpu"], {"profile": "cpu"}),
        (["-pcpu", "--model=b=c", "-m", "a", "-y"], {"profile": "cpu", "model": ["b=c", "a"], "yes": True}),
        (["--set", "n_ctx=1", "--set", "a=-1"], {"set": ["n_ctx=1", "a=-1"]}),
        (["-p", "cpu", "--", "--keep", "64", "--", "-x"], {"profile": "cpu", "args": ["--keep", "64", "--", "-x"]}),
        (["--listen", ":1", "--state-dir", "/x y", "--json"], {"listen": [":1"], "state_dir": "/x y", "json": True}),
    ],
)
def test_a_command_line_is_read(line: list[str], values: dict[str, object]) -> None:
    assert given(parse(line)) == values


@pytest.mark.parametrize("line", [["--nope"], ["-p"], ["-m", "-p"], ["surplus"], ["--prof", "cpu"], ["--yes=1"]])
def test_a_wrong_line_is_a_usage_error(line: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(line)


def test_both_helps_name_every_option() -> None:
    done = edgellm("up", "--help")
    assert done.returncode == 0 and all(option.name in done.stdout for option in UP), done.stdout
    shown = CliRunner().invoke(build(), ["up", "--help"], env={"COLUMNS": "200"}).output
    assert all(option.name in shown for option in UP), shown


def test_nothing_heavy_is_imported_before_the_spawn() -> None:
    code = "import sys, edge.cli, edge.daemon.launch; print('\\n'.join(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())
