"""The remembered launch: the engine commands of the last READY start, reused before anything is planned.

`up` compares the command line, the environment, the files that the plan was made from and the board. If none differs it
spawns at once; the plan is made while the engine loads, and has the last word. Imported before everything else of the
daemon, so: no msgspec, no dataclasses, no planner.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from edge import __version__
from edge.linux.files import read_bounded
from edge.paths import Folders

SCHEMA = 1
# Variables that change a plan or the paths of its inputs. Others differ between a login and a service without effect.
_PREFIXES = ("EDGELLM_", "CUDA_", "NVIDIA_", "GGML_", "LLAMA_", "OMP_", "GOMP_")
_NAMES = ("HOME", "PATH", "TMPDIR", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
_XDG = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
_SECRET = ("API_KEY", "TOKEN", "SECRET", "PASSWORD")

_OPTIONAL = type(None)
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("argv", "listen", "nodes", "limits"), list),
    **dict.fromkeys(("env", "board", "models", "held_bytes"), dict),
    **dict.fromkeys(("cwd", "version"), str),
    **dict.fromkeys(("at", "cold_below"), (int, float)),
    "files": dict,  # a list in an EngineCommand
    "tls": bool,
    "needed_bytes": int,
    "prefetch_least_bytes": (int, _OPTIONAL),
    "cold_argv": (list, _OPTIONAL),
}
_OF_TEXT = ("argv", "env", "listen", "nodes", "files", "cold_argv")
Identity = list[int] | None  # of a file: size, mtime in ns, inode; of a folder: mtime, inode; None: absent


class EngineCommand(NamedTuple):
    """How an engine is executed. `limits`: nice, oom_score_adj, CPUs. `held_bytes`: what it takes at most, by domain.

    `files`: of its model, in the order of their reading. `prefetch_least_bytes`: they are read ahead of it while so
    much memory is available; None: they are not. `cold_argv`: in place of `argv` while less than `cold_below` (0…1) of
    them is in the page cache; None: never.
    """

    argv: list[str]
    env: dict[str, str]
    limits: list[Any]
    files: list[str]
    prefetch_least_bytes: int | None
    held_bytes: dict[str, int]
    cold_argv: list[str] | None = None
    cold_below: float = 0.0


class RememberedLaunch(NamedTuple):
    """A launch that became READY, with the identity of everything that it was planned from."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    listen: list[str]
    tls: bool
    files: dict[str, Identity]
    board: dict[str, Any]
    nodes: list[str]  # device nodes that must open
    needed_bytes: int  # of host or unified memory, with the reserve
    models: dict[str, EngineCommand]
    at: float = 0.0
    version: str = __version__

    def write(self, path: Path) -> None:
        """Replace the record in one step: a kill at any moment leaves the old one or this one. Raises OSError."""
        from edge.linux.files import write_atomic

        document = {"schema": SCHEMA, **self._asdict()}
        document["models"] = {name: model._asdict() for name, model in self.models.items()}
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps(document, separators=(",", ":")) + "\n")


def record_path(folders: Folders) -> Path:
    return folders.instance_state / "launch.json"


