"""Find the engine and the models of a new service: those that the plan of `up` names, in the caller's folders."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge.config import load
from edge.config.values import StoreConfig
from edge.engine.engine import Engine
from edge.engine.installed import read_selection
from edge.errors import UnavailableError
from edge.linux.tree import parse_count
from edge.models.open import ModelFile
from edge.paths import ROOT_CACHE, Folders, folders, system_folders, user_folders
from edge.plan.prepare import HostView, prepare


class Takeover(Struct, frozen=True):
    """What to install. `models` by public id: the preferred file, then those of later steps of the ladder."""

    engine: Engine
    models: dict[str, tuple[ModelFile, ...]]
    data: Folders  # the source of engine and models


def source_folders(env: Mapping[str, str], state_dir: Path | None = None) -> Folders:
    """Return --state-dir, else the folders of the user that called sudo, else the system's own for root.

    A dry run needs no sudo: then they are those of the running user.
    """
    if state_dir is not None:
        return folders(env, state_dir)
    if os.geteuid() != 0:
        return user_folders(env)
    caller = parse_count(env.get("SUDO_UID", ""))
    if caller:
        try:
            return user_folders({"HOME": pwd.getpwuid(caller).pw_dir})
        except (KeyError, OverflowError):
            pass
    return system_folders()


def plan_takeover(
    source: Folders, flags: Mapping[str, object], extra_dirs: tuple[Path, ...], *, root: Path = Path("/")
) -> Takeover:
    """Plan as `up` would. Raises what `prepare` raises."""
    system = system_folders()
    configured = system if (system.config / "edgellm.toml").exists() else source
    config = load(source._replace(config=configured.config), flags, {})
    # A user who has built nothing is served by an engine that is installed for all.
    data = source if read_selection(source.engines).current is not None else source._replace(data=system.data)
    dirs = (*config.store.dirs, *map(str, extra_dirs), str(source.models), str(system.models))
    config = replace(config, store=StoreConfig(tuple(dict.fromkeys(dirs))))
    # What is looked up about engines is kept in a cache of this user: root does not write to the caller's.
    cache = source.cache if os.geteuid() else ROOT_CACHE
    prepared = prepare(config, data._replace(cache=cache), HostView(root, at_boot=True))
    models = {}
    for model_id, model in prepared.plan.models.items():
        if model.other is not None:
            continue  # the files of another engine are its own
        files = [model.model, *(rung.model for rung in model.ladder.plans if rung.model)]
        models[model_id] = tuple({file.path: file for file in files}.values())
    return Takeover(prepared.plan.engine, models, data)


def inside(path: str, folder: Path) -> bool:
    """Return whether a path, or its link target, lies in the folder."""
    return folder in Path(os.path.realpath(path)).parents or folder in Path(path).parents


# A folder with everything for a board without a network.


class OfflineBundle:
    """The contents of the folder; None for what it lacks."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UnavailableError(f"{folder} is not a folder", "see `edgellm service install --help`")
        self.folder = folder
        self.models = folder / "models"
        self.wheels = folder / "wheels" if any(folder.glob("wheels/*.whl")) else None
        self.keys = folder / "keys.toml" if (folder / "keys.toml").exists() else None
        self.engine = self._one_engine()
        if not (self.wheels or self.engine or self.models.is_dir()):
            raise UnavailableError(f"{folder} holds no wheels, engine or models", "see systemd/README.md, Offline")

    def _one_engine(self) -> Path | None:
        found = sorted(path for pattern in ("*.tar", "*.tar.gz", "*.tgz") for path in self.folder.glob(pattern))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise UnavailableError(f"{self.folder} holds several engines: {names}", "keep one of them")
        return found[0] if found else None
