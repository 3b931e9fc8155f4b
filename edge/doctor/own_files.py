"""Checks of edgellm's own folders, modes and sockets, which `--fix` repairs."""

from __future__ import annotations

import grp
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from edge.doctor.check import Finding, ok, warn
from edge.doctor.facts import DoctorFacts, OwnFile
from edge.linux.files import visible
from edge.paths import Folders

_FIX = "edgellm doctor --fix"


def ours(facts: DoctorFacts) -> Finding | None:
    """Report that there is nothing to repair."""
    return ok("folders exist, modes are right, no stale socket") if facts.live and not facts.leftovers else None


def modes(facts: DoctorFacts) -> list[Finding]:
    """Warn of files that other users may read or write."""
    wrong = [file for file in facts.leftovers if file.kind == "mode"]
    return [warn(f"{file.path} is open to others", f"its mode should be {file.mode:o}", _FIX) for file in wrong]


def sockets(facts: DoctorFacts) -> list[Finding]:
    """Warn of stale sockets."""
    stale = [file.path for file in facts.leftovers if file.kind == "socket"]
    return [warn(f"{path} belongs to a process that has ended", "the next start removes it", _FIX) for path in stale]


def missing_folders(facts: DoctorFacts) -> Finding | None:
    """Name the folders that do not exist yet."""
    missing = [str(file.path) for file in facts.leftovers if file.kind == "folder"]
    return ok(f"created at the first start, or now with --fix: {', '.join(missing)}") if missing else None


CHECKS = {"files.ours": ours, "files.mode": modes, "files.socket": sockets, "files.folders": missing_folders}


# Find edgellm's own files that `--fix` can repair: missing folders, open modes, stale sockets.

SERVICE_GROUP = "edgellm"
_PRIVATE_FILE, _GROUP_FILE, _PRIVATE_FOLDER, _PUBLIC_FOLDER = 0o600, 0o640, 0o700, 0o755
_CONNECT_S = 0.2  # a unix socket connects at once, or its backlog is full


def find_leftovers(folders: Folders, running: bool, service: bool = False) -> tuple[OwnFile, ...]:
    """Return what `--fix` would change.

    `running`: the instance's lock is held, so no socket is stale. `service`: systemd creates the folders.
    """
    missing = () if service else _missing(folders)
    return (*missing, *_too_open(folders), *(() if running else _stale(folders)))


def _missing(folders: Folders) -> Iterator[OwnFile]:
    """Yield missing folders: run, config and state private, models, engines and caches readable by all users."""
    private = {folders.run, folders.config, folders.state}
    for folder in (folders.data, folders.models, folders.state, folders.cache, folders.run, folders.config):
        if not visible(folder):
            yield OwnFile("folder", folder, _PRIVATE_FOLDER if folder in private else _PUBLIC_FOLDER)


def _too_open(folders: Folders) -> Iterator[OwnFile]:
    """Yield files with too many permissions: keys are secrets, and a writer of the run folder could replace sockets."""
    keys = folders.config / "keys.toml"
    allowed = _GROUP_FILE if _group(keys) == SERVICE_GROUP else _PRIVATE_FILE
    if _mode(keys) & ~allowed:
        yield OwnFile("mode", keys, _mode(keys) & allowed)
    if _mode(folders.run) & 0o022:
        yield OwnFile("mode", folders.run, _mode(folders.run) & ~0o022)


def _stale(folders: Folders) -> Iterator[OwnFile]:
    if not os.access(folders.instance_run, os.R_OK | os.X_OK):  # missing, or a service that this user may not look into
        return
    for path in sorted(folders.instance_run.glob("*.sock")):
        if path.is_socket() and not _answers(path):
            yield OwnFile("socket", path, 0)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_S)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # busy, or closed to this user: keep it
        return True


def _group(path: Path) -> str | None:
    try:
        return grp.getgrgid(path.stat().st_gid).gr_name
    except (OSError, KeyError):
        return None


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0
