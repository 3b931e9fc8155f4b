"""The privileged oneshot, run as a program inside a fake board: nothing unasked, by name, verified, put back."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.errors import ConfigError
from edge.service.power import Wish, read_wish
from edge.telemetry.sysfs import SysfsSource
from tests.fakes.fake_jetson.files import put
from tests.fakes.fake_jetson.service import why_not
from tests.fakes.fake_jetson.tree import HERE, FakeBoard, fake_board

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

    def run(verb: str, wish: str = "") -> subprocess.CompletedProcess[str]:
        if wish:
            put(board.root / "etc/edgellm/power.toml", wish)
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
    wish = 'schema = 1\nmode = "MODE_50W"\njetson_clocks = true\nrestore = true\n'
    assert inside("apply", wish).stdout == "power mode MODE_50W (was MODE_30W)\nclocks locked\n"
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
    assert "nvpmodel did not take MAXN" in done.stderr


@pytest.mark.parametrize("text", ["mode = 0", "command = 'x'", "jetson_clocks = 1", "schema = 2", "mode =", None])
def test_a_wish_that_is_not_understood_changes_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "power.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        read_wish(path)


def test_a_wish(tmp_path: Path) -> None:
    path = tmp_path / "power.toml"
    path.write_text('schema = 1\nmode = "25W"\npersistence = true\n')
    assert read_wish(path) == Wish(mode="25W", persistence=True)
