"""The steps that install what is served: engine, models, configuration, keys."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.builder import install
from edge.engine.choose import choose
from edge.engine.engine import Engine
from edge.engine.installed import find_same, ids, manifest, read_selection
from edge.errors import (
    BadDataError,
    BadModelError,
    ConfigError,
    EdgeError,
    EngineMissingError,
    ModelMissingError,
    UsageError,
)
from edge.linux.files import has_own_group, naming, open_to_others, writable_by_others
from edge.models import receipt
from edge.models.install import import_model, removable, remove_entry
from edge.models.open import ModelFile
from edge.models.store import Store
from edge.paths import system_folders
from edge.resources import load_toml
from edge.service import program
from edge.service.access import belongs_to, find_problem, future_user, give, write_file
from edge.service.config_file import NAME, Served, config_text, merge, read_base
from edge.service.request import ETC, InstallRequest
from edge.service.takeover import OfflineBundle, Takeover, inside, plan_takeover
from edge.service.units import HOMES, TEMPORARY, UnitSettings, within

# Install engine and models into the service's folders: hard link or copy, verified.


def has_engine(engine_id: str, source: Path, target: Path) -> bool:
    """Return whether the target selects this engine with the same files, none of them damaged since."""
    current = read_selection(target).current
    if source == target:
        return current == engine_id and engine_id in ids(target)
    # One that was replaced, for it was damaged, has another id.
    same = find_same(target, "files", manifest(source, engine_id).get("files"))
    return same is not None and same == current


def install_engine(engine_id: str, source: Path, target: Path) -> None:
    """Copy an engine, check each file and select it. Never a link: its former owner could write to it."""
    document = manifest(source, engine_id)
    # Staged beside the others and renamed when every hash was right: a power cut leaves no half engine.
    with install.locked(target), install.staging(target) as folder:
        for name, listed in document["files"].items():
            _copy(source / engine_id / name, folder, name, str(listed["sha256"]))
        same = find_same(target, "files", document["files"])
        if same is not None:
            install.use(target, same)
            return
        # The same id with other files: both stay, so that a rollback finds what it ran before.
        if engine_id in ids(target):
            commit, recipe = str(document["source"].get("commit") or "unknown"), str(document["recipe"]["name"])
            document = {**document, "id": install.new_id(target, commit, recipe)}
        install.commit(target, folder, document)


def _copy(source: Path, folder: Path, name: str, sha256: str) -> None:
    parts = Path(name).parts
    # The manifest is a file of the engine's former owner: its names must not leave the folder.
    if len(parts) != 2 or parts[0] != "bin" or parts[1] == "..":
        raise BadDataError(f"the engine's manifest lists {name!r}", "build it again")
    digest = hashlib.sha256()
    with naming(folder / name), source.open("rb") as reader, (folder / name).open("wb") as writer:
        while chunk := reader.read(1 << 20):
            digest.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    if digest.hexdigest() != sha256:
        raise BadDataError(f"{source} is not what its manifest says", "build the engine again, or import it again")
    # Not the mode of the source: its owner may have set the bits of setuid(2), or let others write.
    (folder / name).chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def check_engine_path(engine: Engine) -> None:
    """Raise UsageError for an engine path that the service cannot see or that other users can change."""
    path = Path(engine.path)
    hint = "`edgellm engine import`, or copy it below /opt as root"
    if within(str(path), (*HOMES, *TEMPORARY)):
        raise UsageError(f"the service cannot see {path} (ProtectHome, PrivateTmp)", hint)
    writable = writable_by_others(path)
    if writable is not None:
        raise UsageError(f"users other than root can change {writable}, so a service does not run {path}", hint)


def has_model(file: ModelFile, models: Path) -> bool:
    """Return whether the service's store has all files of this model: the same inodes, or the same bytes by hash.

    A hash recorded on arrival counts while nothing has written to its file; otherwise the file is read.
    """
    if inside(file.path, models):
        return True
    try:
        return _same(Store(models).resolve(f"{file.name}:{file.quant}"), file)
    except EdgeError:
        return False


def install_model(file: ModelFile, models: Path, owners: frozenset[int], stores: Sequence[Path] = ()) -> None:
    """Link files of these owners, copy all others. The caller of sudo owns the machine anyway, as root does.

    `stores`: as of `import_model`.
    """

    def link(state: os.stat_result) -> bool:
        # A file that others may write could change after its hash was checked; one they cannot read is no use here.
        shared = open_to_others(state) and (state.st_mode & stat.S_IWOTH or not has_own_group(state))
        plain = stat.S_ISREG(state.st_mode) and state.st_mode & stat.S_IROTH and not shared
        # fs.protected_hardlinks refuses others to non-root; root has to refuse them itself.
        return bool(plain and state.st_uid in owners)

    ref = f"{file.name}:{file.quant}"
    with suppress(ModelMissingError, BadModelError):
        stored = Store(models).resolve(ref)
        if stored.bytes == file.bytes and not _same(stored, file):
            _remove_damaged(Store(models), ref, stored)
    import_model(Path(file.path), models, name=file.name, link=link, stores=stores)


def _remove_damaged(store: Store, ref: str, stored: ModelFile) -> None:
    """Remove a model of the service whose bytes are not those that arrived. Raises BadDataError for another model."""
    folder, names = Path(stored.path).parent, [path.name for path in _files(stored)]
    if receipt.read_of(Path(stored.path)) is None or receipt.is_whole(folder, names):
        hint = f"remove it: {shlex.join(['sudo', 'edgellm', 'model', 'remove', ref])}"
        raise BadDataError(f"the service has another model of the name {ref}, of the same size", hint)
    remove_entry(store, removable(store, ref))


def _files(model: ModelFile) -> list[Path]:
    return [Path(path) for path in (*model.shards, model.mmproj) if path]


def _same(stored: ModelFile, file: ModelFile) -> bool:
    weights = len(stored.shards) == len(file.shards) and all(
        _equal(Path(theirs), Path(ours)) for theirs, ours in zip(stored.shards, file.shards, strict=True)
    )
    if not weights or stored.mmproj is None or file.mmproj is None:
        return weights
    # Another projector (F16, BF16) is no difference, a damaged one is.
    theirs, ours = Path(stored.mmproj), Path(file.mmproj)
    return _equal(theirs, ours) or receipt.is_whole(theirs.parent, [theirs.name])


def _equal(one: Path, other: Path) -> bool:
    try:
        same_size = one.stat().st_size == other.stat().st_size
        return one.samefile(other) or (same_size and receipt.sha256_of(one) == receipt.sha256_of(other))
    except OSError:
        return False


# The steps of an installation.


class InstallStep(Struct, frozen=True):
    """One repeatable step, described by `what` in the imperative. A step with a `note` needs the user's consent."""

    what: str
    apply: Callable[[], object] = lambda: None
    done: bool = False
    note: str = ""


