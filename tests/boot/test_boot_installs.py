"""The ways onto a board, as docs/jetson.md has them: a checkout and `make install`, a bundle without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.boot import image
from tests.boot.board import CHAT, ROOT_PATH, Board, Disk
from tests.boot.conftest import FULL
from tests.boot.image import Suite
from tests.docs.test_docs_blocks import blocks
from tests.serving import DEMO, ROOT, environment

pytestmark = pytest.mark.full

CHECKOUT = ("Makefile", "README.md", "LICENSE", "pyproject.toml", "edge", "build", "profiles", "systemd")
HOME = "/home/ann"
USER_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"  # ENV_PATH of Debian's /etc/login.defs
# As Debian's /etc/sudoers has it, and an image of a board for its first user.
SUDOERS = f"""Defaults env_reset
Defaults secure_path="{ROOT_PATH}"
root ALL=(ALL:ALL) ALL
ann ALL=(ALL) NOPASSWD: ALL
"""
# A network that is not there answers at once; a name that is looked up would be waited for.
NO_INDEX = "PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/wheels PIP_DISABLE_PIP_VERSION_CHECK=1"


@pytest.fixture(params=FULL, ids=lambda suite: suite.name)
def suite(request: pytest.FixtureRequest, can_boot: None) -> Suite:
    found: Suite = request.param
    return found


@pytest.fixture
def board(suite: Suite) -> Iterator[Board]:
    """A system without edgellm and without a network, off; `ann` may use sudo, `bob` may not."""
    disk = Disk([image.rootfs(suite)])
    for user in ("ann", "bob"):
        disk.chroot("useradd", "--create-home", "--shell", "/bin/bash", user)
    disk.write("/etc/sudoers", SUDOERS, 0o440)
    with Board(suite, disk) as one:
        yield one
    disk.drop()


def login(board: Board, user: str, script: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a script as a user who has just logged in."""
    su = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "env", "-i", f"HOME=/home/{user}"]
    su += [f"USER={user}", f"LOGNAME={user}", f"PATH={USER_PATH}", "bash", "-euo", "pipefail", "-c"]
    return board.execute(*su, f"cd; {script}", timeout=timeout)


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def serves_after_power_on(board: Board, key: str = "") -> None:
    """The service is enabled, and answers after the next power-on with nothing but its own units."""
    chat = [
        "curl",
        "-sS",
        "http://127.0.0.1:8080/v1/chat/completions",
        "-H",
        f"Authorization: Bearer {key}",
        "-d",
        CHAT,
    ]
    assert '"choices"' in board.run(*chat)
    board.power_off()
    board.power_on()
    assert '"choices"' in board.run(*chat)
    assert board.show("NRestarts") == "0"


# Lines of docs/jetson.md that need a network or a board; all others are run, in their order.
SHORTER = {'"Hello"}]}': '"Hello"}], "max_tokens": 8}', "edgellm chat": "edgellm chat --max-tokens 8"}
NOT_HERE = ("sudo apt-get", "curl -LsSf https://", "sudo uv ", "edgellm board", "--power-mode")


def page() -> list[str]:
    """The commands of docs/jetson.md, for the profile and the model that are here."""
    found = [block.script.replace("\\\n", " ") for block in blocks() if block.page == "docs/jetson.md"]
    text = "\n".join(found).replace("-p orin", f"-p cpu -m {DEMO}")
    for usual, shorter in SHORTER.items():
        text = text.replace(usual, shorter)
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if not any(w in line for w in NOT_HERE)]


def put_checkout(folder: Path) -> None:
    """The files of the project that an installation needs, as a copy of a checkout has them."""
    for name in CHECKOUT:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def put_wheels(board: Board, wheels: Path) -> None:
    shutil.move(wheels, board.disk.root / "opt/wheels")
    (board.disk.root / "opt/wheels").chmod(0o755)  # each user may read them


def put_model(board: Board, model: Path) -> None:
    """Into the store of `ann`."""
    folder = board.disk.root / HOME.lstrip("/") / ".local/share/edgellm/models"
    folder.mkdir(parents=True)
    shutil.copy2(model, folder)
    board.disk.chroot("chown", "-R", "ann:", HOME)


