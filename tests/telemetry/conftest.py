import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fake_jetson.client import jtop_python
from tests.fakes.fake_jetson.service import JtopService, only_one, why_not
from tests.fakes.fake_jetson.tree import FakeBoard


@pytest.fixture
def board(request: pytest.FixtureRequest) -> Iterator[FakeBoard]:
    """A fake board's tree; `@pytest.mark.parametrize("board", [...], indirect=True)` picks another one."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # hundreds of small files
    with tempfile.TemporaryDirectory(prefix="fake-jetson-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield FakeBoard(Path(folder), getattr(request, "param", "agx-orin-64"))


@pytest.fixture(scope="session")
def jtop_lock() -> Iterator[None]:
    reason = why_not()
    if reason is None:
        with only_one():
            yield
    elif os.environ.get("CI"):
        pytest.fail(reason)
    else:
        pytest.skip(reason)


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
