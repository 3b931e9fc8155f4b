"""The engine's own branches of the error tree (errors.py): same exit codes, stable kinds."""

from __future__ import annotations

from edge.errors import BadDataError, EdgeError


class EngineBrokenError(BadDataError):
    """A file that should be a llama-server but does not run, or not as one. Exit code 65."""

    kind = "engine_broken"


class BuildError(EdgeError):
    """A build or its proof failed. What was installed before is untouched. Exit code 1."""

    kind = "build_failed"
