"""The steps that install what is served: engine, models, configuration, keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from edge.errors import ConfigError
from edge.folders import system_folders
from edge.model.file import ModelFile
from edge.service import program
from edge.service.bring import check_engine_path, has_engine, has_model, install_engine, install_model
from edge.service.config_file import NAME, Served, config_text, merge, read_base
from edge.service.disk import belongs_to, give, write_file
from edge.service.obstacle import find, future_user
from edge.service.offline import Bundle
from edge.service.request import ETC, Request
from edge.service.step import Step, nothing
from edge.service.takeover import Takeover, inside, plan_takeover
from edge.service.unitfile import HOMES, within
from edge.service.wish import UnitSettings


class Contents:
    """Copies what the plan of `up` names into the service's folders."""

    def __init__(self, request: Request, settings: UnitSettings, bundle: Bundle | None) -> None:
        self.request = request
        self.settings = settings
        self.bundle = bundle
        self.system = system_folders()

    def steps(self) -> list[Step]:
        """Plan as `up` would and return the steps. Raises what `edgellm plan` raises."""
        flags: dict[str, object] = {"profile": self.request.profile, "model": list(self.request.models)}
        dirs = [*map(Path, self.settings.model_dirs), *([self.bundle.models] if self.bundle else [])]
        found = plan_takeover(self.request.source, flags, tuple(dirs), root=self.request.root)
        return [self._engine(found), *self._models(found), self._configuration(found), self._keys()]

    def _engine(self, found: Takeover) -> Step:
        engine, source, target = found.engine, found.data.engines, self.system.engines
        if engine.kind == "embedded":
            check = partial(program.must_have_embedded, self.settings.python)
            if program.is_running(self.settings.python):
                check()
            return Step(
                f"use the embedded engine {engine.version} (CPU)", check, done=program.is_running(self.settings.python)
            )
        if inside(engine.path, source):
            copy = partial(install_engine, engine.id, source, target)
            done = has_engine(engine.id, source, target)
            return Step(f"copy the engine {engine.id} to {target}, verified", copy, done=done)
        check_engine_path(engine)
        return Step(f"use the engine {engine.path} in place", nothing, done=True)

    def _models(self, found: Takeover) -> Iterator[Step]:
        owners = frozenset({0, self.request.caller_uid})
        for file in {file.path: file for files in found.models.values() for file in files}.values():
            if self._stays(file):
                self._must_reach(file)
                yield Step(f"use {file.path} in place", nothing, done=True)
                continue
            take = partial(install_model, file, self.system.models, owners)
            what = f"install {file.name} {file.quant} in {self.system.models} (hard link or copy, verified)"
            yield Step(what, take, done=has_model(file, self.system.models))

    def _stays(self, file: ModelFile) -> bool:
        return any(inside(file.path, Path(folder)) for folder in self.settings.model_dirs)

    def _must_reach(self, file: ModelFile) -> None:
        """Raise ConfigError with the folder that the service's user may not enter (FC-79)."""
        user = future_user(self.settings.run_as, self.settings.groups)
        for path in map(Path, file.shards):
            problem = find(path, user)
            # Root binds model folders below /home into the unit's view: folders above them do not count.
            bound = [Path(folder) for folder in self.settings.model_dirs if within(folder, HOMES)]
            if problem is not None and not any(problem.path in folder.parents for folder in bound):
                raise ConfigError(problem.sentence, problem.hint)

    def _configuration(self, found: Takeover) -> Step:
        target = self.request.root / ETC / NAME
        before, made_from = read_base(self.request.configurations)
        served = [self._served(model_id, files[0], before) for model_id, files in found.models.items()]
        after = merge(
            before, served, profile=self.request.profile, listen=self.request.listen, dirs=self.settings.model_dirs
        )

        def write() -> None:
            if target.exists():
                shutil.copy2(target, target.with_name(f"{NAME}.before"))
            write_file(target, config_text(after, made_from if made_from != target else None))

        return Step(f"write {target}", write, done=made_from == target and after == before)

    def _served(self, model_id: str, file: ModelFile, before: dict[str, Any]) -> Served:
        """Keep a configured name; replace a path by the file's name in the service's store."""
        if self._stays(file):
            return Served(model_id, file.path)
        for entry in before.get("model", []):
            if entry.get("id") == model_id and "/" not in str(entry.get("ref", "/")):
                return Served(model_id, str(entry["ref"]))
        return Served(model_id, f"{file.name}:{file.quant}")

    def _keys(self) -> Step:
        """Give the keys file to the service's user: in a credential, a copy, revoked keys would still work."""
        keys, user = self.request.root / ETC / "keys.toml", self.request.run_as

        def make() -> None:
            if not keys.exists():
                offered = self.bundle.keys if self.bundle else None
                write_file(keys, offered.read_text(encoding="utf-8") if offered else "schema = 1\n", 0o600)
            give(keys, user)

        return Step(f"give {keys} (0600, hashes only) to {user}", make, done=belongs_to(keys, user))
