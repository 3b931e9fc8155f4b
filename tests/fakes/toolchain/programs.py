"""Compilers and tools that answer like real ones and fail on demand. Each is a small shell or Python script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def nvcc(folder: Path, release: str, archs: tuple[int, ...] | None = (75, 80, 86, 87, 90)) -> Path:
    """`archs` None: too old to know --list-gpu-arch. A real toolkit has nvvm/ beside bin/."""
    (folder.parent / "nvvm").mkdir(parents=True, exist_ok=True)
    listed = "\n".join(f"echo compute_{arch}" for arch in archs) if archs is not None else "exit 1"
    return program(
        folder / "nvcc",
        f"""case "$1" in
--version) echo 'nvcc: NVIDIA (R) Cuda compiler driver'
echo 'Cuda compilation tools, release {release}, V{release}.68' ;;
--list-gpu-arch) {listed} ;;
*) exit 1 ;;
esac""",
    )


def gcc(folder: Path, version: str, names: tuple[str, ...] = ("cc", "c++")) -> None:
    for name in names:
        program(folder / name, f"echo {version}")


def tool(folder: Path, name: str, version_text: str) -> Path:
    return program(folder / name, f"echo '{version_text}'")


def nvidia_smi(folder: Path, output: str) -> Path:
    return program(folder / "nvidia-smi", f"cat <<'END'\n{output}\nEND")


def cmake(folder: Path, version: str = "3.25.1") -> Path:
    """Makes the build folder, and notes each configure in `configured` beside itself."""
    return program(
        folder / "cmake",
        f"""if [ "$1" = --version ]; then echo 'cmake version {version}'; exit 0; fi
echo "$@" >> '{folder}/configured'
while [ $# -gt 0 ]; do if [ "$1" = -B ]; then build="$2"; fi; shift; done
mkdir -p "$build/bin"
echo '-- Configuring done'""",
    )


def ninja(folder: Path, outcomes: list[dict[str, Any]]) -> Path:
    """Each call takes the next outcome (the last stays): `code`, `output`, `files` to put into bin/, `steps`, `hang`.

    Calls are noted in `made` beside itself, one JSON list of arguments a line.
    """
    script = f"""import json, os, shutil, signal, subprocess, sys, time
if "--version" in sys.argv:
    print("1.11.1"); sys.exit(0)
made = {str(folder / "made")!r}
count = len(open(made).readlines()) if os.path.exists(made) else 0
with open(made, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
outcomes = json.loads({json.dumps(json.dumps(outcomes))})
outcome = outcomes[min(count, len(outcomes) - 1)]
build = sys.argv[sys.argv.index("-C") + 1]
steps = outcome.get("steps", 4)
for step in range(1, steps + 1):
    print(f"[{{step}}/{{steps}}] Building CXX object src/llama-{{step}}.cpp.o", flush=True)
if outcome.get("hang"):
    # A compiler in a group of its own, as ninja starts them; it ignores an interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import os, signal, time; os.setpgid(0, 0); "
                      "signal.signal(signal.SIGINT, signal.SIG_IGN); "
                      "open(" + repr(outcome["hang"]) + ", 'w').write(str(os.getpid())); time.sleep(600)"])
    time.sleep(600)
print(outcome.get("output", ""), flush=True)
for name, source in outcome.get("files", {{}}).items():
    shutil.copy2(source, os.path.join(build, "bin", name))
sys.exit(outcome.get("code", 0))
"""
    path = folder / "ninja"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -IS\n{script}")
    path.chmod(0o755)
    return path