def read_record(path: Path) -> RememberedLaunch | None:
    """Return the remembered launch; None if there is none or it is damaged or of another schema.

    Its commands are executed as they stand, so a file that another user could have written is none.
    """
    try:
        document = json.loads(read_bounded(path, mine=True))
        if document.pop("schema") != SCHEMA:
            return None
        models = {name: EngineCommand(**model) for name, model in document.pop("models").items()}
        launch = RememberedLaunch(**document, models=models)
        _check_types(launch._asdict(), _TYPES)
        for model in models.values():
            _check_types(model._asdict(), {**_TYPES, "files": list})
            _check_command(model)
        return launch if models else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _check_types(values: dict[str, Any], types: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise TypeError or ValueError for a field of another type, and for text that no argument or path can hold."""
    texts: list[Any] = []
    for name, value in values.items():
        if not isinstance(value, types[name]):
            raise TypeError(name)
        if name in _OF_TEXT and value is not None:
            texts += values[name].values() if name == "env" else values[name]
    if any(b"\0" in os.fsencode(each) for each in texts):
        raise ValueError("a zero byte")


def _check_command(command: EngineCommand) -> None:
    """Raise TypeError or ValueError for what no process can be started with."""
    nice, oom_score_adj, cpus = command.limits
    if not all(isinstance(each, int) for each in (nice, oom_score_adj, *cpus, *command.held_bytes.values())):
        raise TypeError("a number")
    if not (command.argv and command.files) or command.cold_argv == []:
        raise ValueError("an empty list")
    if any(not name or "=" in name or "\0" in name for name in command.env):
        raise ValueError("the name of a variable")


def keep(folders: Folders, launch: RememberedLaunch) -> None:
    """Write the record if it differs from the former one. A full or read-only disk costs only the record."""
    former = read_record(record_path(folders))
    if former is None or former._replace(at=launch.at) != launch:
        with suppress(OSError):
            launch.write(record_path(folders))


def forget(folders: Folders) -> None:
    """Remove the record: the next start plans first."""
    with suppress(OSError):
        record_path(folders).unlink()


def relevant(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change a plan, without secrets."""
    return {
        name: value
        for name, value in sorted(env.items())
        if (name.startswith(_PREFIXES) or name in _NAMES or name in _XDG) and not any(word in name for word in _SECRET)
    }


def working_directory() -> str:
    """Return the current folder, empty where it was removed: a shell stays in a folder that is gone."""
    try:
        return os.getcwd()  # noqa: PTH109 - Path.cwd() is os.getcwd()
    except OSError:
        return ""


def why_not(launch: RememberedLaunch, argv: list[str], env: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the first reason not to use a remembered launch, or None if everything is as it was."""
    if launch.version != __version__:
        return f"it is of edgellm {launch.version}"
    if launch.argv != argv:
        return "the command line differs"
    if launch.cwd != working_directory():
        return "the working directory differs"
    now = relevant(env)
    for name in sorted({*now, *launch.env}):
        if now.get(name) != launch.env.get(name):
            return f"the environment variable {name} differs"
    return changed(launch, root)


def changed(launch: RememberedLaunch, root: Path = Path("/")) -> str | None:
    """Return what is not as it was on this machine: a file, the board, a device node, or the memory."""
    for path, before in launch.files.items():
        if identity(path) != before:
            return f"{path} {'is missing' if before and identity(path) is None else 'changed'}"
    board = board_identity(root)
    for fact in board:
        if board[fact] != launch.board.get(fact):
            return f"the {fact} changed: {launch.board.get(fact)} to {board[fact]}"
    for node in launch.nodes:
        if not os.access(node, os.R_OK | os.W_OK):
            return f"the device node {node} does not open"
    available = available_bytes(root) or 0
    if available < launch.needed_bytes:
        return f"{launch.needed_bytes >> 20} MiB of memory are needed and {available >> 20} MiB available"
    return None


def next_start(folders: Folders) -> dict[str, Any] | None:
    """Return which command line would spawn at once, and why not if it would not; None if no launch is remembered."""
    record = read_record(record_path(folders))
    if record is None:
        return None
    return {"argv": ["up", *record.argv], "at": record.at, "plans_first_because": changed(record)}


def identity(path: str) -> Identity:
    try:
        found = os.stat(path)  # noqa: PTH116 - pathlib costs twice the time for each of some hundred files
    except OSError:
        return None
    # A folder's size says nothing about its entries on most file systems.
    size = [] if found.st_mode & 0o170000 == 0o040000 else [found.st_size]
    return [*size, found.st_mtime_ns, found.st_ino]


def board_identity(root: Path = Path("/")) -> dict[str, Any]:
    """Return the facts that tell one board, and one configuration of it, from another. Milliseconds at most."""
    model = _text(root / "proc/device-tree/model") or _text(root / "sys/devices/virtual/dmi/id/product_name")
    gpus = root / "proc/driver/nvidia/gpus"
    found = sorted(gpus.glob("*/information")) if gpus.is_dir() else []
    uuids = [line.split()[-1] for path in found for line in _text(path).splitlines() if line.startswith("GPU UUID")]
    driver = (_text(root / "proc/driver/nvidia/version").splitlines() or [""])[0]
    return {
        "model": model.rstrip("\0\n"),
        "memory": _meminfo(root).get("MemTotal"),
        "set of GPUs": uuids,
        "driver version": driver,
        "number of usable CPUs": len(os.sched_getaffinity(0)),
        "CPU quota": _text(root / "sys/fs/cgroup/cpu.max").strip(),
        "user": os.geteuid(),
        "Python": sys.executable,
    }


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return MemAvailable, which counts page cache that the kernel can drop."""
    return _meminfo(root).get("MemAvailable")


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in _text(root / "proc/meminfo").splitlines()[:3]:  # MemTotal, MemFree, MemAvailable
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- which files a plan is made from ---------------------------------------------------------------------------------

_CODE = (".py", ".pyc", ".so", ".pth")
_PSEUDO = ("/proc/", "/sys/", "/dev/")
_OPENED: list[set[str]] = []  # the active traces; a hook cannot be removed (PEP 578)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not _OPENED:
        return
    if event == "open":
        path, mode, flags = arguments
        written = flags & (os.O_WRONLY | os.O_RDWR) if isinstance(flags, int) else mode not in (None, "r", "rb")
        if written:
            return
    elif event in ("os.listdir", "os.scandir"):
        path = arguments[0]
    else:
        return
    if isinstance(path, (str, os.PathLike)):
        _OPENED[-1].add(os.fspath(path))


@contextmanager
def trace_inputs(folders: Folders) -> Iterator[dict[str, Identity]]:
    """Collect the files and folders that the block opens for reading, or looks for, as they are at its end.

    Left out are code, what this instance writes itself (its records of starts, headers that it has read), and pseudo
    file systems, whose facts are in `board_identity`.
    """
    if not _hooked():
        sys.addaudithook(_on_event)
    opened: set[str] = set()
    inputs: dict[str, Identity] = {}
    _OPENED.append(opened)
    try:
        yield inputs
    finally:
        _OPENED.remove(opened)
        left_out = (*_PSEUDO, str(folders.instance_state), str(folders.run), str(folders.kept_headers))
        packages = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
        for path in map(os.path.abspath, opened):
            found = identity(path)
            code = path.endswith(_CODE) or (path.startswith(packages) and found is not None and len(found) == 2)
            if not (code or path.startswith(left_out)):
                inputs[path] = found


_hook_added = False


def _hooked() -> bool:
    global _hook_added
    before, _hook_added = _hook_added, True
    return before
