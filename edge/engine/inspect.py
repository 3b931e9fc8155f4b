"""Make an Engine of any llama-server binary by its --version, --help and --list-devices; the answers are cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import MsgspecError, convert, to_builtins
from msgspec.structs import replace

from edge.board.device_nodes import GPU_GROUPS, present
from edge.engine.binary import traits
from edge.engine.engine import Device, Engine, era_of
from edge.engine.output import parse_devices, parse_help, parse_version
from edge.errors import EngineBrokenError, EngineMissingError
from edge.linux.files import open_to_others, read_json, write_shared
from edge.linux.tree import Tree
from edge.resources import data_dir, load_toml

# Increase it when Engine gets another form or the answers another meaning: old cache files are then ignored.
_CACHE_SCHEMA = 5
# The kernel's overflow uid, which is `nobody` on Debian and Ubuntu.
_NOBODY = 65534
# systemd/edgellm.sysusers and the installer create it.
_SERVICE_USER = "edgellm"
# --help takes 10 ms; a cold SD card needs seconds to read a binary of 70 MB.
_ASK_TIMEOUT_S = 20.0
_OUTPUT_MAX_BYTES = 4 << 20  # --help of llama-server has 60 kB
# The first CUDA contact took 17 s on one board.
_DEVICES_TIMEOUT_S = 90.0
# glibc's ld.so, elf/dl-error-skeleton.c.
_MISSING_LIBRARY = "error while loading shared libraries"
# Where container runtimes, WSL2 and JetPack 5 and 6 put libcuda.so.1.
_DRIVER_FOLDERS = (
    "usr/local/nvidia/lib64",
    "usr/lib/wsl/lib",
    "usr/lib/aarch64-linux-gnu/nvidia",
    "usr/lib/aarch64-linux-gnu/tegra",
)
_ENVIRONMENT = {
    "LC_ALL": "C",
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    # Some servers die at --help when they can find no cache folder.
    "LLAMA_CACHE": "/nonexistent/cache",
    "HF_HUB_CACHE": "/nonexistent/cache",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}


def inspect(path: Path, cache_dir: Path | None, *, root: Path = Path("/"), bare: bool = False) -> Engine:
    """Run the binary, or read the cache (key: path, mtime, size, the GPUs present under `root`).

    `bare`: with an empty environment and no search for its libraries, as the proof of a build requires.
    Raises EngineMissingError when there is no such file, EngineBrokenError if it is not a llama-server that runs here.
    """
    path = path.absolute()
    try:
        stat = path.stat()
    except OSError as error:
        raise EngineMissingError(f"no engine at {path}: {error.strerror}") from error
    key = {
        "schema": _CACHE_SCHEMA,
        "path": str(path),
        "mtime_ns": stat.st_mtime_ns,
        "size": stat.st_size,
        "gpus": gpus_present(root),
    }
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    file = cache_dir / f"{digest[:16]}.json" if cache_dir else None
    engine = _cached(file, key)
    if engine is None:
        engine = _ask(path, digest[:8], {} if bare else _ENVIRONMENT, root)
        # A CUDA engine that saw no device is asked again next time: the driver may only have been late.
        if file is not None and (engine.devices or not engine.cuda):
            with contextlib.suppress(OSError):
                write_shared(file, json.dumps({"key": key, "engine": to_builtins(engine)}))
    # Not of the cache: the table of eras comes with edgellm.
    return replace(engine, era=era_of(engine.flags, load_toml(data_dir("build") / "llama-server.toml")["eras"]))


def gpus_present(root: Path) -> list[str]:
    """List PCI GPUs of NVIDIA's driver and Tegra's device nodes; a change makes a cached device list stale."""
    found = list(present(Tree(root)))
    with contextlib.suppress(OSError):
        found += sorted(entry.name for entry in (root / "proc/driver/nvidia/gpus").iterdir())
    return found


def _cached(file: Path | None, key: dict[str, Any]) -> Engine | None:
    if file is None:
        return None
    try:
        kept = read_json(file)
        return convert(kept["engine"], Engine) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, MsgspecError):
        return None


def _ask(path: Path, suffix: str, environment: dict[str, str], root: Path) -> Engine:
    """Ask the binary. `suffix` ends the engine's id: two binaries may have one version."""
    library_path, version_text = _first_answer(path, environment)
    version = parse_version(version_text)
    answer = run_probe(path, ["--help"], library_path, environment=environment)
    if answer.returncode < 0:
        raise EngineBrokenError(f"{path} --help ended by {how_ended(answer.returncode)}", _hint(answer.returncode))
    flags = parse_help(answer.stdout)
    if "--model" not in flags or "--host" not in flags:
        raise EngineBrokenError(f"{path} is not a llama-server: its --help names neither --model nor --host")
    found = traits(path)
    devices: tuple[Device, ...] = ()
    if "--list-devices" in flags:
        devices = _devices(path, library_path, environment)
    # A second look only for CUDA engines: each probe of a driver that is missing costs seconds.
    if found.cuda and "--list-devices" in flags and not devices:
        devices, library_path = _with_the_drivers_folder(path, library_path, environment, root)
    return Engine(
        id=f"path-{(version.commit or version.number) if version else 'unknown'}-{suffix}",
        kind="llama-server",
        path=str(path),
        version=version.number if version else None,
        commit=version.commit if version else None,
        flags=flags,
        devices=devices,
        cuda=found.cuda,
        no_vmm=found.no_vmm,
        built_for=found.built_for,
        progress_protocol=found.progress_protocol,
        library_path=library_path,
        rpc=found.rpc,
    )


