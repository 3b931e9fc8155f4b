"""What the tests of builds and imports share."""

from __future__ import annotations

import pytest

from edge.builder import install


@pytest.fixture(autouse=True)
def proofs_as_this_user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root an import runs the program as another user, who cannot read this Python: the stand-ins need it.

    `@pytest.mark.real_user` leaves that as it is.
    """
    if request.node.get_closest_marker("real_user") is None:
        monkeypatch.setattr(install, "unprivileged", lambda: None)
