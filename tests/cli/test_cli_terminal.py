"""Terminals as people have them: 80 columns, names that hold control characters, completion of values."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from edge.cli import main
from edge.cli.complete import completing, fetched_models, known_boards, known_models, known_profiles, known_settings
from edge.cli.key import known_keys
from edge.cli.output import SafeConsole, draw, error_console, progress
from edge.cli.service import show_doing
from edge.cli.top import Past, plain, screen
from edge.models.progress import TransferProgress
from edge.service.contents import InstallStep
from edge.units import printable
from tests.fakes.gguf_writer import Gguf
from tests.serving import ROOT

LONG = "A-Very-Long-Name-Of-A-Model-Instruct-2507"
HOSTILE = "Evil\x1b]52;c;QUJD\x07\u202e"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("EDGELLM_STATE_DIR", str(tmp_path))
    models = tmp_path / "data" / "models"
    Gguf("llama").model().save(models / f"{LONG}-Q5_K_M.gguf")
    Gguf("llama").model().save(models / f"{HOSTILE}-Q5_K_M.gguf")
    yield tmp_path


@pytest.fixture
def on_terminal(state: Path) -> Callable[..., str]:
    """Run a command on a terminal of 80 columns and return what it shows, colours removed."""

    def run(*arguments: str) -> str:
        ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {**os.environ, "EDGELLM_STATE_DIR": str(state), "TERM": "dumb", "NO_COLOR": "1"}
        env.pop("COLUMNS", None)
        command = [sys.executable, "-m", "edge", *arguments]
        done = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT)
        os.close(theirs)
        data = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not chunk:
                break
            data += chunk
        os.close(ours)
        assert done.wait(30) == 0, data
        return data.decode()

    return run


@pytest.mark.parametrize(
    ("command", "whole"),
    [
        (("model", "list"), f"{LONG}:Q5_K_M"),
        (("model", "list", "--catalogue"), "SmolLM2-135M-Instruct"),
        (("engine", "list"), "embedded-xllamacpp"),
        (("plan", "-p", "cpu", "-m", LONG), LONG),
        (("config", "show"), "restart.device_attempts = 3"),
        (("profile", "list"), "multi-gpu"),
    ],
)
def test_eighty_columns_are_enough(on_terminal: Callable[..., str], command: tuple[str, ...], whole: str) -> None:
    shown = on_terminal(*command)
    assert whole in shown
    assert max(len(line.rstrip("\r\n")) for line in shown.splitlines()) <= 80, shown


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (("model", "list"), ["model", "size", "context"]),
        (("model", "list", "--catalogue"), ["chat", "quant and GiB"]),
    ],
)
def test_columns_go_by_priority_where_the_terminal_is_narrow(
    on_terminal: Callable[..., str], command: tuple[str, ...], kept: list[str]
) -> None:
    head = re.split(r"\s{2,}", on_terminal(*command).splitlines()[0].strip())
    assert head == kept


def test_the_least_important_column_goes_first() -> None:
    def head(width: int) -> list[str]:
        out = io.StringIO()
        row = ("a-name-of-20-letters", "4.4 GiB", "0.5.0", "cpu")
        draw(SafeConsole(file=out, width=width), ("engine", "size", "version", "for"), [row], drop=("version", "size"))
        assert "a-name-of-20-letters" in out.getvalue().replace("\n", "")
        return out.getvalue().splitlines()[0].split()

    # The widths at which a column has just no room any more.
    wide = len("a-name-of-20-letters  4.4 GiB  version  for")
    assert [head(width) for width in (wide, wide - 1, wide - 1 - len("version ") - 1)] == [
        ["engine", "size", "version", "for"],
        ["engine", "size", "for"],
        ["engine", "for"],
    ]


def test_a_pipe_gets_whole_lines(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-p", "cpu", "-m", LONG]) == 0
    assert any(len(line) > 80 and "[profile cpu" in line for line in capsys.readouterr().out.splitlines())


def test_names_of_files_are_shown_and_not_obeyed(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["model", "list"], ["model", "check"], ["plan", "-p", "cpu", "-m", f"{HOSTILE}:Q5_K_M"]):
        assert main(command) in (0, 65, 69)  # such a name is a reason not to serve the file
        printed = "".join(capsys.readouterr())
        assert "\x1b]52" not in printed and "\x07" not in printed and "\u202e" not in printed
        assert r"Evil\x1b]52;c;QUJD\x07\u202e" in printed or "Evil" not in printed
    assert main(["model", "show", "\x1b[2Jnone"]) == 69
    assert "\x1b[2J" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[HOSTILE], ["plan", f"--{HOSTILE}"], ["key", HOSTILE], ["model", "show", "a", HOSTILE]],
    ids=["command", "option", "subcommand", "argument too many"],
)
def test_typers_own_errors_show_what_they_quote(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "edge", *arguments]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env={**os.environ, "FORCE_COLOR": "1"})
    assert done.returncode == 64, done.stderr
    printed = re.sub(r"\x1b\[[0-9;]*m", "", (done.stdout + done.stderr).decode())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", printed), printed


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_no_text_reaches_a_terminal_as_a_control_sequence(text: str) -> None:
    """rich's own colours do; what was printed does not."""
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=True, color_system="truecolor", width=200).print(Text(text, "red"))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


