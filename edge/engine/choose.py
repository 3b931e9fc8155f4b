"""Choose the engine of a start: requested > selected > embedded. Imported before the spawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.engine import gpu_code
from edge.engine.embedded_engine import find_embedded
from edge.engine.engine import Engine
from edge.engine.installed import ids, is_id, load, read_selection
from edge.errors import EngineMissingError, UsageError
from edge.paths import Folders
from edge.resources import data_dir, load_toml
from edge.units import counted

# When the former engine replaces a new one. Pure: start records in, a decision out.

# A start may fail for a reason outside the engine; three in a row without one READY are the engine's.
STARTS_BEFORE_ROLLBACK = 3
# The supervisor's kind for a SIGKILL of unknown origin.
_KILLED = frozenset({"killed"})


class EngineStart(Struct, frozen=True):
    """One start as it was recorded. `failed` is the failure's kind when it ended before READY, None when unknown."""

    engine: str
    ready: bool
    failed: str | None = None


class Rules(Struct, frozen=True):
    """[rollback] of build/llama-server.toml."""

    at_once: frozenset[str]
    innocent: frozenset[str]


class EngineFallback(Struct, frozen=True):
    """Use `engine` instead, degraded, and say `because`."""

    engine: str
    instead_of: str
    because: str


def rules(table: Mapping[str, Any]) -> Rules:
    """Read the rules of build/llama-server.toml. Failures for lack of memory are never the engine's."""
    memory = frozenset(signature["kind"] for signature in table["signatures"] if signature["oom"])
    judged = table["rollback"]
    return Rules(frozenset(judged["at_once"]), frozenset(judged["innocent"]) | memory | _KILLED)


def starts_from_records(records: Iterable[Mapping[str, Any]]) -> list[EngineStart]:
    """Read records of starts.jsonl, whose `outcome` is `ready` or `failed: KIND`; malformed ones are left out."""
    found = []
    for record in records:
        engine, outcome = record.get("engine"), record.get("outcome")
        if not isinstance(engine, str) or not isinstance(outcome, str):
            continue
        failed = outcome.removeprefix("failed: ") if outcome.startswith("failed: ") else None
        found.append(EngineStart(engine, outcome == "ready", failed))
    return found


def fallback(
    current: str, previous: str | None, starts: Iterable[EngineStart], judged_by: Rules
) -> EngineFallback | None:
    """Return the former engine if `current` was never READY and `previous` was; None otherwise."""
    known = list(starts)
    mine = [start for start in known if start.engine == current]
    # One READY proves the engine on this machine: later failures have another cause.
    if previous is None or previous == current or any(start.ready for start in mine):
        return None
    # A former engine that never served here is no alternative.
    if not any(start.ready for start in known if start.engine == previous):
        return None
    for start in mine:
        if start.failed in judged_by.at_once:
            return EngineFallback(previous, current, f"{current} failed permanently ({start.failed})")
    tried = [start for start in mine if start.failed not in judged_by.innocent]
    if len(tried) >= STARTS_BEFORE_ROLLBACK:
        return EngineFallback(previous, current, f"{current} has not become ready in {counted(len(tried), 'start')}")
    return None


def choose(
    folders: Folders,
    wanted: str | None,
    needs_gpu: bool,
    *,
    profile: str = "auto",
    capabilities: Sequence[str] = (),
    starts: Iterable[Mapping[str, Any]] = (),
) -> Engine:
    """Choose an engine. `wanted` is --engine: an id, `embedded`, or a path. `capabilities` ("8.7"): the GPUs'.

    Raises EngineMissingError for an engine without CUDA, or without machine code for the GPU, if the plan uses the GPU:
    serving from the CPU instead would be silent. An engine requested by name is used as it is. `starts`: the records of
    this instance's starts; after failed ones the former engine is taken.
    """
    if wanted:
        return _wanted(folders, wanted)
    selected = read_selection(folders.engines)
    if selected.current is not None:
        instead = fallback_now(folders.engines, starts)
        engine = load(folders.engines, instead.engine if instead else selected.current)
        if needs_gpu:
            _must_fit(engine, profile, capabilities)
        return engine
    if needs_gpu:
        raise missing("no engine is built yet, and the plan asks for the GPU", profile)
    embedded = find_embedded(sys.executable)
    if embedded is None:
        raise missing("no engine is built yet, and the embedded one is not installed", profile, embedded=True)
    return embedded


def fallback_now(engines: Path, starts: Iterable[Mapping[str, Any]]) -> EngineFallback | None:
    """Return why the former engine serves in place of the selected one, by this instance's start records."""
    selected = read_selection(engines)
    if selected.current is None or selected.previous is None:
        return None
    known = starts_from_records(starts)
    if all(start.engine != selected.current or start.ready for start in known):
        return None  # the ordinary case reads no table
    return fallback(
        selected.current, selected.previous, known, rules(load_toml(data_dir("build") / "llama-server.toml"))
    )


def _wanted(folders: Folders, wanted: str) -> Engine:
    if wanted == "embedded" or wanted.startswith("embedded-"):
        engine = find_embedded(sys.executable)
        if engine is None or wanted not in ("embedded", engine.id):
            raise EngineMissingError(f"no engine {wanted}", "pip install 'edgellm[embedded]'")
        return engine
    if is_id(wanted) and (folders.engines / wanted / "engine.json").is_file():
        return load(folders.engines, wanted)
    path = Path(wanted).expanduser()
    if os.sep in wanted or path.is_file():
        from edge.engine.inspect import inspect  # late: only for a binary that was not built here

        server = path / "llama-server" if path.is_dir() else path
        return inspect(server, folders.cache / "inspect")
    known = ", ".join(ids(folders.engines)) or "none is built yet"
    raise UsageError(f"--engine {wanted}: neither an installed engine nor a path", f"installed: {known}")


def _must_fit(engine: Engine, profile: str, capabilities: Sequence[str]) -> None:
    if not engine.cuda:
        raise missing(f"the selected engine {engine.id} has no CUDA, and the plan asks for the GPU", profile)
    wanted = [arch for text in capabilities if (arch := gpu_code.architecture(text)) is not None]
    if wanted and engine.built_for and not any(gpu_code.runs(engine.built_for, arch) for arch in wanted):
        built, here = gpu_code.listed(engine.built_for), gpu_code.listed(wanted)
        raise missing(f"the selected engine {engine.id} is built for {built}, and this GPU is {here}", profile)


def missing(message: str, profile: str, *, embedded: bool = False) -> EngineMissingError:
    """Return the error for a missing engine, with the command, its minutes and its disk."""
    command = f"edgellm build -p {profile}"
    recipe = load_toml(data_dir("build") / "llama.cpp.toml")["recipes"].get(profile)
    # For a recipe of a user's own: the figures of the recipe `orin`.
    minutes, disk = (recipe["cpu_minutes"], recipe["disk"]) if recipe else (51, "2GiB")
    cores = len(os.sched_getaffinity(0))
    cost = f"about {max(1, round(minutes / cores))} min on {cores} cores (a board: twice that), {disk} of disk"
    other = ", or `pip install 'edgellm[embedded]'` for the CPU" if embedded else ""
    return EngineMissingError(message, f"run `{command}`: {cost}{other}", recipe=profile)
