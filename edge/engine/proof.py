"""Proof before install: the binary runs from anywhere, is what was asked for, and computes."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from edge.engine.binary import Traits, traits
from edge.engine.engine import Engine
from edge.engine.faults import BuildError, EngineBrokenError
from edge.engine.inspect import gpus_present, inspect, run_probe
from edge.engine.smoke import Smoke, smoke


@dataclass(frozen=True, slots=True)
class Proof:
    """What was seen. `gpu`: the smoke run had every layer on a GPU; None where no GPU is in sight."""

    engine: Engine
    traits: Traits
    smoke: Smoke
    gpu: bool | None
    notes: tuple[str, ...]
    at: str


def prove(binary: Path, *, cuda: bool, arch: tuple[int, ...], root: Path = Path("/")) -> Proof:
    """Raises BuildError that names the part of the proof that failed."""
    try:
        # From / with nothing in the environment, as a service manager would start it (FC-10).
        engine = inspect(binary, None, root=root, bare=True)
    except EngineBrokenError as error:
        raise BuildError(f"the proof failed: {error}", error.hint) from error
    found = traits(binary)
    notes = _cuda(binary, engine, found, arch, root) if cuda else []
    if not cuda and engine.cuda:
        notes.append("CUDA is in a binary that was meant for the CPU")
    gpu = bool(engine.devices) if cuda else False
    try:
        run = smoke(engine, gpu=gpu)
    except EngineBrokenError as error:
        raise BuildError(f"the proof failed: {error}", "the engine in use is untouched") from error
    if gpu and (run.offloaded is None or run.offloaded[0] < run.offloaded[1]):
        raise BuildError(f"the proof failed: layers on the GPU: {run.offloaded or 'none'}", "see `edgellm doctor`")
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Proof(replace(engine, built_for=found.built_for), found, run, gpu if cuda else None, tuple(notes), at)


def _cuda(binary: Path, engine: Engine, found: Traits, arch: tuple[int, ...], root: Path) -> list[str]:
    """CUDA is in it, for this GPU; and where a GPU is, the engine sees it (FC-01, FC-05)."""
    notes: list[str] = []
    if not found.cuda:
        raise BuildError(
            "the proof failed: CUDA was wanted and is not in the binary", "see the configure part of the log"
        )
    lacking = [a for a in arch if a not in found.built_for]
    if lacking:
        have = ", ".join(f"sm_{a}" for a in found.built_for) or "none"
        raise BuildError(f"the proof failed: no machine code for sm_{lacking[0]} in the binary, only {have}")
    seen = cuobjdump_archs(binary)
    if seen and not set(arch) <= set(seen):
        raise BuildError(f"the proof failed: cuobjdump finds {', '.join(f'sm_{a}' for a in seen)} in the binary")
    if engine.devices:
        return notes
    if gpus_present(root):
        done = run_probe(binary, ["--list-devices"], engine.library_path, timeout_s=90)
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "CUDA" in line]
        why = lines[0].strip() if lines else "it says nothing about CUDA"
        raise BuildError(
            f"the proof failed: a GPU is here and the engine does not see it: {why}",
            "a toolkit newer than the driver, or no permission for the device nodes (groups video and render)",
        )
    notes.append("no GPU is in sight: the kernels were checked in the file, not run")
    return notes


def cuobjdump_archs(binary: Path) -> tuple[int, ...]:
    """NVIDIA's own reading of the file, where its tool is installed; empty where it is not."""
    tool = shutil.which("cuobjdump") or next((str(p) for p in Path("/usr/local").glob("cuda*/bin/cuobjdump")), None)
    if tool is None:
        return ()
    done = subprocess.run([tool, "--list-elf", str(binary)], capture_output=True, text=True, check=False)
    return tuple(sorted({int(number) for number in re.findall(r"\.sm_(\d+)", done.stdout)}))
