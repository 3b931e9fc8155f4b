"""`--fix` touches our own folders, modes and dead sockets, and nothing else."""

from __future__ import annotations

import fcntl
import json
import socket
import stat
from pathlib import Path

import pytest

from edge.cli import main
from edge.doctor import doctor
from edge.doctor.doctor import _one
from edge.doctor.facts import OwnFile
from edge.doctor.own_files import find_leftovers
from tests.doctor.patients import places
from tests.trees.trees import tree


def test_fix_puts_everything_right_and_a_second_time_does_nothing(short_dir: Path) -> None:
    ours = places(short_dir)
    ours.config.mkdir(parents=True)
    keys = ours.config / "keys.toml"
    keys.write_text("secret")
    keys.chmod(0o644)
    ours.instance_run.mkdir(parents=True)
    ours.run.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(ours.control_socket))
    done = doctor.apply(find_leftovers(ours, False))
    assert len(done) == 7  # data, models, state, cache; keys and run; the socket
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert keys.read_text() == "secret"
    assert stat.S_IMODE(ours.run.stat().st_mode) == 0o755
    assert not (ours.instance_run / "control.sock").exists()
    assert find_leftovers(ours, False) == ()


def test_socket_of_an_edgellm_that_has_just_started_stays(short_dir: Path) -> None:
    ours = places(short_dir)
    ours.instance_run.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(ours.control_socket))
    with ours.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (done,) = doctor.apply((OwnFile("socket", ours.control_socket, 0),))
    assert "has started" in done
    assert ours.control_socket.is_socket()


def test_links_that_another_user_planted_are_not_followed(short_dir: Path) -> None:
    """`sudo edgellm doctor --fix` works in the run folder of the service's user."""
    ours, victim = places(short_dir), short_dir / "victim"
    ours.instance_run.mkdir(parents=True)
    victim.write_text("secret")
    victim.chmod(0o644)
    ours.lock.symlink_to(short_dir / "created")
    keys = ours.run / "keys.toml"
    keys.symlink_to(victim)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(ours.control_socket))
    done = doctor.apply((OwnFile("socket", ours.control_socket, 0), OwnFile("mode", keys, 0o600)))
    assert all(sentence.startswith("could not") for sentence in done)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644
    assert not (short_dir / "created").exists()


def test_what_cannot_be_changed_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ours = places(tmp_path / "file" / "below-a-file")
    done = doctor.apply(find_leftovers(ours, False))
    assert done
    assert all(sentence.startswith("could not") for sentence in done)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_fix_on_the_command_line(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state-dir", str(short_dir / "s"), "--quick", "--listen", "127.0.0.1:0"]
    _, before = _json(capsys, "doctor", *state)
    assert before["fixed"] == []
    assert not (short_dir / "s").exists()  # looking changes nothing
    _, after = _json(capsys, "doctor", *state, "--fix")
    assert len(after["fixed"]) == 6  # type: ignore[arg-type]
    names = [check["name"] for check in after["checks"]]  # type: ignore[attr-defined]
    assert "files.ours" in names


def test_exit_code_is_1_only_when_something_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "doctor", "--root", str(tree("orin-nano-8")))
    assert (code, document["schema"], document["verdict"]) == (0, 1, "warn")
    code, document = _json(capsys, "doctor", "--root", str(tree("nano")))
    assert (code, document["verdict"]) == (1, "bad")
    counts = document["counts"]
    assert isinstance(counts, dict)
    assert sum(counts.values()) == len(document["checks"])  # type: ignore[arg-type]


def test_doctor_for_people_prints_commands_once_and_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", str(tree("orin-nano-8-super"))]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" not in out
    assert "L4T 36.4.7" in out
    assert out.count("sudo sysctl vm.swappiness=10") == 1


def test_board_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "board", "--root", str(tree("orin-nano-8")))
    assert code == 0
    board, memory = document["board"], document["memory"]
    assert isinstance(board, dict)
    assert isinstance(memory, dict)
    assert (board["id"], memory["available_bytes"]) == ("orin-nano-8", {"unified": 6245596 * 1024})
    code, document = _json(capsys, "board", "--board", "thor", "--memory", "100GiB")
    assert document["memory"]["available_bytes"] == {"unified": 100 * 2**30}  # type: ignore[index]
    assert main(["board", "--root", str(tree("rtx-4090"))]) == 0
    assert "RTX 4090" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["board", "--board", "agx-orn"], ["board", "--root", "/nonexistent"], ["board", "--board", "thor", "--root", "/"]],
)
def test_wrong_board_is_a_usage_error_with_a_hint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 64
    assert "hint:" in capsys.readouterr().err


def test_no_socket_behind_a_linked_run_folder_is_removed(tmp_path: Path) -> None:
    (victim := tmp_path / "v").mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(victim / "o.sock"))
    (tmp_path / "main").symlink_to(victim)
    _one(OwnFile("socket", tmp_path / "main/o.sock", 0))
    assert [each.name for each in victim.iterdir()] == ["o.sock"]
