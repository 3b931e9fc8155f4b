"""What of our own files is not as it should be: the only things that `--fix` touches."""

from __future__ import annotations

import grp
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from edge.doctor.facts import OurFile
from edge.folders import Folders

SERVICE_GROUP = "edgellm"
_PRIVATE_FILE, _GROUP_FILE, _PRIVATE_FOLDER, _PUBLIC_FOLDER = 0o600, 0o640, 0o700, 0o755
_CONNECT_S = 0.2


def read(folders: Folders, running: bool, service: bool = False) -> tuple[OurFile, ...]:
    """`running`: our lock is held, so no socket is stale. `service`: systemd makes these folders, with its owners."""
    missing = () if service else _missing(folders)
    return (*missing, *_too_open(folders), *(() if running else _stale(folders)))


def _missing(folders: Folders) -> Iterator[OurFile]:
    """Run and config are private; models, engines and caches may be read by others of this machine."""
    private = {folders.run, folders.config, folders.state}
    for folder in (folders.data, folders.models, folders.state, folders.cache, folders.run, folders.config):
        if not folder.exists():
            yield OurFile("folder", folder, _PRIVATE_FOLDER if folder in private else _PUBLIC_FOLDER)


def _too_open(folders: Folders) -> Iterator[OurFile]:
    """Keys are secrets; whoever can write to the run folder can take our place."""
    keys = folders.config / "keys.toml"
    allowed = _GROUP_FILE if _group(keys) == SERVICE_GROUP else _PRIVATE_FILE
    if _mode(keys) & ~allowed:
        yield OurFile("mode", keys, _mode(keys) & allowed)
    if _mode(folders.run) & 0o022:
        yield OurFile("mode", folders.run, _mode(folders.run) & ~0o022)


def _stale(folders: Folders) -> Iterator[OurFile]:
    if not folders.instance_run.is_dir():
        return
    for path in sorted(folders.instance_run.glob("*.sock")):
        if path.is_socket() and not _answers(path):
            yield OurFile("socket", path, 0)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_S)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # busy, or not ours to try: it stays
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
