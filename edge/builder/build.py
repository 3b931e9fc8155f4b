"""Run one build from the plan to the installed engine, or to the wheel; no failure touches an installed engine."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edge.board.cgroup import oom_kills
from edge.builder.commands import BuildInputs, Commands, commands, overrides
from edge.builder.compile import (
    BuildFailure,
    NinjaProgress,
    build_environment,
    count_cuda_steps,
    diagnose,
    make,
    run_logged,
)
from edge.builder.download import download, pip_command
from edge.builder.install import commit, copy_programs, describe, locked, new_id, staging, use
from edge.builder.measure import glibc
from edge.builder.proof import prove
from edge.builder.recipe import declared_options, unknown_options
from edge.builder.request import BuildPlan, BuildRequest, BuildResult
from edge.builder.source import fetch, unpack
from edge.engine.installed import SERVER, read_selection
from edge.errors import BugError, BuildError, DoesNotFitError, UnavailableError, UsageError, full_disk_named
from edge.linux.tree import Tree

LOG = "edgellm-build.log"
_MACHINE = Tree()
_KEPT_LINES = 20_000  # a failed step and what was printed beside it


class BuildReport(Struct, frozen=True):
    """Callbacks of a build: sentences, and progress many times a second."""

    say: Callable[[str], None]
    progress: Callable[[NinjaProgress], None]


def build(request: BuildRequest, plan: BuildPlan, report: BuildReport) -> BuildResult:
    """Fetch, configure, compile, prove, install, select. Raises EdgeError; the next build continues after Ctrl-C."""
    if request.stand_in:
        raise BugError("a build for another board is not possible here")
    start_s = time.monotonic()
    engines = request.folders.engines
    with locked(engines), full_disk_named():
        if plan.built is not None:
            # Under the lock: another build may have selected an engine since the plan was made.
            before = read_selection(engines).current
            use(engines, plan.built)
            return BuildResult(plan.built, new=False, previous=before, took_s=time.monotonic() - start_s)
        _stop_if_failed(plan)
        source = fetch(request.source, plan.pin, request.source_dir, plan.drop, report.say)
        plan = replace(plan, source=source, inputs=replace(plan.inputs, commit=source.commit, tree=str(source.tree)))
        unknown = _check_options(plan, report)
        made = commands(plan.inputs, str(request.build_root))
        plan = replace(plan, commands=made)
        log = Path(made.build_dir) / LOG
        plan = replace(plan, commands=_compile(request, plan, log, report))
        report.say("proving the new engine")
        engine_id = _install(engines, plan, unknown, request.root, report.say)
    previous = read_selection(engines).previous
    return BuildResult(engine_id, True, previous, str(log), time.monotonic() - start_s, unknown)


def _stop_if_failed(plan: BuildPlan) -> None:
    failed = plan.preflight.failed
    if not failed:
        return
    table = "\n".join(f"  {finding.name}: {finding.sentence}" for finding in failed[1:])
    first = failed[0]
    kind = DoesNotFitError if first.name in ("disk", "tmpdir") else UnavailableError
    raise kind(first.sentence, first.hint, table=table or None)


def _check_options(plan: BuildPlan, report: BuildReport) -> tuple[str, ...]:
    """Return the recipe's options that the tree does not declare: cmake ignores unknown GGML_* names silently."""
    tree = Path(plan.source.tree)
    paths = [*tree.rglob("CMakeLists.txt"), *tree.rglob("*.cmake")]
    unknown = unknown_options(plan.recipe, declared_options(path.read_text(errors="replace") for path in paths))
    critical = [name for name in unknown if name in plan.table["tree"]["critical"]]
    if critical:
        raise BuildError(
            f"this llama.cpp does not know {', '.join(critical)}, which the recipe needs", "use another --source"
        )
    if unknown:
        report.say(f"this llama.cpp does not know {', '.join(unknown)}: left without effect")
    return unknown


