"""Prove an engine before it is installed: it runs from anywhere, matches the request, and computes."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edge.builder.smoke import SmokeRun, locate_crash, smoke
from edge.engine.binary import Traits, traits
from edge.engine.engine import Acceleration, Engine
from edge.engine.inspect import gpus_present, inspect, run_probe
from edge.errors import BuildError, EngineBrokenError, EngineDiedError
from edge.resources import data_dir, load_toml


class Proof(Struct, frozen=True):
    """The results of a proof. `gpu`: the smoke run had every layer on a GPU; None for a CPU build."""

    engine: Engine
    traits: Traits
    smoke: SmokeRun
    gpu: bool | None
    notes: tuple[str, ...]
    at: str


def prove(
    binary: Path,
    *,
    cuda: bool,
    arch: tuple[int, ...],
    root: Path = Path("/"),
    report: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Prove a binary. Raises BuildError that names the part that failed."""
    try:
        # From / with nothing in the environment, as a service manager would start it (FC-10).
        engine = inspect(binary, None, root=root, bare=True)
    except EngineBrokenError as error:
        raise BuildError(f"the proof failed: {error}", error.hint) from error
    found = traits(binary)
    notes = _cuda(binary, engine, found, arch, root) if cuda else []
    if not cuda and engine.cuda:
        notes.append("the binary has CUDA although the recipe is for the CPU")
    gpu = bool(engine.devices) if cuda else False
    engine, run, crash = first_graph(engine, gpu, accelerations(), report)
    notes += [f"it runs without {off.id}, with which it crashed ({crash}): {off.lost}" for off in engine.without]
    # A device that was found is no proof: the layers may still have stayed on the CPU.
    if gpu and (run.offloaded is None or run.offloaded[0] < run.offloaded[1]):
        raise BuildError(f"the proof failed: layers on the GPU: {run.offloaded or 'none'}", "see `edgellm doctor`")
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Proof(replace(engine, built_for=found.built_for), found, run, gpu if cuda else None, tuple(notes), at)


def accelerations() -> tuple[Acceleration, ...]:
    """Read what a proof may switch off: the remedies of build/llama-server.toml that [proof] lists, in its order."""
    table = load_toml(data_dir("build") / "llama-server.toml")
    rows = {row["id"]: row for row in table["remedies"]}
    return tuple(_acceleration(rows[name]) for name in table["proof"]["remedies"])


def _acceleration(row: Mapping[str, Any]) -> Acceleration:
    flash = row.get("settings", {}).get("flash_attention")
    args = ("--flash-attn", flash) if flash else row.get("args", ())
    return Acceleration(row["subject"].replace("_", " "), tuple(args), dict(row.get("environment", {})), row["lost"])


def first_graph(
    engine: Engine, gpu: bool, known: tuple[Acceleration, ...], report: Callable[[str], None] = lambda _: None
) -> tuple[Engine, SmokeRun, str | None]:
    """Compute with the engine; after a crash, with its accelerations off, one at a time and then all of them.

    Return the engine with `without` set, the run, and where it crashed (None if it did not). Raises BuildError.
    """
    try:
        return engine, smoke(engine, gpu=gpu), None
    except EngineBrokenError as error:
        if not isinstance(error, EngineDiedError) or not error.crashed:
            raise BuildError(f"the proof failed: {error}", "the engine in use is untouched") from error
        crashed = error
    crash = locate_crash(engine, gpu=gpu) or str(crashed).removeprefix("the smoke run died ")
    report(f"the new engine crashed in its first graph ({crash}): trying it with less")
    usable = [off for off in known if _can_switch_off(engine, off)]
    trials: list[tuple[Acceleration, ...]] = [(off,) for off in usable]
    if len(usable) > 1:
        trials.append(tuple(usable))
    for without in trials:
        less = replace(engine, without=without)
        with contextlib.suppress(EngineBrokenError):
            return less, smoke(less, gpu=gpu), crash
    tried = ", ".join(off.id for off in usable) or "nothing: this engine has no such switch"
    raise BuildError(
        f"the proof failed: {crashed} ({crash}; switched off in vain: {tried})",
        "compile it for any CPU: `edgellm build --no-native` (minutes where ccache is installed); "
        "the engine in use is untouched",
    )


def _can_switch_off(engine: Engine, off: Acceleration) -> bool:
    if not off.args:
        return engine.cuda
    flag = engine.flags.get(off.args[0])
    return flag is not None and flag.arity == len(off.args) - 1


def _cuda(binary: Path, engine: Engine, found: Traits, arch: tuple[int, ...], root: Path) -> list[str]:
    """Check that the binary has CUDA for this GPU, and finds the GPU where there is one (FC-01, FC-05)."""
    notes: list[str] = []
    if not found.cuda:
        raise BuildError(
            "the proof failed: CUDA was requested and is not in the binary", "see the configure part of the log"
        )
    lacking = [a for a in arch if a not in found.built_for]
    if lacking:
        have = ", ".join(f"sm_{a}" for a in found.built_for) or "none"
        raise BuildError(f"the proof failed: no machine code for sm_{lacking[0]} in the binary, only {have}")
    # A second reader, where it is installed: our own parser of fat binaries is by observation, not by a specification.
    seen = cuobjdump_archs(binary)
    if seen and not set(arch) <= set(seen):
        raise BuildError(f"the proof failed: cuobjdump finds {', '.join(f'sm_{a}' for a in seen)} in the binary")
    if engine.devices:
        return notes
    if gpus_present(root):
        done = run_probe(binary, ["--list-devices"], engine.library_path, timeout_s=90)
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "CUDA" in line]
        why = lines[0].strip() if lines else "it prints nothing about CUDA"
        raise BuildError(
            f"the proof failed: a GPU is present and the engine does not see it: {why}",
            "a toolkit newer than the driver, or no permission for the device nodes (groups video and render)",
        )
    notes.append("no GPU is visible: the kernels were checked in the file, not run")
    return notes


def cuobjdump_archs(binary: Path) -> tuple[int, ...]:
    """Return the architectures that NVIDIA's cuobjdump finds; empty without the tool."""
    tool = shutil.which("cuobjdump") or next((str(p) for p in Path("/usr/local").glob("cuda*/bin/cuobjdump")), None)
    if tool is None:
        return ()
    done = subprocess.run([tool, "--list-elf", str(binary)], capture_output=True, text=True, check=False)
    return tuple(sorted({int(number) for number in re.findall(r"\.sm_(\d+)", done.stdout)}))
