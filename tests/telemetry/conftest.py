from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.fake_jetson.tree import FakeBoard


@pytest.fixture
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeBoard]:
    """A fake board's tree; `@pytest.mark.parametrize("board", [...], indirect=True)` picks another one."""
    fake = FakeBoard(tmp_path / "board", getattr(request, "param", "agx-orin-64"))
    yield fake
    fake.remove()
