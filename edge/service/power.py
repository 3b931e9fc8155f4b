"""The program of edgellm-power.service, the only part of edgellm that changes power mode, clocks or persistence.

    python -m edge.service.power apply | restore

It runs as root and reads nothing but /etc/edgellm/power.toml:

    schema = 1
    mode = "MAXN_SUPER"      nvpmodel's mode by name; its numbers differ by module and image
    jetson_clocks = true     lock the clocks at their maximum
    persistence = true       persistence mode of discrete GPUs
    restore = true           undo the changes when the unit stops

Each change is verified afterwards: nvpmodel ignores without an error what needs a reboot.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.board import jetson
from edge.board.board import PowerMode
from edge.errors import ConfigError, EdgeError, TemporaryError, UnavailableError
from edge.linux.files import read_json
from edge.resources import load_toml
from edge.telemetry.sensors import cpu_locked, find_gpu

SETTINGS = Path("/etc/edgellm/power.toml")
STATE = Path("/var/lib/edgellm-power")  # a power mode survives a power cut, so its predecessor is kept on disk
_STATUS, _CONF = Path("/var/lib/nvpmodel/status"), Path("/etc/nvpmodel.conf")
VERIFY_S = 10.0  # nvpmodel returns before /var/lib/nvpmodel/status is rewritten
_COMMAND_S = 60.0
# nvpmodel and jetson_clocks are scripts and programs of L4T; nothing of a user's PATH is run as root.
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_KEYS = {"schema": int, "mode": str, "jetson_clocks": bool, "persistence": bool, "restore": bool}


class PowerSettings(Struct, frozen=True):
    """The contents of power.toml."""

    mode: str = ""
    jetson_clocks: bool = False
    persistence: bool = False
    restore: bool = False


def read_settings(path: Path) -> PowerSettings:
    """Read power.toml. Raises ConfigError for unknown keys and types: a privileged program guesses nothing."""
    try:
        values = load_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "edgellm service install writes it") from error
    for key, value in values.items():
        if key not in _KEYS or type(value) is not _KEYS[key]:  # a bool is an int to isinstance
            raise ConfigError(f"{path}: {key} = {value!r} is not known", f"known: {', '.join(_KEYS)}")
    if values.pop("schema", 1) != 1:
        raise ConfigError(f"{path} has a newer schema", "update edgellm")
    return PowerSettings(**values)


def apply(settings: PowerSettings, state: Path = STATE, verify_s: float = VERIFY_S) -> list[str]:
    """Apply the settings and return a sentence per change; `state` keeps the former values. Raises EdgeError."""
    done: list[str] = []
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = _before(state)  # of an earlier apply, whose first values count
    try:
        mode = _active()
        if settings.mode and (mode is None or mode.name != settings.mode):
            # The first mode counts: a second `apply` must not take its own change for the former state.
            before.setdefault("mode", mode.name if mode else None)
            done.append(f"power mode {set_mode(settings.mode, verify_s).name} (was {mode.name if mode else 'unknown'})")
        if settings.jetson_clocks and not locked():
            _run("jetson_clocks", "--store", str(state / "clocks"))
            before["clocks"] = True  # before the change: `restore` undoes it even if jetson_clocks fails half way
            _run("jetson_clocks")
            _verify(locked, verify_s, "jetson_clocks left the clocks as they were")
            done.append("clocks locked")
        if settings.persistence:
            for uuid in _persistence(True):
                before["persistence"] = sorted({*before.get("persistence", []), uuid})
                done.append(f"persistence mode on for {uuid}")
    finally:
        # Also after an error: `restore` has to undo what was changed before it.
        (state / "before.json").write_text(json.dumps(before))
    return done


def restore(settings: PowerSettings, state: Path = STATE, verify_s: float = VERIFY_S) -> list[str]:
    """Undo the changes of `apply` where `restore = true`; return a sentence per change."""
    before = _before(state) if settings.restore else {}
    done: list[str] = []
    if before.get("clocks"):
        _run("jetson_clocks", "--restore", str(state / "clocks"))
        done.append("clocks restored")
    if before.get("mode"):
        done.append(f"power mode {set_mode(before['mode'], verify_s).name} restored")
    if before.get("persistence"):
        done += [f"persistence mode off for {uuid}" for uuid in _persistence(False, before["persistence"])]
    if settings.restore:
        (state / "before.json").unlink(missing_ok=True)
    return done


def _before(state: Path) -> dict[str, Any]:
    try:
        known = read_json(state / "before.json")
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def set_mode(name: str, verify_s: float = VERIFY_S) -> PowerMode:
    """Set a mode by name. Raises ConfigError for an unknown name, TemporaryError when nvpmodel did not set it."""
    known = jetson.modes(_text(_CONF) or "")
    wanted = next((mode for mode in known if mode.name == name), None)
    if wanted is None:
        names = ", ".join(mode.name for mode in known) or "none"
        raise ConfigError(f"this board has no power mode {name!r}", f"its modes: {names}")
    _run("nvpmodel", "-m", str(wanted.id))
    _verify(
        lambda: _active() == wanted,
        verify_s,
        f"nvpmodel did not set {name}",
        "some changes need a reboot: try `sudo reboot`",
    )
    return wanted


def locked() -> bool:
    """Return whether jetson_clocks is in effect: minimum = maximum on the GPU and on every core."""
    gpu = find_gpu("/sys")
    return bool(gpu is not None and gpu.locked() and cpu_locked("/sys"))


def _active() -> PowerMode | None:
    return jetson.active(_text(_STATUS), _text(_CONF))


def _persistence(on: bool, only: list[str] | None = None) -> Iterator[str]:
    """Change persistence mode and yield each GPU's UUID at once: a later GPU may fail."""
    try:
        import pynvml as nvml
    except ImportError as error:
        raise UnavailableError("persistence mode needs nvidia-ml-py", "pip install 'edgellm[nvml]'") from error
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(gpu)
            if (only is None or uuid in only) and bool(nvml.nvmlDeviceGetPersistenceMode(gpu)) != on:
                nvml.nvmlDeviceSetPersistenceMode(gpu, int(on))
                if bool(nvml.nvmlDeviceGetPersistenceMode(gpu)) != on:
                    raise TemporaryError(f"{uuid} did not change its persistence mode")
                yield uuid
    except nvml.NVMLError as error:
        raise UnavailableError(f"NVML: {error}", "is the NVIDIA driver loaded?") from error


def _verify(true: Callable[[], bool], within_s: float, otherwise: str, hint: str | None = None) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            raise TemporaryError(otherwise, hint)
        time.sleep(0.1)


def _run(program: str, *arguments: str) -> None:
    """Run a program without a terminal, so that nvpmodel cannot wait for an answer. Raises UnavailableError."""
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            env={"PATH": _PATH, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"cannot run {program}: {error}", "it is part of NVIDIA's Jetson images") from error
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise UnavailableError(f"{program} failed: {output[-1] if output else f'exit status {done.returncode}'}")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def main(arguments: list[str], state: Path = STATE, verify_s: float = VERIFY_S) -> int:
    """Apply or restore, print the changes, and return the exit code."""
    if arguments not in (["apply"], ["restore"]):
        print("usage: python -m edge.service.power apply | restore", file=sys.stderr)
        return 64
    try:
        settings = read_settings(SETTINGS)
        change = apply if arguments == ["apply"] else restore
        done = change(settings, state, verify_s)
    except EdgeError as error:
        print(f"error: {error}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    for line in done or ["nothing to change"]:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
