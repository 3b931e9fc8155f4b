"""llama-cpp-python from the pinned source with the same recipe, for those who want the model in their own process."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from edge.engine.builder import Report
from edge.engine.commands import Inputs, overrides
from edge.engine.compile import build_environment, run_logged
from edge.engine.download import download, pip_command
from edge.engine.failure import diagnose
from edge.engine.faults import BuildError
from edge.engine.install import locked
from edge.engine.preflight import Preflight
from edge.engine.request import BuildPlan, Request
from edge.engine.unpack import verify
from edge.errors import UnavailableError, UsageError

_NOT_FOR_LIBRARIES = frozenset({"BUILD_SHARED_LIBS", "LLAMA_BUILD_SERVER", "CMAKE_MAKE_PROGRAM"})


def build_bindings(request: Request, plan: BuildPlan, report: Report) -> Path:
    """→ the wheel. Its folder in the cache is named by the build's fingerprint. Raises EdgeError."""
    if request.source.type != "pypi":
        raise UsageError("the bindings are built from the pinned sdist", "leave --source out")
    _stop(plan.preflight)
    wheels = request.folders.cache / "wheels" / plan.commands.fingerprint
    with locked(request.folders.engines):
        archive = download(plan.pin.pypi, request.source_dir, report.say)
        verify(archive, plan.pin.pypi["sha256"])
        report.say(f"building the {plan.pin.pypi['name']} wheel (about {plan.minutes} min)")
        log = wheels / "edgellm-build.log"
        log.unlink(missing_ok=True)
        lines: list[str] = []
        code = run_logged(_command(archive, wheels), _environment(request, plan), log, lines.append)
        if code != 0:
            lines.append(f"pip ended with {code}")
            failure = diagnose(lines, plan.table["failures"])
            evidence = "\n".join(f"  {line}" for line in failure.evidence)
            raise BuildError(f"{failure.sentence} (log: {log})", failure.hint, table=evidence)
    return max(wheels.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def _stop(preflight: Preflight) -> None:
    for finding in preflight.failed:
        raise UnavailableError(finding.sentence, finding.hint)


def _command(archive: Path, wheels: Path) -> list[str]:
    return [*pip_command(), "wheel", "--no-deps", "--verbose", "--wheel-dir", str(wheels), str(archive)]


def _environment(request: Request, plan: BuildPlan) -> dict[str, str]:
    """pip may read its own configuration; CMAKE_ARGS carries the recipe, and CMAKE_BUILD_PARALLEL_LEVEL the jobs."""
    environment = build_environment(request.environment, [str(Path(plan.inputs.ninja.path).parent)])
    environment.update({name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))})
    environment["CMAKE_ARGS"] = cmake_args(plan.inputs)
    environment["CMAKE_BUILD_PARALLEL_LEVEL"] = str(plan.inputs.jobs)
    return environment


def cmake_args(inputs: Inputs) -> str:
    """The recipe's options, without what makes one program of everything: the bindings load libraries."""
    options = [*inputs.recipe.options, *overrides(inputs)]
    return shlex.join(f"-D{option.name}={option.value}" for option in options if option.name not in _NOT_FOR_LIBRARIES)
