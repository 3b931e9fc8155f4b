"""Errors of engines and builds."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from edge.errors import BadDataError, EdgeError


class EngineBrokenError(BadDataError):
    """A file that is not a llama-server that runs here. Exit code 65."""

    kind = "engine_broken"


class EngineDiedError(EngineBrokenError):
    """An engine that ended by itself. `log` is what it printed; `crashed`: a signal such as SIGSEGV ended it."""

    def __init__(self, message: str, log: str, *, crashed: bool) -> None:
        super().__init__(message)
        self.log = log
        self.crashed = crashed


class BuildError(EdgeError):
    """A build or its proof failed. What was installed before is untouched. Exit code 1."""

    kind = "build_failed"


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Turn ENOSPC and EDQUOT in the block into a BuildError that names the disk (FC-14)."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f": {error.filename}" if error.filename else ""
        raise BuildError(f"the disk is full{where}", "free some space; the engine in use is untouched") from error
