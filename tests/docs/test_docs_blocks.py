"""Every shell block of README and docs is run, beside a server and in a checkout, or its fence says why not."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.serving import PATIENCE_S, ROOT, Up, environment

DATA = ("build", "profiles", "systemd")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / name / "README.md" for name in DATA)])
FENCE = re.compile(r"^```(?:sh|bash|shell|console)\b[ ]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Why a block is not run here; or the path of the test that runs it.
REASONS = {
    "board": "needs a Jetson",
    "root": "changes the system",
    "docker": "needs docker or podman",
    "internet": "fetches from a host that CI does not reach",
    "gpu": "needs a GPU",
    "program": "needs a program that CI has not, such as promtool or ROS",
    "long": "takes minutes; CI runs it as a step (make) or in tests of its own (the real build)",
    "bench": "takes minutes and was measured by hand: its options are parsed here, so that a renamed one is found",
}
# Commands that must not hide in an indented block, which has no mark.
COMMAND = re.compile(
    r"(?:\$ |sudo |edgellm |make |python3? |pip |curl |git |podman |docker |sh |tests/\S+\.sh|[A-Z_]+=\S+ \w)"
)
# For each of some commands: parse its arguments and end there, before anything is measured; print what was wrong.
PARSE_ONLY = """
import argparse, contextlib, io, json, runpy, sys
from edge.cli import main
parse = argparse.ArgumentParser.parse_args
def parsed(self, args=None, namespace=None):
    parse(self, args, namespace)
    raise SystemExit(0)
argparse.ArgumentParser.parse_args = parsed
wrong = []
for program, *words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            if program == "edgellm":
                # --help is obeyed once all options are parsed: an unknown one ends with 64 before.
                raise SystemExit(main([*words, "--help"]))
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            said.write("it parses no arguments")
        except SystemExit as end:
            if end.code:
                said.write(f"exit code {end.code}")
            else:
                said.truncate(0)
        except Exception as error:
            said.write(repr(error))
    wrong.append(said.getvalue())
print(json.dumps(wrong))
"""
MODULE = re.compile(r"python3? -m (tests\.[\w.]+)")


class Block(NamedTuple):
    """One fenced block of shell commands."""

    page: str
    mark: str  # empty: it is run
    text: str

    @property
    def script(self) -> str:
        """Return the commands: all lines, or those behind `$ ` where there are any."""
        lines = self.text.splitlines()
        prompts = [line[2:] for line in lines if line.startswith("$ ")]
        return "\n".join(prompts or lines)


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        for mark, text in FENCE.findall(page.read_text(encoding="utf-8")):
            found.append(Block(page.relative_to(ROOT).as_posix(), mark.strip(), text))
    return found


RUN = sorted({block.page for block in blocks() if not block.mark})


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Up]:
    """The demo model, served from its store as `make up` does."""
    state = tmp_path_factory.mktemp("blocks") / "s"
    models = state / "data" / "models"
    models.mkdir(parents=True)
    shutil.copy(smollm2, models)
    with Up(state, "-p", "cpu", "-m", "SmolLM2-135M-Instruct") as running:
        running.wait_for("ok")
        yield running


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the checkout and takes what commands write; .venv is that of this Python."""
    place = tmp_path / "edgellm"
    place.mkdir()
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (place / path.name).symlink_to(path)
    (place / ".venv").symlink_to(Path(sys.executable).parents[1])
    return place


@pytest.mark.e2e
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_in_their_order(page: str, up: Up, checkout: Path) -> None:
    here = [block.script for block in blocks() if block.page == page and not block.mark]
    script = "\n".join(here).replace("127.0.0.1:8080", f"127.0.0.1:{up.port}")
    env = {
        "EDGELLM_STATE_DIR": str(up.state),
        "HOME": str(checkout.parent),
        "PATH": os.pathsep.join([str(checkout / ".venv" / "bin"), os.environ["PATH"]]),
    }
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=checkout,
        env=environment(env),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


def test_each_block_that_is_not_run_says_why() -> None:
    for block in blocks():
        known = block.mark in ("", *REASONS) or (ROOT / block.mark).is_file()
        assert known, f"{block.page}: {block.mark!r} is no reason; {', '.join(REASONS)}, or the path of a test"
    assert len(RUN) > 4


def test_no_command_hides_in_a_block_without_a_fence() -> None:
    hidden = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        before = ""
        for line in text.splitlines():
            if line.startswith("    ") and not before.strip() and COMMAND.match(line[4:]):
                hidden.append(f"{page.name}: {line.strip()}")
            before = line
    assert hidden == []


def test_each_module_and_script_of_a_block_that_is_not_run_exists() -> None:
    for block in blocks():
        for module in MODULE.findall(block.text):
            assert find_spec(module) is not None, f"{block.page}: {module}"
        for path in re.findall(r"(?<![\w/])(tests/[\w/]+\.(?:py|sh))", block.text):
            assert (ROOT / path).is_file(), f"{block.page}: {path}"


def measured() -> list[str]:
    """The commands of the blocks marked `long` and `bench`, without their comments."""
    lines = [line for block in blocks() if block.mark in ("long", "bench") for line in block.script.splitlines()]
    commands = [part for line in lines for part in line.partition(" #")[0].split("; ") if part.strip()]
    # `[--cold]` may be left out, and N stands for a number.
    words = [shlex.split(command.replace("[", "").replace("]", "")) for command in commands]
    return list(dict.fromkeys(shlex.join("4" if word == "N" else word for word in line) for line in words))


@pytest.fixture(scope="module")
def parsed() -> dict[str, str]:
    """What is wrong with the commands of `measured` that Python runs, from one process for all of them."""
    rows = {command: shlex.split(command) for command in measured()}
    for words in rows.values():
        if words[:2] == ["python", "-m"]:
            del words[1]
        elif words[0] == "python":
            words[1] = words[1].removesuffix(".py").replace("/", ".")
    rows = {command: words for command, words in rows.items() if words[0] in ("edgellm", "python")}
    done = subprocess.run(
        [sys.executable, "-c", PARSE_ONLY, json.dumps(list(rows.values()))],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    return dict(zip(rows, json.loads(done.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("command", measured())
def test_a_command_that_is_not_run_here_has_the_options_that_the_page_gives_it(
    command: str, parsed: dict[str, str]
) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] != "cmake":  # a target of llama.cpp's
        assert parsed[command] == ""
