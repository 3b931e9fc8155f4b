from __future__ import annotations

import io
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edge.cli import key, main
from edge.gateway import keys


@pytest.fixture
def state(tmp_path: Path) -> list[str]:
    return ["--state-dir", str(tmp_path)]


def test_commands_in_parallel_lose_no_key_and_bring_none_back(tmp_path: Path, state: list[str]) -> None:
    def run(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "edge", "key", *arguments, *state], stdout=subprocess.DEVNULL)

    assert main(["key", "add", "old", *state]) == 0
    children = [run("revoke", "old"), *(run("add", f"client{number}") for number in range(6))]
    assert [child.wait() for child in children] == [0] * 7
    names = {key.name for key in keys.read(tmp_path / "config" / "keys.toml")}
    assert names == {f"client{number}" for number in range(6)}


def test_a_key_is_shown_once_kept_as_a_hash_and_can_be_revoked(
    tmp_path: Path, state: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "add", "laptop", *state]) == 0
    secret = capsys.readouterr().out.strip()
    path = tmp_path / "config" / "keys.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    found = keys.find(keys.read(path), secret)
    assert found is not None and found.name == "laptop" and not found.admin
    assert main(["key", "add", "owner", "--admin", "--json", *state]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["schema"], made["admin"]) == (1, True)
    assert main(["key", "list", "--json", *state]) == 0
    listed = capsys.readouterr().out
    assert [entry["name"] for entry in json.loads(listed)["keys"]] == ["laptop", "owner"]
    assert secret not in listed and made["key"] not in listed
    assert main(["key", "revoke", "laptop", *state]) == 0
    capsys.readouterr()
    assert main(["key", "list", *state]) == 0
    assert capsys.readouterr().out.split()[0] == "owner"


def test_a_key_from_standard_input_is_never_printed(
    tmp_path: Path, state: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("my-own-long-enough-key-123\n"))
    assert main(["key", "add", "mine", "--stdin", *state]) == 0
    shown = capsys.readouterr()
    assert "my-own" not in shown.out + shown.err
    assert keys.find(keys.read(tmp_path / "config" / "keys.toml"), "my-own-long-enough-key-123") is not None


def test_mistakes_have_their_exit_codes(
    tmp_path: Path, state: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["key", "revoke", "missing", *state]) == 69
    assert main(["key", "add", "laptop", *state]) == 0
    assert main(["key", "add", "laptop", *state]) == 64
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert main(["key", "add", "mine", "--stdin", *state]) == 64
    (tmp_path / "config" / "keys.toml").write_text("broken [")
    assert main(["key", "list", *state]) == 78
    assert "hint:" in capsys.readouterr().err


def test_another_file_can_be_named(tmp_path: Path, state: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.toml"
    assert main(["key", "add", "a", "--file", str(other), *state]) == 0
    assert other.exists() and not (tmp_path / "config").exists()


def test_the_configured_file_is_used(tmp_path: Path, state: list[str]) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "edgellm.toml").write_text(f'schema = 1\n[gateway]\nkeys_file = "{tmp_path}/mine.toml"\n')
    assert main(["key", "add", "a", *state]) == 0
    assert (tmp_path / "mine.toml").exists()


def test_the_path_of_the_key_file_is_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a\x1b[2J\nadded admin to\u202e" / "keys.toml"
    path.parent.mkdir()
    assert main(["key", "add", "laptop", "--file", str(path)]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err and "\u202e" not in shown.err
    assert shown.err.count("\n") == 1 and r"a\x1b[2J\nadded admin to\u202e" in shown.err
    assert [key.name for key in keys.read(path)] == ["laptop"]
    assert main(["key", "revoke", "absent", "--file", str(path)]) == 69
    assert "\x1b" not in capsys.readouterr().err


def test_names_of_keys_are_shown_and_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shown = tmp_path / "keys.toml", []
    monkeypatch.setattr(key.typer, "echo", lambda text="", **_: shown.append(text))  # click drops escapes in a pipe
    names = r'name = "a\u001b]52;c;x\u0007\nb"' + "\n" + r'created = "\u001b[2J"'
    path.write_text(f'[[key]]\n{names}\nsha256 = "{"0" * 64}"\n')
    path.chmod(0o600)
    key.list_keys(file=path)
    assert len(shown) == 1 and shown[0].isprintable()