@given(st.text())
def test_any_text_is_one_line_without_control_characters(text: str) -> None:
    shown = printable(text)
    assert all(char == "\t" or char.isprintable() or ord(char) >= 0xA0 for char in shown)
    assert "\n" not in shown and "\x1b" not in shown
    assert printable(text, newlines=True).count("\n") == text.count("\n")


def test_names_are_no_markup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would make a link of [link=https://…], and raise at [/]."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    name = "a[link=https:x]b[blink][/]"
    with progress(quiet=False) as report:
        assert report is not None
        report(TransferProgress("copy", name, 1, 2))
    draw(error_console(), ["model"], [[name]])
    error_console().print(name)
    rails = {"power": {"rail": name, "power_w": 1.0}, "rails": [{"name": "[/]", "power_w": 1.0}], "source": "none"}
    status = {"models": {}, "urls": [], "version": "1", "uptime_s": 1.0}
    assert any(line.strip().startswith("[/]") for line in plain(screen(status, rails, Past(), 80), 80))
    shown = capsys.readouterr().err
    assert shown.count(name) >= 3 and "\x1b]8;" not in shown


class Lost(io.StringIO):
    """A stream that takes nothing."""

    def __init__(self, reason: int) -> None:
        super().__init__()
        self.reason = reason

    def write(self, _: str) -> int:
        raise OSError(self.reason, os.strerror(self.reason))


@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOSPC])
def test_progress_that_cannot_be_shown_ends_no_work(reason: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of an hour that was sent to the background, `disown`, and its terminal closed."""
    monkeypatch.setattr("sys.stderr", Lost(reason))
    for terminal in ("", "1"):
        monkeypatch.setenv("FORCE_COLOR", terminal)
        with progress(quiet=False) as report:
            assert report is not None
            report(TransferProgress("copy", "model.gguf", 1, 2, note="a note"))
        error_console().print("a warning")
    show_doing(InstallStep("start edgellm.service", lambda: None))


def test_a_closed_pipe_ends_a_pull_and_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """`2>&1 | head`: a pull is resumed later, and half a service is none."""
    monkeypatch.setattr("sys.stderr", Lost(errno.EPIPE))
    with pytest.raises(BrokenPipeError):
        error_console().print("a warning")
    show_doing(InstallStep("start edgellm.service", lambda: None))


def test_no_mark_reorders_what_stands_beside_it() -> None:
    """Every character with the property Bidi_Control (Unicode, PropList.txt)."""
    marks = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    assert all(printable(mark) == f"\\u{ord(mark):04x}" for mark in marks)


def test_values_complete(state: Path) -> None:
    assert known_profiles("orin-n") == ["orin-nano", "orin-nx"]
    assert known_settings("offload=") == ["offload=full", "offload=none"]
    assert "orin-nano-8" in known_boards("orin-")
    assert known_models(LONG[:9]) == [f"{LONG}:Q5_K_M"]
    assert {"SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct:Q4_1"} <= set(fetched_models("SmolLM2"))
    assert known_keys("") == []
    assert main(["key", "add", "laptop"]) == 0
    assert known_keys("la") == ["laptop"]
    (state / "config" / "edgellm.toml").write_text("not toml", encoding="utf-8")
    assert known_models("") == []


def test_a_completion_is_one_word_that_a_shell_takes_as_it_stands(state: Path) -> None:
    """zsh evaluates what typer prints: a name with a backslash and $(…) would run on Tab. bash inserts it as it is."""
    words = ["Qwen3-ü:Q4_0", "n_ctx=1", "org/name@main+x,y%z"]
    hostile = [r"a\$(id)", "a$(id)", "a`id`", "a;id", "a b", "a\tb", "a\nb", "a'b", 'a"b', "a|b", "a*", "--help", ""]
    assert completing(lambda: [*words, *hostile], "") == sorted(words)
    row = f"[[key]]\nname = 'laptop\\$(id)'\nsha256 = '{'0' * 64}'\n"
    assert main(["key", "add", "laptop"]) == 0
    file = state / "config" / "keys.toml"
    file.write_text(file.read_text(encoding="utf-8") + row, encoding="utf-8")
    assert known_keys("la") == ["laptop"]


def test_the_shell_gets_the_values(state: Path) -> None:
    env = {**os.environ, "_EDGELLM_COMPLETE": "complete_bash", "COMP_WORDS": "edgellm plan -p thor", "COMP_CWORD": "3"}
    command = [sys.executable, "-c", "import sys; from edge.cli import main; sys.exit(main())"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["thor"], done.stderr


def test_nothing_to_wait_for_is_said(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wait"]) == 69
    assert "no edgellm is running" in capsys.readouterr().err


def _deep(_: object) -> object:
    return json.loads("[" * 200_000)


def _odd(_: object) -> object:
    raise ValueError("two\nlines\x1b[2J" + "x" * 5000)


@pytest.mark.parametrize(("bug", "text"), [(_deep, "RecursionError: "), (_odd, r"ValueError: two\nlines\x1b[2Jxxx")])
def test_a_bug_is_one_sentence_with_its_place(
    bug: object, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EDGELLM_DEBUG", raising=False)
    monkeypatch.setattr("edge.cli.app.run", bug)
    assert main(["status"]) == 70
    first, second, rest = capsys.readouterr().err.split("\n", 2)
    assert first.startswith(f"error: this is a bug in edgellm: {text}") and len(first) < 500
    assert re.search(r" \(edge/cli/__init__\.py:\d+\)$", first)
    assert "report it" in second and "EDGELLM_DEBUG=1" in second and not rest
    monkeypatch.setenv("EDGELLM_DEBUG", "1")
    assert main(["status"]) == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last)") and "traceback above" in shown


def test_a_path_that_cannot_be_written_is_named_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "config" / "edgellm.toml"))

    monkeypatch.setattr("edge.linux.files.write_atomic", denied)
    assert main(["config", "init", "--state-dir", str(tmp_path)]) == 74
    shown = capsys.readouterr().err
    assert f"{tmp_path / 'config' / 'edgellm.toml'}: Permission denied" in shown
    assert f"belongs to {tmp_path.owner()}" in shown and "Errno" not in shown


def test_a_current_folder_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["status", "--state-dir", "relative"]) == 74
    assert "the current folder was removed" in capsys.readouterr().err
