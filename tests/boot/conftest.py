"""Boards with edgellm installed. BOOT_SUITES names the systems (default bookworm); `make boot-test` takes all three.

`vm` among them is no system of its own: a virtual machine of bookworm, emulated, which takes minutes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.boot import image
from tests.boot.board import Board, Disk, sweep
from tests.boot.image import SUITES, Suite
from tests.needs import lacks

NAMES = os.environ.get("BOOT_SUITES", "bookworm").split()
VM = "vm" in NAMES
FULL = [SUITES[name] for name in NAMES if name != "vm" and SUITES[name].python]
STUBBED = [SUITES[name] for name in NAMES if name != "vm" and not SUITES[name].python]
EDGELLM = "/opt/edgellm/bin/edgellm"

NewBoard = Callable[..., Board]


@pytest.fixture(scope="session")
def can_boot() -> None:
    reason = image.why_not()
    if reason is not None:
        lacks(f"no system can be booted here: {reason}")
    sweep()


@pytest.fixture(scope="session")
def built_wheel(can_boot: None) -> Path:
    return image.wheel()


class Product:
    """A suite with edgellm in /opt/edgellm and everything for an offline installation in /opt/offline."""

    def __init__(self, suite: Suite, wheel: Path, model: Path) -> None:
        self.suite = suite
        self._disks: list[Disk] = []
        disk = self.disk([image.rootfs(suite)])
        offline = disk.root / "opt/offline"
        (offline / "models").mkdir(parents=True)
        assert suite.python is not None
        found = image.wheels(suite.python, wheel)
        shutil.move(found, offline / "wheels")
        shutil.copy(model, offline / "models")
        disk.chroot("python3", "-m", "venv", "/opt/edgellm")
        pip = ("/opt/edgellm/bin/pip", "install", "-q", "--no-index", "--find-links", "/opt/offline/wheels")
        disk.chroot(*pip, "edgellm[embedded]")
        self.bare = disk.freeze()
        self.install_output = ""
        self.installed = self._install()

    def _install(self) -> list[Path]:
        """The installer itself, in a running system."""
        disk = self.disk(self.bare)
        with Board(self.suite, disk) as board:
            board.power_on()
            self.install_output = board.run(EDGELLM, "service", "install", "--offline", "/opt/offline", "-p", "cpu")
            status, _ = board.chat()
            assert status == 200
            board.power_off()
        return disk.freeze()

    def disk(self, lowers: Sequence[Path]) -> Disk:
        disk = Disk(lowers)
        self._disks.append(disk)
        return disk

    def drop(self) -> None:
        for disk in reversed(self._disks):
            disk.drop()


@pytest.fixture(scope="session", params=FULL, ids=lambda suite: suite.name)
def product(request: pytest.FixtureRequest, built_wheel: Path, smollm2: Path) -> Iterator[Product]:
    one = Product(request.param, built_wheel, smollm2)
    yield one
    one.drop()


@pytest.fixture
def new_board(product: Product) -> Iterator[NewBoard]:
    """`new_board(*nspawn_options, lowers=…)`: a board of its own, off; it is cut off and dropped afterwards."""
    boards: list[Board] = []

    def make(*options: str, lowers: Sequence[Path] | None = None) -> Board:
        board = Board(product.suite, product.disk(lowers or product.installed), options)
        boards.append(board)
        return board

    yield make
    for board in boards:
        board.__exit__(None)
        board.disk.drop()