def _devices(path: Path, library_path: str | None, environment: dict[str, str]) -> tuple[Device, ...]:
    done = run_probe(path, ["--list-devices"], library_path, timeout_s=_DEVICES_TIMEOUT_S, environment=environment)
    return parse_devices(done.stdout + done.stderr)


def _with_the_drivers_folder(
    path: Path, library_path: str | None, environment: dict[str, str], root: Path
) -> tuple[tuple[Device, ...], str | None]:
    """Look for devices with libcuda's usual folders: a container's is often on LD_LIBRARY_PATH only."""
    for folder in _DRIVER_FOLDERS:
        if not (root / folder / "libcuda.so.1").exists():
            continue
        wider = ":".join(filter(None, (library_path, str(root / folder))))
        devices = _devices(path, wider, environment)
        if devices:
            return devices, wider
    return (), library_path


def _first_answer(path: Path, environment: dict[str, str]) -> tuple[str | None, str]:
    """Return (library path, text) of --version, with the libraries beside the binary if it needs them (FC-10)."""
    # llama.cpp's own release archives keep the .so files beside the binary and rely on an RPATH that some packers
    # strip.
    beside = ":".join(str(folder) for folder in (path.parent, path.parent.parent / "lib"))
    error = ""
    for library_path in (None, beside) if environment else (None,):
        result = run_probe(path, ["--version"], library_path, environment=environment)
        text = result.stdout + result.stderr
        if result.returncode == 0:
            return library_path, text
        error = (text.strip().splitlines() or [""])[-1]
        if _MISSING_LIBRARY not in text:
            break
    how = how_ended(result.returncode)
    raise EngineBrokenError(f"{path} does not run ({how}): {error}".removesuffix(": "), _hint(result.returncode))