def _compile(request: BuildRequest, plan: BuildPlan, log: Path, report: BuildReport) -> Commands:
    """Configure and compile; halve the jobs after an out-of-memory kill, use the baseline CPU after a header mismatch.

    Return the commands that succeeded, under the plan's fingerprint: the same request makes the same engine.
    """
    made, inputs = plan.commands, plan.inputs
    environment = build_environment(request.environment, [str(Path(inputs.ninja.path).parent)])
    log.unlink(missing_ok=True)
    jobs = inputs.jobs
    while True:
        failure = _attempt(made, environment, log, report, plan.table)
        if failure is None:
            return made
        # The kernel killed a compiler for memory. ninja keeps the finished objects: the rest continues with half.
        if failure.retry == "half" and jobs > 1:
            jobs = max(1, jobs // 2)
            report.say(f"{failure.sentence}: continuing with {jobs} compilers at once")
        elif failure.retry == "baseline" and not inputs.baseline and inputs.machine == "aarch64":
            inputs = replace(inputs, baseline=True)
            report.say(f"{failure.sentence}: once more with the baseline CPU architecture")
        else:
            raise failure.error(log)
        made = commands(replace(inputs, jobs=jobs), str(request.build_root), keep=plan.commands.fingerprint)


def _attempt(
    made: Commands, environment: Mapping[str, str], log: Path, report: BuildReport, table: Mapping[str, Any]
) -> BuildFailure | None:
    # Bounded: a verbose CUDA build prints hundreds of megabytes, and the failed step is near the end.
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    killed = oom_kills(_MACHINE) or 0
    report.say("configuring")
    code = run_logged(made.configure, environment, log, lines.append)
    if code == 0:
        report.say(f"compiling in {made.build_dir}")
        lines.clear()
        steps = count_cuda_steps(Path(made.build_dir))
        code = make(made.build, environment, log, steps, report.progress, lines.append)
    if code == 0:
        return None
    killed = (oom_kills(_MACHINE) or 0) - killed
    return diagnose(list(lines), table["failures"], code=code, oom_kills=killed)


def _install(engines: Path, plan: BuildPlan, unknown: tuple[str, ...], root: Path, say: Callable[[str], None]) -> str:
    with staging(engines) as folder:
        programs = [name for name in plan.inputs.targets if (Path(plan.commands.build_dir) / "bin" / name).is_file()]
        copy_programs(Path(plan.commands.build_dir) / "bin", programs, folder)
        proof = prove(folder / SERVER, cuda=plan.recipe.cuda, arch=plan.arch, root=root, report=say)
        for note in proof.notes:
            say(note)
        recipe = f"{plan.recipe.name}-rpc" if plan.inputs.rpc else plan.recipe.name
        engine_id = new_id(engines, plan.source.commit, recipe)
        document = describe(folder, engine_id, proof, _made(plan, unknown), read_selection(engines).current)
        return commit(engines, folder, document)


def _made(plan: BuildPlan, unknown: tuple[str, ...]) -> dict[str, Any]:
    inputs = plan.inputs
    options = {option.name: option.value for option in (*plan.recipe.options, *plan.commands.overrides)}
    return {
        "fingerprint": plan.commands.fingerprint,
        "source": {**plan.source.document(), "commit": plan.source.commit[:9]},
        "recipe": {"name": plan.recipe.name, "sha256": plan.recipe.sha256},
        "options": options,
        "unknown_options": list(unknown),
        "toolchain": {
            "cmake": inputs.cmake.text,
            "cc": inputs.cxx.text,
            "nvcc": inputs.toolkit.text if inputs.toolkit else None,
        },
        "target": {
            "machine": inputs.machine,
            "glibc": glibc(),
            "cuda_runtime": inputs.toolkit.text if inputs.toolkit else None,
        },
    }


# Build the llama-cpp-python wheel from the pinned source with the same recipe.

# Options that make one program: the bindings load libllama.so, and scikit-build-core brings its own ninja.
_NOT_FOR_LIBRARIES = frozenset({"BUILD_SHARED_LIBS", "LLAMA_BUILD_SERVER", "CMAKE_MAKE_PROGRAM"})
_LEFT_OUT = ("vendor/llama.cpp/.git",)  # a file that names a folder of the machine that packed it


def build_bindings(request: BuildRequest, plan: BuildPlan, report: BuildReport) -> Path:
    """Build the wheel and return its path, in a cache folder named by the build's fingerprint. Raises EdgeError."""
    if request.source.type != "pypi":
        raise UsageError("the bindings are built from the pinned sdist", "leave --source out")
    for finding in plan.preflight.failed:
        raise UnavailableError(finding.sentence, finding.hint)
    wheels = request.folders.cache / "wheels" / plan.commands.fingerprint
    with locked(request.folders.engines), full_disk_named():
        archive = download(plan.pin.pypi, request.source_dir, report.say)
        work = request.folders.cache.resolve() / "bindings"
        shutil.rmtree(work, ignore_errors=True)
        sources, build_dir = work / "source", work / "build"
        work.mkdir(parents=True)
        # The whole archive: the bindings around llama.cpp's tree.
        inside = PurePosixPath(plan.pin.pypi["inside"]).parts[0]
        unpack(archive, {**plan.pin.pypi, "inside": inside}, sources, _LEFT_OUT)
        report.say(f"building the {plan.pin.pypi['name']} wheel (about {plan.minutes} min)")
        log = wheels / LOG
        log.unlink(missing_ok=True)
        lines: list[str] = []
        code = run_logged(
            _wheel_command(sources, build_dir, wheels), _wheel_environment(request, plan), log, lines.append
        )
        if code != 0:
            lines.append(f"pip ended with {code}")
            raise diagnose(lines, plan.table["failures"]).error(log)
        shutil.rmtree(work)
    return max(wheels.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def _wheel_command(sources: Path, build_dir: Path, wheels: Path) -> list[str]:
    """Return pip's command line, with fixed folders in place of temporary ones: ccache knows a file by its path."""
    options = ["--no-deps", "--verbose", f"--config-settings=build-dir={build_dir}", "--wheel-dir", str(wheels)]
    return [*pip_command(), "wheel", *options, str(sources)]


def _wheel_environment(request: BuildRequest, plan: BuildPlan) -> dict[str, str]:
    """Return pip's environment: its own configuration, the recipe in CMAKE_ARGS, the jobs for cmake."""
    environment = build_environment(request.environment, [str(Path(plan.inputs.ninja.path).parent)])
    environment.update({name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))})
    environment["CMAKE_ARGS"] = _cmake_args(plan.inputs)
    environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(plan.inputs.jobs)
    return environment


def _cmake_args(inputs: BuildInputs) -> str:
    """Return the recipe's options without static linking: the bindings load shared libraries."""
    options = [*inputs.recipe.options, *overrides(inputs)]
    return shlex.join(f"-D{option.name}={option.value}" for option in options if option.name not in _NOT_FOR_LIBRARIES)
