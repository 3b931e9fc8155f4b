"""A folder with everything for a board without a network.

DIR/wheels/*.whl        edgellm and its dependencies, for this Python and machine
DIR/*.tar[.gz]          an engine, from `edgellm engine export`
DIR/models/…/*.gguf     models
DIR/edgellm.toml, keys.toml    configuration, both optional
"""

from __future__ import annotations

from pathlib import Path

from edge.engine.archive import import_engine
from edge.errors import UnavailableError


class Bundle:
    """The contents of the folder; None for what it lacks."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UnavailableError(f"{folder} is not a folder", "see `edgellm service install --help`")
        self.folder = folder
        self.models = folder / "models"
        self.config = folder / "edgellm.toml"
        self.wheels = folder / "wheels" if any(folder.glob("wheels/*.whl")) else None
        self.keys = folder / "keys.toml" if (folder / "keys.toml").is_file() else None
        self.engine = self._one_engine()
        if not (self.wheels or self.engine or self.models.is_dir()):
            raise UnavailableError(f"{folder} holds no wheels, engine or models", "see systemd/README.md, Offline")

    def import_engine(self, engines: Path) -> None:
        """Import the engine of the folder, verified."""
        assert self.engine is not None
        import_engine(engines, self.engine)

    def _one_engine(self) -> Path | None:
        found = sorted(path for pattern in ("*.tar", "*.tar.gz", "*.tgz") for path in self.folder.glob(pattern))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise UnavailableError(f"{self.folder} holds several engines: {names}", "keep one of them")
        return found[0] if found else None
