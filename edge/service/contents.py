"""Steps that bring what is served: engine, models, configuration, keys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from edge.errors import ConfigError
from edge.folders import system_folders
from edge.model.file import ModelFile
from edge.service import bring, program
from edge.service.config_file import NAME, Served, base, merged, text
from edge.service.disk import belongs_to, give, put
from edge.service.obstacle import find, future
from edge.service.offline import Bundle
from edge.service.request import ETC, Request
from edge.service.step import Step, nothing
from edge.service.takeover import Takeover, inside, look
from edge.service.unitfile import HOMES, within
from edge.service.wish import Wish


class Contents:
    """What the plan of `up` names, made the service's own."""

    def __init__(self, request: Request, what: Wish, bundle: Bundle | None) -> None:
        self.request = request
        self.wish = what
        self.bundle = bundle
        self.system = system_folders()

    def steps(self) -> list[Step]:
        """Raises what `edgellm plan` would raise."""
        flags: dict[str, object] = {"profile": self.request.profile, "model": list(self.request.models)}
        dirs = [*map(Path, self.wish.model_dirs), *([self.bundle.models] if self.bundle else [])]
        found = look(self.request.source, flags, tuple(dirs), root=self.request.root)
        return [self._engine(found), *self._models(found), self._configuration(found), self._keys()]

    def _engine(self, found: Takeover) -> Step:
        engine, source, target = found.engine, found.data.engines, self.system.engines
        if engine.kind == "embedded":
            check = partial(program.must_have_embedded, self.wish.python)
            if program.is_running(self.wish.python):
                check()
            return Step(
                f"use the embedded engine {engine.version} (CPU)", check, done=program.is_running(self.wish.python)
            )
        if inside(engine.path, source):
            copy = partial(bring.engine_tree, engine.id, source, target)
            done = bring.engine_is_there(engine.id, source, target)
            return Step(f"copy the engine {engine.id} to {target}, verified", copy, done=done)
        bring.check_engine_path(engine)
        return Step(f"use the engine {engine.path} where it lies", nothing, done=True)

    def _models(self, found: Takeover) -> Iterator[Step]:
        owners = frozenset({0, self.request.caller_uid})
        for file in {file.path: file for files in found.models.values() for file in files}.values():
            if self._stays(file):
                self._must_reach(file)
                yield Step(f"use {file.path} where it lies", nothing, done=True)
                continue
            take = partial(bring.model, file, self.system.models, owners)
            what = f"take {file.name} {file.quant} into {self.system.models} (hard link or copy, verified)"
            yield Step(what, take, done=bring.model_there(file, self.system.models))

    def _stays(self, file: ModelFile) -> bool:
        return any(inside(file.path, Path(folder)) for folder in self.wish.model_dirs)

    def _must_reach(self, file: ModelFile) -> None:
        """Raises ConfigError naming the folder that would stop the service's user (FC-79)."""
        who = future(self.wish.run_as, self.wish.groups)
        for path in map(Path, file.shards):
            obstacle = find(path, who)
            # What lies in a home is bound into the service's view by root: the folders above it do not count.
            bound = [Path(folder) for folder in self.wish.model_dirs if within(folder, HOMES)]
            if obstacle is not None and not any(obstacle.path in folder.parents for folder in bound):
                raise ConfigError(obstacle.sentence, obstacle.hint)

    def _configuration(self, found: Takeover) -> Step:
        target = self.request.root / ETC / NAME
        before, made_from = base(self.request.configurations)
        served = [self._served(model_id, files[0], before) for model_id, files in found.models.items()]
        after = merged(
            before, served, profile=self.request.profile, listen=self.request.listen, dirs=self.wish.model_dirs
        )

        def write() -> None:
            if target.exists():
                shutil.copy2(target, target.with_name(f"{NAME}.before"))
            put(target, text(after, made_from if made_from != target else None))

        return Step(f"write {target}", write, done=made_from == target and after == before)

    def _served(self, model_id: str, file: ModelFile, before: dict[str, Any]) -> Served:
        """A name stays as it was written; a path becomes what the service's own store calls the file."""
        if self._stays(file):
            return Served(model_id, file.path)
        for entry in before.get("model", []):
            if entry.get("id") == model_id and "/" not in str(entry.get("ref", "/")):
                return Served(model_id, str(entry["ref"]))
        return Served(model_id, f"{file.name}:{file.quant}")

    def _keys(self) -> Step:
        """A file of the service's own user, not a credential: a revoked key stops working at the next request."""
        keys, user = self.request.root / ETC / "keys.toml", self.request.run_as

        def make() -> None:
            if not keys.exists():
                offered = self.bundle.keys if self.bundle else None
                put(keys, offered.read_text(encoding="utf-8") if offered else "schema = 1\n", 0o600)
            give(keys, user)

        return Step(f"give {keys} (0600, hashes only) to {user}", make, done=belongs_to(keys, user))
