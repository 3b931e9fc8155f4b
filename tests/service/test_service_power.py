"""edgellm-power.service's program inside a fake board: only what is asked, by name, verified, undone."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import ConfigError
from edge.service.power import PowerSettings, read_settings
from edge.service.units import power_text
from edge.telemetry.sysfs import SysfsSource
from tests.fakes.fake_jetson.files import put
from tests.fakes.fake_jetson.service import why_not
from tests.fakes.fake_jetson.tree import HERE, FakeBoard, fake_board
from tests.fakes.nvml.library import build

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def board() -> Iterator[FakeBoard]:
    with fake_board() as fake:
        yield fake


@pytest.fixture
def inside(board: FakeBoard):  # type: ignore[no-untyped-def]
    """Runs the program with the board's tree laid over this machine's."""
    reason = why_not()
    if reason is not None and "jtop service" not in reason:
        pytest.skip(reason)
    state = board.root / "run"

    def run(verb: str, settings: str = "") -> subprocess.CompletedProcess[str]:
        if settings:
            put(board.root / "etc/edgellm/power.toml", settings)
        code = f"""
import sys; sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from edge.service import power
sys.exit(power.main([{verb!r}], Path({str(state)!r}), verify_s=0.3))
"""
        command = ["unshare", "--mount", "--propagation", "private", "--", "/bin/sh", str(HERE / "enter.sh")]
        command += [str(board.root), sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True)

    return run


def mode(board: FakeBoard) -> str:
    return SysfsSource(board.root).read(0.0).power_mode.name


def test_fc43_the_mode_is_set_by_name_and_put_back(inside, board: FakeBoard) -> None:  # type: ignore[no-untyped-def]
    """FC-43: with permuted numbers, and a name of free text."""
    names = {0: "MODE_15W", 1: "GPU_FREQ_100", 2: "MODE_30W", 3: "MAXN"}
    put(board.root / "etc/nvpmodel.conf", "\n".join(f"< POWER_MODEL ID={n} NAME={name} >" for n, name in names.items()))
    done = inside("apply", 'schema = 1\nmode = "MAXN"\nrestore = true\n')
    assert (done.returncode, done.stdout) == (0, "power mode MAXN (was MODE_30W)\n"), done.stderr
    assert mode(board) == "MAXN"
    assert inside("apply").stdout == "nothing to change\n"


def test_clocks_are_locked_and_restored(inside, board: FakeBoard) -> None:  # type: ignore[no-untyped-def]
    settings = 'schema = 1\nmode = "MODE_50W"\njetson_clocks = true\nrestore = true\n'
    assert inside("apply", settings).stdout == "power mode MODE_50W (was MODE_30W)\nclocks locked\n"
    assert SysfsSource(board.root).read(0.0).jetson_clocks is True
    assert inside("apply").stdout == "nothing to change\n"  # and what was before is still known
    assert inside("restore").stdout == "clocks restored\npower mode MODE_30W restored\n"
    sample = SysfsSource(board.root).read(0.0)
    assert (sample.jetson_clocks, sample.power_mode.name) == (False, "MODE_30W")
    assert inside("restore").stdout == "nothing to change\n"


def test_without_restore_a_stop_leaves_everything(inside, board: FakeBoard) -> None:  # type: ignore[no-untyped-def]
    inside("apply", 'schema = 1\nmode = "MAXN"\n')
    assert inside("restore").stdout == "nothing to change\n"
    assert mode(board) == "MAXN"


def test_fc43_an_unknown_name_is_refused_with_the_boards_own(inside, board: FakeBoard) -> None:  # type: ignore[no-untyped-def]
    """FC-43: mode 0 is not "the fastest" everywhere, so numbers and guesses are not taken."""
    done = inside("apply", 'schema = 1\nmode = "MAXN_SUPER"\n')
    assert done.returncode == 78
    assert "its modes: MAXN, MODE_15W, MODE_30W, MODE_50W" in done.stderr
    assert mode(board) == "MODE_30W"


def test_a_refusal_in_silence_is_noticed(inside, board: FakeBoard) -> None:  # type: ignore[no-untyped-def]
    put(board.root / "nvpmodel.refuses", "1")
    done = inside("apply", 'schema = 1\nmode = "MAXN"\n')
    assert done.returncode == 75
    assert "nvpmodel did not set MAXN" in done.stderr


class Gpus:
    """The program on a machine with two GPUs, over a library that keeps their persistence mode in files."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "nvml"
        self._folder = build(folder)
        gpu = "H200 400000 60 0 0 150000000000 1755 0"
        self.state.write_text(f"GPU-aaaa {gpu}\nGPU-bbbb {gpu}\n")

    def mark(self, what: str, uuid: str) -> Path:
        return self.state.with_name(f"{self.state.name}.{what}.{uuid}")

    @property
    def on(self) -> list[str]:
        return [uuid for uuid in ("GPU-aaaa", "GPU-bbbb") if self.mark("on", uuid).exists()]

    def run(self, verb: str, *, restore: bool = True) -> subprocess.CompletedProcess[str]:
        settings = self._folder / "power.toml"
        settings.write_text(f"schema = 1\npersistence = true\nrestore = {str(restore).lower()}\n")
        code = f"""
import sys; from pathlib import Path; from edge.service import power
power.SETTINGS = Path({str(settings)!r})
sys.exit(power.main([{verb!r}], Path({str(self._folder / "before")!r})))
"""
        env = {**os.environ, "LD_LIBRARY_PATH": str(self._folder), "FAKE_NVML": str(self.state)}
        env["PYTHONPATH"] = str(REPOSITORY)
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.fixture
def gpus(tmp_path: Path) -> Gpus:
    return Gpus(tmp_path)


