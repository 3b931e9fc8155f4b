from collections.abc import Iterator

import pytest

from tests.fakes.fake_jetson.client import jtop_python
from tests.fakes.fake_jetson.service import JtopService, only_one, why_not
from tests.fakes.fake_jetson.tree import FakeBoard, fake_board
from tests.needs import lacks


@pytest.fixture
def board(request: pytest.FixtureRequest) -> Iterator[FakeBoard]:
    """A fake board's tree; `@pytest.mark.parametrize("board", [...], indirect=True)` picks another one."""
    with fake_board(getattr(request, "param", "agx-orin-64")) as fake:
        yield fake


@pytest.fixture
def jtop_lock() -> Iterator[None]:
    with only_one():  # another run on this machine is waited for, not taken for a board's own service
        reason = why_not()
        if reason is not None:
            lacks(reason)
        yield


@pytest.fixture
def jtop_version() -> str:
    """Overridden by parametrization."""
    return "7.2.2"


@pytest.fixture
def service(board: FakeBoard, jtop_version: str, jtop_lock: None) -> Iterator[JtopService]:
    """The real jtop service on the fake board, running."""
    jtop = JtopService(board, jtop_python(jtop_version))
    try:
        yield jtop.start()
    finally:
        jtop.thaw()
        jtop.stop()