def apply_all(steps: Iterable[InstallStep], report: Callable[[InstallStep], None] = lambda _: None) -> int:
    """Apply the steps that are not done and return their number. After an error the next run continues there."""
    count = 0
    for step in steps:
        if not step.done:
            report(step)
            step.apply()
            count += 1
    return count


class Contents:
    """Copies what the plan of `up` names into the service's folders."""

    def __init__(self, request: InstallRequest, settings: UnitSettings, bundle: OfflineBundle | None) -> None:
        self.request = request
        self.settings = settings
        self.bundle = bundle
        self.system = system_folders()

    def steps(self) -> list[InstallStep]:
        """Plan as `up` would and return the steps. Raises what `edgellm plan` raises."""
        flags: dict[str, object] = {"profile": self.request.profile, "model": list(self.request.models)}
        dirs = [*map(Path, self.settings.model_dirs), *([self.bundle.models] if self.bundle else [])]
        found = plan_takeover(self.request.source, flags, tuple(dirs), root=self.request.root)
        return [
            self._engine(found.engine, found.data.engines),
            *self._models(found),
            self._configuration(found),
            self._keys(),
        ]

    def lending_engine(self) -> InstallStep:
        """Return the step of a board that serves no model. Raises EngineMissingError for an engine without RPC."""
        engine = choose(self.request.source, None, needs_gpu=False)
        if not engine.rpc:
            raise EngineMissingError(
                f"the engine {engine.id} has no RPC, so it lends no memory", "`edgellm build --rpc`"
            )
        return self._engine(engine, self.request.source.engines)

    def _engine(self, engine: Engine, source: Path) -> InstallStep:
        target = self.system.engines
        if engine.kind == "embedded":
            check = partial(program.must_have_embedded, self.settings.python)
            done = program.is_running(self.settings.python)
            if done:
                check()
            return InstallStep(f"use the embedded engine {engine.version} (CPU)", check, done=done)
        if inside(engine.path, source):
            copy = partial(install_engine, engine.id, source, target)
            done = has_engine(engine.id, source, target)
            return InstallStep(f"copy the engine {engine.id} to {target}, verified", copy, done=done)
        check_engine_path(engine)
        return InstallStep(f"use the engine {engine.path} in place", done=True)

    def _models(self, found: Takeover) -> Iterator[InstallStep]:
        owners = frozenset({0, self.request.caller_uid})
        for file in {file.path: file for files in found.models.values() for file in files}.values():
            if self._stays(file):
                self._must_reach(file)
                yield InstallStep(f"use {file.path} in place", done=True)
                continue
            take = partial(install_model, file, self.system.models, owners, (self.request.source.models,))
            how = "hard link or copy, compared with its receipt"
            what = f"install {file.name} {file.quant} in {self.system.models} ({how})"
            yield InstallStep(what, take, done=has_model(file, self.system.models))

    def _stays(self, file: ModelFile) -> bool:
        return any(inside(file.path, Path(folder)) for folder in self.settings.model_dirs)

    def _must_reach(self, file: ModelFile) -> None:
        """Raise ConfigError with the folder that the service's user may not enter (FC-79)."""
        user = future_user(self.settings.run_as, self.settings.groups)
        for path in map(Path, file.shards):
            problem = find_problem(path, user)
            # Root binds model folders below /home into the unit's view: folders above them do not count.
            bound = [Path(folder) for folder in self.settings.model_dirs if within(folder, HOMES)]
            if problem is not None and not any(problem.path in folder.parents for folder in bound):
                raise ConfigError(problem.sentence, problem.hint)

    def _configuration(self, found: Takeover) -> InstallStep:
        target = self.request.root / ETC / NAME
        before, made_from = read_base(self.request.configurations)
        served = [self._served(model_id, files[0], before) for model_id, files in found.models.items()]
        after = merge(
            before, served, profile=self.request.profile, listen=self.request.listen, dirs=self.settings.model_dirs
        )

        def write() -> None:
            if target.exists():  # the operator may have comments in it, which are lost
                shutil.copy2(target, target.with_name(f"{NAME}.before"))
            write_file(target, config_text(after, made_from if made_from != target else None))

        return InstallStep(f"write {target}", write, done=made_from == target and after == before)

    def _served(self, model_id: str, file: ModelFile, before: dict[str, Any]) -> Served:
        """Keep a configured name; replace a path by the file's name in the service's store."""
        if self._stays(file):
            return Served(model_id, file.path)
        for entry in before.get("model", []):
            if entry.get("id") == model_id and "/" not in str(entry.get("ref", "/")):
                return Served(model_id, str(entry["ref"]))
        return Served(model_id, f"{file.name}:{file.quant}")

    def _keys(self) -> InstallStep:
        """Give the keys file to the service's user: in a credential, a copy, revoked keys would still work."""
        keys, user = self.request.root / ETC / "keys.toml", self.request.run_as
        text = None if keys.exists() else self._offered_keys()

        def make() -> None:
            if text is not None:
                write_file(keys, text, 0o600)
            keys.chmod(0o600)  # one that was written by hand; the group of its new owner has members
            give(keys, user)

        done = belongs_to(keys, user) and stat.S_IMODE(keys.stat().st_mode) == 0o600
        return InstallStep(f"give {keys} (0600, hashes only) to {user}", make, done=done)

    def _offered_keys(self) -> str:
        """Return the keys of the offline folder, as they are written out: a link there may name a file of root's."""
        if self.bundle is None or self.bundle.keys is None:
            return "schema = 1\n"
        import tomli_w  # late: only here

        try:
            return tomli_w.dumps(load_toml(self.bundle.keys))
        except (OSError, ValueError) as error:
            hint = "`edgellm key add NAME --file FILE` writes one"
            raise ConfigError(f"{self.bundle.keys} is no file of keys", hint) from error
