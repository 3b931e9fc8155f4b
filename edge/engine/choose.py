"""Which engine a start uses: asked for > selected > embedded. Standard library only: it runs before the child."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge.engine.embedded_engine import find_embedded
from edge.engine.engine import Engine
from edge.engine.fallback import Fallback, fallback, rules, starts_from_records
from edge.engine.installed import ids, is_id, load, read_selection
from edge.errors import EngineMissingError, UsageError
from edge.folders import Folders
from edge.resources import data_dir, load_toml


def choose(
    folders: Folders,
    wanted: str | None,
    needs_gpu: bool,
    *,
    profile: str = "auto",
    capability: str | None = None,
    python: str = sys.executable,
) -> Engine:
    """`wanted` is --engine: an id, `embedded`, or a path. `capability` ("8.7") is the GPU's, where it is known.

    An engine without CUDA, or without machine code for the GPU, is no engine for a plan that asks for the GPU: that
    raises EngineMissingError instead of serving from the CPU. What was asked for by name is used as it is.
    """
    if wanted:
        return _wanted(folders, wanted, python)
    selected = read_selection(folders.engines)
    if selected.current is not None:
        instead = fallback_now(folders)
        engine = load(folders.engines, instead.engine if instead else selected.current)
        if needs_gpu:
            _must_fit(engine, profile, capability)
        return engine
    if needs_gpu:
        raise missing("no engine is built yet, and the plan asks for the GPU", profile)
    engine_or_none = find_embedded(python)
    if engine_or_none is None:
        raise missing("no engine is built yet, and the embedded one is not installed", profile, embedded=True)
    return engine_or_none


def fallback_now(folders: Folders) -> Fallback | None:
    """Why the former engine serves in place of the selected one, from the starts that this instance recorded."""
    selected = read_selection(folders.engines)
    if selected.current is None or selected.previous is None:
        return None
    try:
        lines = folders.starts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    judged_by = rules(load_toml(data_dir("build") / "llama-server.toml"))
    return fallback(selected.current, selected.previous, starts_from_records(_records(lines)), judged_by)


def _records(lines: list[str]) -> Iterator[dict[str, Any]]:
    """A line that a power cut left half written is no record."""
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def _wanted(folders: Folders, wanted: str, python: str) -> Engine:
    if wanted == "embedded" or wanted.startswith("embedded-"):
        engine = find_embedded(python)
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


def _must_fit(engine: Engine, profile: str, capability: str | None) -> None:
    if not engine.cuda:
        raise missing(f"the selected engine {engine.id} has no CUDA, and the plan asks for the GPU", profile)
    if capability is None or not engine.built_for:
        return
    wanted = int(capability.replace(".", ""))
    # Machine code of one major runs on later minors of it, except on Tegra, where it must be exact.
    tegra = {53, 62, 72, 87, 101, 110}
    fits = any(
        a == wanted or (wanted not in tegra and a // 10 == wanted // 10 and a <= wanted) for a in engine.built_for
    )
    if not fits:
        built = ", ".join(f"sm_{arch}" for arch in engine.built_for)
        raise missing(f"the selected engine {engine.id} is built for {built}, and this GPU is sm_{wanted}", profile)


def missing(message: str, profile: str, *, embedded: bool = False) -> EngineMissingError:
    """The one wording of "build first": what to run, how long, how much disk."""
    command = f"edgellm build -p {profile}"
    recipe = load_toml(data_dir("build") / "llama.cpp.toml")["recipes"].get(profile)
    minutes, disk = (recipe["cpu_minutes"], recipe["disk"]) if recipe else (51, "2GiB")
    cores = len(os.sched_getaffinity(0))
    cost = f"about {max(1, round(minutes / cores))} min on {cores} cores (a board: twice that), {disk} of disk"
    other = ", or `pip install 'edgellm[embedded]'` for the CPU" if embedded else ""
    return EngineMissingError(message, f"run `{command}`: {cost}{other}", recipe=profile)
