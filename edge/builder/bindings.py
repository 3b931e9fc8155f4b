"""Build the llama-cpp-python wheel from the pinned source with the same recipe."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path, PurePosixPath

from edge.builder.build import BuildReport
from edge.builder.commands import BuildInputs, overrides
from edge.builder.compile import build_environment, diagnose, run_logged
from edge.builder.download import download, pip_command
from edge.builder.install import locked
from edge.builder.request import BuildPlan, BuildRequest
from edge.builder.source import unpack
from edge.errors import UnavailableError, UsageError, full_disk_named

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
        sources, build = work / "source", work / "build"
        work.mkdir(parents=True)
        # The whole archive: the bindings around llama.cpp's tree.
        inside = PurePosixPath(plan.pin.pypi["inside"]).parts[0]
        unpack(archive, {**plan.pin.pypi, "inside": inside}, sources, _LEFT_OUT)
        report.say(f"building the {plan.pin.pypi['name']} wheel (about {plan.minutes} min)")
        log = wheels / "edgellm-build.log"
        log.unlink(missing_ok=True)
        lines: list[str] = []
        code = run_logged(_command(sources, build, wheels), _environment(request, plan), log, lines.append)
        if code != 0:
            lines.append(f"pip ended with {code}")
            raise diagnose(lines, plan.table["failures"]).error(log)
        shutil.rmtree(work)
    return max(wheels.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def _command(sources: Path, build: Path, wheels: Path) -> list[str]:
    """Return pip's command line, with fixed folders in place of temporary ones: ccache knows a file by its path."""
    options = ["--no-deps", "--verbose", f"--config-settings=build-dir={build}", "--wheel-dir", str(wheels)]
    return [*pip_command(), "wheel", *options, str(sources)]


def _environment(request: BuildRequest, plan: BuildPlan) -> dict[str, str]:
    """Return pip's environment: its own configuration, the recipe in CMAKE_ARGS, the jobs for cmake."""
    environment = build_environment(request.environment, [str(Path(plan.inputs.ninja.path).parent)])
    environment.update({name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))})
    environment["CMAKE_ARGS"] = cmake_args(plan.inputs)
    environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(plan.inputs.jobs)
    return environment


def cmake_args(inputs: BuildInputs) -> str:
    """Return the recipe's options without static linking: the bindings load shared libraries."""
    options = [*inputs.recipe.options, *overrides(inputs)]
    return shlex.join(f"-D{option.name}={option.value}" for option in options if option.name not in _NOT_FOR_LIBRARIES)