def test_a_reader_of_the_jetson_page_is_served_at_its_end(
    board: Board, suite: Suite, built_wheel: Path, smollm2: Path
) -> None:
    """`make install` into its own places, by a user with sudo: its PATH has no folder of a user."""
    assert suite.python is not None
    put_model(board, smollm2)
    put_checkout(board.disk.root / "media/ann/STICK/edgellm")
    put_wheels(board, image.wheels(suite.python, built_wheel))
    board.power_on()
    assert board.run("find", "/usr/lib", "-name", "EXTERNALLY-MANAGED"), "pip of the system refuses to install here"

    lines, key = page(), ""
    assert lines[1] == "make install" and "Bearer KEY" in lines[-1]
    for line in lines:
        print(f"$ {line}")
        if line == "make install":
            text = said(login(board, "ann", f"cd edgellm && {NO_INDEX} {line}"))
            assert "every user runs it as /usr/local/bin/edgellm" in text and "externally-managed" not in text
            board.run("rm", "-rf", f"{HOME}/edgellm")  # the installation needs neither checkout nor its environment
            for command in ("edgellm --version", "sudo edgellm --version"):
                assert said(login(board, "ann", command)).startswith("edgellm ")
        elif line.startswith("edgellm up"):
            said(login(board, "ann", f"nohup {line} >up.log 2>&1 & edgellm wait --timeout 120"))
        elif line == f"sudo edgellm service install -p cpu -m {DEMO}":
            said(login(board, "ann", "edgellm stop"))
            text = said(login(board, "ann", f"{line} --yes"))
            assert "`sudo edgellm wait` returns when the model is ready" in text
        else:
            done = login(board, "ann", f"{line} --once" if line == "edgellm top" else line.replace("KEY", key))
            if line == "sudo edgellm key add laptop":
                key = done.stdout.split()[-1]
            findings = line == "edgellm doctor" and done.returncode == 1
            assert done.returncode == 0 or findings, f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            print(done.stdout[-500:])
    serves_after_power_on(board, key)
    assert board.chat()[0] == 401
    assert "0.0.0.0:8080" in board.run("ss", "-ltn")
    assert board.execute("grep", "-rl", HOME, "/etc/systemd/system").stdout == ""


def test_the_service_is_installed_under_a_real_sudo_by_its_full_path(
    board: Board, suite: Suite, built_wheel: Path, smollm2: Path
) -> None:
    """From an environment below /home that is on no PATH of sudo's."""
    assert suite.python is not None
    put_wheels(board, image.wheels(suite.python, built_wheel))
    put_model(board, smollm2)
    board.power_on()
    said(login(board, "ann", f"python3 -m venv venv && {NO_INDEX} venv/bin/pip install -q 'edgellm[embedded]'"))
    said(login(board, "ann", "chmod o+rx ."))
    refused = login(board, "bob", f"{HOME}/venv/bin/edgellm service install -p cpu -m {DEMO} --yes")
    assert refused.returncode == 1 and "running it with sudo" in refused.stderr, refused
    assert not (board.disk.root / "etc/systemd/system/edgellm.service").exists()

    assert login(board, "ann", "sudo edgellm --version").returncode == 1, "sudo itself finds no edgellm"
    dry = said(login(board, "ann", f"venv/bin/edgellm service install -p cpu -m {DEMO} --dry-run"))
    assert "running it with sudo" not in dry
    text = said(login(board, "ann", f"PATH=$HOME/venv/bin:$PATH; edgellm service install -p cpu -m {DEMO} --yes"))
    assert "running it with sudo" in text
    serves_after_power_on(board)
    assert "running it with sudo" in said(login(board, "ann", "venv/bin/edgellm service uninstall --yes"))
    assert not (board.disk.root / "etc/systemd/system/edgellm.service").exists()


def test_a_bundle_is_installed_without_a_network_and_serves_at_the_next_boot(
    board: Board, suite: Suite, smollm2: Path, tmp_path: Path
) -> None:
    """`make bundle` with its own recipe, for this machine and the board's Python; carried over, and its install.sh."""
    assert suite.python is not None
    checkout = tmp_path / "edgellm"
    checkout.mkdir()
    for name in CHECKOUT:
        (checkout / name).symlink_to(ROOT / name)
    models = tmp_path / "state/data/models"
    models.mkdir(parents=True)
    shutil.copy2(smollm2, models)
    # The environment of this run is whole: `setup` would install the checkout into it again.
    make = ["make", "-o", "setup", "bundle", f"VENV={sys.prefix}", f"MACHINE={os.uname().machine}"]
    own = environment({"EDGELLM_STATE_DIR": str(tmp_path / "state"), "WHEELS_ONLY": "", "MAKEFLAGS": ""})
    done = subprocess.run(
        [*make, f"PYTHONS={suite.python}"], cwd=checkout, env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(checkout / "dist/bundle", board.disk.root / "media/usb")
    board.power_on()
    assert board.execute("ip", "route").stdout == "", "no network"
    text = board.run("sh", "/media/usb/install.sh", "-p", "cpu", timeout=600)
    assert "edgellm wait" in text
    shutil.rmtree(board.disk.root / "media/usb")  # the stick is taken out
    serves_after_power_on(board)
    assert board.run("/usr/local/bin/edgellm", "--version").startswith("edgellm ")