def test_persistence_mode_is_set_and_only_what_was_changed_is_put_back(gpus: Gpus) -> None:
    gpus.mark("on", "GPU-aaaa").touch()  # by another program
    done = gpus.run("apply")
    assert (done.returncode, done.stdout) == (0, "persistence mode on for GPU-bbbb\n"), done.stderr
    assert gpus.on == ["GPU-aaaa", "GPU-bbbb"]
    assert gpus.run("apply").stdout == "nothing to change\n"
    assert gpus.run("restore").stdout == "persistence mode off for GPU-bbbb\n"
    assert gpus.on == ["GPU-aaaa"]
    assert gpus.run("restore").stdout == "nothing to change\n"


def test_persistence_mode_stays_without_restore(gpus: Gpus) -> None:
    gpus.run("apply", restore=False)
    assert gpus.run("restore", restore=False).stdout == "nothing to change\n"
    assert gpus.on == ["GPU-aaaa", "GPU-bbbb"]


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [("deaf", 75, "GPU-bbbb did not change its persistence mode"), ("denied", 69, "NVML: ")],
)
def test_persistence_mode_that_is_not_taken_is_noticed(gpus: Gpus, what: str, code: int, said: str) -> None:
    """The GPU that changed is put back even so."""
    gpus.mark(what, "GPU-bbbb").touch()
    done = gpus.run("apply")
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert gpus.on == ["GPU-aaaa"]
    assert gpus.run("restore").stdout == "persistence mode off for GPU-aaaa\n"
    assert gpus.on == []


def test_persistence_mode_that_a_reboot_took_away_is_set_and_put_back_again(gpus: Gpus) -> None:
    """What is remembered grows: at the first start one GPU had it from another program."""
    gpus.mark("on", "GPU-aaaa").touch()
    gpus.run("apply")
    for uuid in gpus.on:
        gpus.mark("on", uuid).unlink()
    assert gpus.run("apply").stdout == "persistence mode on for GPU-aaaa\npersistence mode on for GPU-bbbb\n"
    gpus.run("restore")
    assert gpus.on == []


@pytest.mark.parametrize(
    "text", ["mode = 0", "command = 'x'", "jetson_clocks = 1", "schema = 2", "schema = true", "mode =", None]
)
def test_settings_that_are_not_understood_change_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "power.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        read_settings(path)


def test_settings_are_read(tmp_path: Path) -> None:
    path = tmp_path / "power.toml"
    path.write_text('schema = 1\nmode = "25W"\npersistence = true\n')
    assert read_settings(path) == PowerSettings(mode="25W", persistence=True)


@given(st.text(max_size=20))
@settings(max_examples=50, deadline=None)
def test_any_mode_is_one_value_of_the_file_that_the_installer_writes(mode: str) -> None:
    assert tomllib.loads(power_text(mode)) == {"schema": 1, "mode": mode}


def test_every_key_of_the_installers_comments_is_known(tmp_path: Path) -> None:
    path = tmp_path / "power.toml"
    path.write_text(re.sub(r"^# (?=\w+ =)", "", power_text("MAXN"), flags=re.MULTILINE))
    found = read_settings(path)
    assert (found.restore, found.jetson_clocks, found.persistence) == (True, True, True)