def how_ended(code: int) -> str:
    """Return `exit code 3`, or the signal that ended a process: `SIGILL`."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _hint(code: int) -> str:
    if -code == signal.SIGILL:
        return "it was compiled for another CPU: build it here, or with `edgellm build --no-native`"
    return "build it here (`edgellm build`), or import a whole engine (`edgellm engine import`)"


def run_probe(
    path: Path,
    arguments: list[str],
    library_path: str | None = None,
    *,
    timeout_s: float = _ASK_TIMEOUT_S,
    environment: Mapping[str, str] = _ENVIRONMENT,
) -> subprocess.CompletedProcess[str]:
    """Run the binary from / with our own environment and no input; as root, under `identity`."""
    whole = {**environment, "LD_LIBRARY_PATH": library_path} if library_path else dict(environment)
    user, group, groups = identity(path)
    options = {"cwd": "/", "env": whole, "user": user, "group": group, "extra_groups": groups}
    try:
        return _run_bounded([str(path), *arguments], timeout_s, options)
    except subprocess.TimeoutExpired as error:
        raise EngineBrokenError(f"{path} {arguments[0]} did not answer within {timeout_s:.0f} s") from error
    except OSError as error:
        raise EngineBrokenError(f"{path} cannot be started: {error.strerror}") from error


def _run_bounded(command: list[str], timeout_s: float, options: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run a program as subprocess.run() does, which keeps all that it prints in memory.

    Raises EngineBrokenError for one that prints too much, and what subprocess.run() raises.
    """
    pipe, end_s = subprocess.PIPE, time.monotonic() + timeout_s
    printed = {"stdout": bytearray(), "stderr": bytearray()}
    with (
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True, **options
        ) as child,
        selectors.DefaultSelector() as waiting,
    ):
        try:
            for name in printed:
                waiting.register(getattr(child, name), selectors.EVENT_READ, name)
            while waiting.get_map():
                ready = waiting.select(end_s - time.monotonic())
                if not ready:
                    raise subprocess.TimeoutExpired(command, timeout_s)
                for key, _ in ready:
                    chunk = os.read(key.fd, 1 << 16)
                    printed[key.data] += chunk
                    if not chunk:
                        waiting.unregister(key.fileobj)
                if sum(map(len, printed.values())) > _OUTPUT_MAX_BYTES:
                    raise EngineBrokenError(f"{command[0]} {command[1]} prints without end")
            code = child.wait(max(0.0, end_s - time.monotonic()))
        except BaseException:  # Ctrl-C too: the program has a session of its own and would live on
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
    out, err = (text.decode(errors="replace") for text in printed.values())
    return subprocess.CompletedProcess(command, code, out, err)


class Identity(NamedTuple):
    """User, group and groups of a child process; None keeps those of this process."""

    user: int | None = None
    group: int | None = None
    groups: list[int] | None = None


_RUN_AS: ContextVar[Identity | None] = ContextVar("run_as", default=None)


@contextlib.contextmanager
def run_as(who: Identity | None) -> Iterator[None]:
    """Run every engine in the block as this user."""
    token = _RUN_AS.set(who)
    try:
        yield
    finally:
        _RUN_AS.reset(token)


def unprivileged() -> Identity | None:
    """Return the user for binaries of unknown origin: the service's, else `nobody`; None unless this is root."""
    if os.geteuid() != 0:
        return None
    import grp
    import pwd

    gpu = []
    for group in GPU_GROUPS:  # without them no engine finds a GPU, and its proof would fail
        with contextlib.suppress(KeyError):
            gpu.append(grp.getgrnam(group).gr_gid)
    for name in (_SERVICE_USER, "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            groups = {*os.getgrouplist(name, entry.pw_gid), *gpu}
            return Identity(entry.pw_uid, entry.pw_gid, sorted(groups))
    return Identity(_NOBODY, _NOBODY, gpu)


def identity(path: Path) -> Identity:
    """Return the user to run a binary as: root runs what others may write as its owner or `nobody`."""
    chosen = _RUN_AS.get()
    if chosen is not None or os.geteuid() != 0:
        return chosen or Identity()
    stat = path.stat()
    parent = path.parent.stat()
    owner = stat.st_uid or parent.st_uid
    if owner == 0 and not open_to_others(stat) and not open_to_others(parent):
        return Identity()
    owner = owner or _NOBODY
    import pwd  # only here: root with a user's file

    try:
        entry = pwd.getpwuid(owner)
    except KeyError:
        return Identity(owner, stat.st_gid, [])
    return Identity(owner, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid))
