"""Plan a build for this machine: recipe, pin, toolkit, commands. Measures; fetches and builds nothing."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from edge.builder.commands import BuildInputs, commands, estimate_minutes
from edge.builder.measure import assumed_toolchain, find_arch, matching_cc, measure
from edge.builder.preflight import BuildNeeds, Preflight, compilable, preflight
from edge.builder.recipe import Recipe, hopeless
from edge.builder.request import BuildPlan, BuildRequest, BuildResult, find_recipe
from edge.builder.source import Pin, SourceArchive, locate, pin_for
from edge.builder.toolchain import Tool, Toolchain, numbers, survey, warn
from edge.engine.installed import find_same
from edge.errors import UnavailableError
from edge.resources import data_dir, load_toml


def build_table() -> dict[str, Any]:
    return load_toml(data_dir("build") / "llama.cpp.toml")


def make_plan(request: BuildRequest) -> BuildPlan:
    """Plan a build. Raises UsageError or UnavailableError if none can be planned."""
    table = build_table()
    recipe = find_recipe(request, table)
    refuse_foreign(request.build_root.parent)
    _refuse(request, recipe, table)
    arch = find_arch(request, recipe)
    tools = assumed_toolchain(request, recipe, table) if request.stand_in else _survey(request, recipe)
    if not request.arch:  # one card that no toolkit compiles for, beside others, does not stop the build for those
        arch = next((able for kit in tools.toolkits if (able := compilable(kit, arch, table))), arch)
    # The pin is chosen by the newest toolkit; which of several is used is decided by the board's driver later.
    newest = max((kit.version for kit in tools.toolkits), default=None)
    pin = pin_for(table, newest if recipe.cuda else None)
    source = locate(request.source, pin, request.source_dir)
    wanted = _wanted(request, recipe, pin, arch)
    checked = (
        _not_checked(tools, wanted)
        if request.stand_in
        else preflight(wanted, measure(request, tools, source, pin), table)
    )
    inputs = _inputs(request, recipe, pin, source, arch, tools, checked, table)
    made = commands(inputs, str(request.build_root))
    return BuildPlan(
        recipe=recipe,
        pin=pin,
        source=source,
        arch=arch,
        preflight=checked,
        inputs=inputs,
        commands=made,
        minutes=estimate_minutes(recipe, inputs.jobs),
        drop=tuple(table["tree"]["drop"]),
        table=table,
        built=find_same(request.folders.engines, "fingerprint", made.fingerprint)
        if source.pinned and not request.force
        else None,
    )


def refuse_foreign(cache: Path) -> None:
    """Refuse to run, as root, the tools or the cmake files of a folder that another user may write to.

    Raises UnavailableError.
    """
    if os.geteuid() != 0 or not cache.exists():
        return
    state = cache.stat()
    # A writer of the folder could leave a CMakeLists.txt or a compiler there that root would run.
    if state.st_uid != 0 or state.st_mode & 0o022:
        hint = "build as the owner of that folder, or as root without --state-dir"
        raise UnavailableError(f"another user may write to {cache}, and root would build what lies there", hint)


def _refuse(request: BuildRequest, recipe: Recipe, table: Mapping[str, Any]) -> None:
    """Refuse a hopeless build before an hour of compiling (FC-04)."""
    if recipe.cuda and (reason := hopeless(table, request.board.compute_capability)):
        raise UnavailableError(f"{request.board.module}: {reason[0]}", reason[1])
    if recipe.refused and not request.force:
        raise UnavailableError(f"the recipe {recipe.name} is unproven: {recipe.refused}", "try it with --force")


def _survey(request: BuildRequest, recipe: Recipe) -> Toolchain:
    return survey(request.environment, request.root, cuda=recipe.cuda, tools_dir=request.tools_dir)


def lacks_tools(request: BuildRequest) -> bool:
    """Return whether cmake or ninja is missing, or cmake is older than this build needs. Runs their `--version`.

    Raises UsageError for an unknown recipe.
    """
    table = build_table()
    recipe = find_recipe(request, table)
    tools = _survey(request, recipe)
    newest = max((kit.version for kit in tools.toolkits), default=None)
    least = _cmake_min(recipe, pin_for(table, newest if recipe.cuda else None))
    return tools.ninja is None or tools.cmake is None or tools.cmake.version < least


def _cmake_min(recipe: Recipe, pin: Pin) -> tuple[int, ...]:
    # 3.14 is llama.cpp's own cmake_minimum_required; ggml-cuda needs more.
    return pin.cmake_min if recipe.cuda else (3, 14)


def _not_checked(tools: Toolchain, wanted: BuildNeeds) -> Preflight:
    sentence = "planned for another board: its tools, memory, disk and clock are assumed, not checked"
    kit = tools.toolkits[0] if tools.toolkits else None
    return Preflight((warn("machine", sentence),), kit, tools.cxx[0], wanted.jobs or 4)


def _wanted(request: BuildRequest, recipe: Recipe, pin: Pin, arch: tuple[int, ...]) -> BuildNeeds:
    cuda = request.board.cuda
    return BuildNeeds(
        recipe=recipe,
        arch=arch,
        board_cuda=numbers(cuda) if cuda and re.fullmatch(r"\d+\.\d+", cuda) else None,
        cuda_min=pin.cuda_min,
        cuda_proven=pin.cuda_proven,
        cmake_min=_cmake_min(recipe, pin),
        gcc_min=pin.gcc_min,
        jobs=request.jobs,
    )


def _inputs(
    request: BuildRequest,
    recipe: Recipe,
    pin: Pin,
    source: SourceArchive,
    arch: tuple[int, ...],
    tools: Toolchain,
    checked: Preflight,
    table: Mapping[str, Any],
) -> BuildInputs:
    """Collect the inputs. A missing tool has its plain name, and the preflight reports it."""
    cxx = checked.host_compiler or (tools.cxx[0] if tools.cxx else Tool("c++", ()))
    return BuildInputs(
        recipe=recipe,
        tree=str(source.tree),
        commit=source.commit,
        build_number=source.build_number,
        arch=arch,
        machine=tools.machine,
        isa=request.board.cpu.isa,
        cmake=tools.cmake or Tool("cmake", ()),
        ninja=tools.ninja or Tool("ninja", ()),
        cc=matching_cc(tools, cxx),
        cxx=cxx,
        toolkit=checked.toolkit,
        host_compiler=checked.host_compiler if recipe.cuda else None,
        targets=[*table["tree"]["targets"], *(table["tree"]["rpc_targets"] if request.rpc else ())],
        jobs=checked.jobs,
        baseline=not request.native,
        rpc=request.rpc,
    )


# Describe a build plan and its result as JSON documents. Pure.

SCHEMA = 1


def plan_document(request: BuildRequest, plan: BuildPlan) -> dict[str, Any]:
    recipe = plan.recipe
    return {
        "schema": SCHEMA,
        "board": {"id": request.board.id, "module": request.board.module, "stand_in": request.stand_in},
        "recipe": {"name": recipe.name, "script": recipe.script, "sha256": recipe.sha256, "trust": recipe.trust},
        "source": plan.source.document(),
        "cuda_arch": list(plan.arch),
        "fingerprint": plan.commands.fingerprint,
        "built": plan.built,
        "jobs": plan.inputs.jobs,
        "minutes": plan.minutes,
        "disk_bytes": recipe.disk_bytes,
        "findings": [to_builtins(finding) for finding in plan.preflight.findings],
        "options": [
            {"name": option.name, "value": option.value, "because": option.why}
            for option in (*recipe.options, *plan.commands.overrides)
        ],
        "commands": [list(plan.commands.configure), list(plan.commands.build)],
    }


def result_document(result: BuildResult) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "engine": result.engine_id,
        "new": result.new,
        "previous": result.previous,
        "log": result.log,
        "took_s": round(result.took_s, 3),
        "unknown_options": list(result.notes),
    }


def shell(command: tuple[str, ...]) -> str:
    """Return a command as a shell line."""
    return shlex.join(command)
