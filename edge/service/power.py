"""edgellm-power.service: the only part of edgellm that changes clocks, a power mode or persistence, and only as told.

    python -m edge.service.power apply | restore

The wish is /etc/edgellm/power.toml, written by the installer when a profile asks for it, and the only thing read:

    schema = 1
    mode = "MAXN_SUPER"      nvpmodel's mode by name; its numbers differ by module and image
    jetson_clocks = true     clocks locked at their highest
    persistence = true       of discrete GPUs
    restore = true           put back on stop what was changed

Each change is verified afterwards: nvpmodel refuses in silence what needs a reboot. Root.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.board import power
from edge.board.board import PowerMode
from edge.errors import ConfigError, EdgeError, TemporaryError, UnavailableError
from edge.resources import load_toml
from edge.telemetry.soc import cpu_locked, find_gpu

WISH = Path("/etc/edgellm/power.toml")
STATE = Path("/var/lib/edgellm-power")  # a power mode outlives a power cut, so what was before must too
_STATUS, _CONF = Path("/var/lib/nvpmodel/status"), Path("/etc/nvpmodel.conf")
VERIFY_S = 10.0
_COMMAND_S = 60.0
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_KEYS = {"schema": int, "mode": str, "jetson_clocks": bool, "persistence": bool, "restore": bool}


@dataclass(frozen=True, slots=True)
class Wish:
    mode: str = ""
    jetson_clocks: bool = False
    persistence: bool = False
    restore: bool = False


def read_wish(path: Path) -> Wish:
    """Raises ConfigError for anything that is not known here: a privileged program guesses nothing."""
    try:
        values = load_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "edgellm service install writes it") from error
    for key, value in values.items():
        if key not in _KEYS or not isinstance(value, _KEYS[key]):
            raise ConfigError(f"{path}: {key} = {value!r} is not known", f"known: {', '.join(_KEYS)}")
    if values.pop("schema", 1) != 1:
        raise ConfigError(f"{path} has a newer schema", "update edgellm")
    return Wish(**values)


def apply(wish: Wish, state: Path = STATE, verify_s: float = VERIFY_S) -> list[str]:
    """What was changed, in sentences. Remembers in `state` what was before. Raises EdgeError."""
    done: list[str] = []
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = _before(state)  # of an earlier apply: what was there before that still counts
    try:
        mode = _active()
        if wish.mode and (mode is None or mode.name != wish.mode):
            before.setdefault("mode", mode.name if mode else None)
            done.append(f"power mode {set_mode(wish.mode, verify_s).name} (was {mode.name if mode else 'unknown'})")
        if wish.jetson_clocks and not locked():
            _run("jetson_clocks", "--store", str(state / "clocks"))
            before["clocks"] = True
            _run("jetson_clocks")
            _verify(locked, verify_s, "jetson_clocks left the clocks as they were")
            done.append("clocks locked")
        if wish.persistence:
            for uuid in _persistence(True):
                before["persistence"] = sorted({*before.get("persistence", []), uuid})
                done.append(f"persistence mode on for {uuid}")
    finally:
        # Also after a failure half way: what was changed can be put back.
        (state / "before.json").write_text(json.dumps(before))
    return done


def restore(wish: Wish, state: Path = STATE, verify_s: float = VERIFY_S) -> list[str]:
    """Puts back what `apply` changed, if the wish says so."""
    before = _before(state) if wish.restore else {}
    done: list[str] = []
    if before.get("clocks"):
        _run("jetson_clocks", "--restore", str(state / "clocks"))
        done.append("clocks restored")
    if before.get("mode"):
        done.append(f"power mode {set_mode(before['mode'], verify_s).name} restored")
    if before.get("persistence"):
        done += [f"persistence mode off for {uuid}" for uuid in _persistence(False, before["persistence"])]
    if wish.restore:
        (state / "before.json").unlink(missing_ok=True)
    return done


def _before(state: Path) -> dict[str, Any]:
    try:
        known: dict[str, Any] = json.loads((state / "before.json").read_text())
    except (OSError, ValueError):
        return {}
    return known


def set_mode(name: str, verify_s: float = VERIFY_S) -> PowerMode:
    """Raises ConfigError for a name that this board does not have, TemporaryError when it did not take."""
    known = power.modes(_text(_CONF) or "")
    wanted = next((mode for mode in known if mode.name == name), None)
    if wanted is None:
        names = ", ".join(mode.name for mode in known) or "none"
        raise ConfigError(f"this board has no power mode {name!r}", f"its modes: {names}")
    _run("nvpmodel", "-m", str(wanted.id))
    _verify(
        lambda: _active() == wanted,
        verify_s,
        f"nvpmodel did not take {name}",
        "some changes need a reboot: try `sudo reboot`",
    )
    return wanted


def locked() -> bool:
    """As jetson_clocks leaves them: lowest clock = highest, on the GPU and on every core."""
    gpu = find_gpu("/sys")
    return bool(gpu is not None and gpu.locked() and cpu_locked("/sys"))


def _active() -> PowerMode | None:
    return power.active(_text(_STATUS), _text(_CONF))


def _persistence(on: bool, only: list[str] | None = None) -> Iterator[str]:
    """UUIDs of the GPUs whose persistence mode was changed, each as soon as it was: another may fail."""
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
                    raise TemporaryError(f"{uuid} did not take persistence mode")
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
    """Without a terminal, so that nvpmodel cannot stop and ask. Raises UnavailableError."""
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
        raise UnavailableError(f"cannot run {program}: {error}", "this is for NVIDIA Jetson images") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UnavailableError(f"{program} failed: {said[-1] if said else f'exit status {done.returncode}'}")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def main(arguments: list[str], state: Path = STATE, verify_s: float = VERIFY_S) -> int:
    if arguments not in (["apply"], ["restore"]):
        print("usage: python -m edge.service.power apply | restore", file=sys.stderr)
        return 64
    try:
        wish = read_wish(WISH)
        change = apply if arguments == ["apply"] else restore
        done = change(wish, state, verify_s)
    except EdgeError as error:
        print(f"error: {error}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    for line in done or ["nothing to change"]:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
