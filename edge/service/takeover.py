"""Which engine and models a service shall have: those that the plan of `up` names, taken from whoever ran it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edge.config import Config, load
from edge.config.values import StoreConfig
from edge.engine.engine import Engine
from edge.engine.installed import read_selection
from edge.folders import Folders, folders, system_folders, user_folders
from edge.model.file import ModelFile
from edge.prepare import HostView, prepare
from edge.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class Takeover:
    """`models` by public id: the file wanted first, then those of later rungs."""

    config: Config
    profile: Profile
    engine: Engine
    models: dict[str, tuple[ModelFile, ...]]
    data: Folders  # where engine and models come from


def whose(env: Mapping[str, str], state_dir: Path | None = None) -> Folders:
    """--state-dir, else the folders of who called sudo, else the system's own."""
    if state_dir is not None:
        return folders(env, state_dir)
    caller = env.get("SUDO_UID", "")
    if caller.isdigit() and int(caller) != 0:
        try:
            return user_folders({"HOME": pwd.getpwuid(int(caller)).pw_dir})
        except KeyError:
            pass
    return system_folders()


def look(
    source: Folders, flags: Mapping[str, object], extra_dirs: tuple[Path, ...], *, root: Path = Path("/")
) -> Takeover:
    """Plans as `up` would, and raises what `prepare` raises."""
    system = system_folders()
    configured = system if (system.config / "edgellm.toml").exists() else source
    config = load(source._replace(config=configured.config), flags, {})
    data = source if read_selection(source.engines).current is not None else source._replace(data=system.data)
    dirs = (*config.store.dirs, *map(str, extra_dirs), str(source.models), str(system.models))
    config = replace(config, store=StoreConfig(tuple(dict.fromkeys(dirs))))
    prepared = prepare(config, data, HostView(root, at_boot=True))
    models = {}
    for model_id, model in prepared.plan.models.items():
        files = [model.model, *(rung.model for rung in model.ladder.plans if rung.model)]
        models[model_id] = tuple({file.path: file for file in files}.values())
    return Takeover(config, prepared.profile, prepared.plan.engine, models, data)


def inside(path: str, folder: Path) -> bool:
    return folder in Path(os.path.realpath(path)).parents or folder in Path(path).parents
