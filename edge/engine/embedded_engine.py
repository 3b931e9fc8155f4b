"""Find the engine of `edgellm[embedded]`: xllamacpp, llama.cpp's server in a Python child, CPU only."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from edge.engine.engine import Engine

_SCRIPT = Path(__file__).resolve().with_name("embedded.py")
_ASK = (
    "import importlib.util as u; s = u.find_spec('xllamacpp'); "
    "print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')"
)


def find_embedded(python: str) -> Engine | None:
    """Find the xllamacpp that `python` would import, without importing it; None without one."""
    package = _package_here() if python == sys.executable else _package_of(python)
    if package is None:
        return None
    version = _version(package)
    return Engine(
        id=f"embedded-xllamacpp-{version or 'unknown'}",
        kind="embedded",
        path=python,
        args=("-I", str(_SCRIPT)),  # isolated: no folder of ours shadows the standard library
        version=version,
        era="load-mode",  # it prints the log lines of its llama.cpp; its flags are fields of CommonParams
        cuda=False,
        progress_protocol=True,
    )


def _package_here() -> Path | None:
    spec = find_spec("xllamacpp")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def _package_of(python: str) -> Path | None:
    import subprocess  # late: on the way of a start the interpreter is our own

    try:
        result = subprocess.run(
            [python, "-I", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = result.stdout.strip()
    return Path(answer) if result.returncode == 0 and answer else None


def _version(package: Path) -> str | None:
    """Read the version from the .dist-info folder's name: importlib.metadata costs more than the whole search."""
    for info in sorted(package.parent.glob("xllamacpp-*.dist-info"), reverse=True):
        return info.name.removeprefix("xllamacpp-").removesuffix(".dist-info")
    return None
