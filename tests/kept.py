"""Folders of the test cache, each whole or made again: a run may be killed, and power may be cut, at any moment."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, in a file beside it. The kernel gives it back when its holder dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept(folder: Path, make: Callable[[Path], object], *, stamp: str = ".complete", key: str = "") -> Path:
    """Return a folder that `make` fills, once. One that is half made, or of another `key`, is removed and made anew.

    `make` gets the path and creates the folder, as mmdebstrap and venv want it. The stamp is a file in the folder.
    """
    with locked(folder):
        if not _is_whole(folder / stamp, key):
            # First of all: a removal that is cut off must not leave the stamp of what it removed.
            (folder / stamp).unlink(missing_ok=True)
            remove(folder)
            make(folder)
            seal(folder / stamp, key)
    return folder


@contextmanager
def building(cache: Path) -> Iterator[None]:
    """Build in a cache that edgellm fills. Where power was cut in the middle, what was compiled until then is removed.

    ninja takes an object for made that the file system has emptied; ccache checks what it has.
    """
    marker = cache / ".building"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    cache.mkdir(parents=True, exist_ok=True)
    if marker.exists() and marker.read_text() != boot:
        for name in ("build", "tools"):
            remove(cache / name)
    with marker.open("w") as file:
        file.write(boot)
        file.flush()
        os.fsync(file.fileno())
    yield
    os.sync()
    marker.unlink(missing_ok=True)


def seal(stamp: Path, key: str = "") -> None:
    """Write the stamp after all that it stands for: ext4 may write a later small file before earlier large ones."""
    os.sync()
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(key)


def remove(folder: Path) -> None:
    """Remove a folder if it is there, nothing of what is mounted in it. Raises OSError where that cannot be."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [path for path in mounts if path.startswith(f"{folder.resolve()}/")]
    for path in reversed(inside):
        if subprocess.run(["umount", path], check=False).returncode:
            raise OSError(f"{folder} cannot be made anew: {path} is mounted in it")
    if folder.exists():
        shutil.rmtree(folder)


def python_of(folder: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return folder / "bin" / "python"


def _is_whole(stamp: Path, key: str) -> bool:
    python = python_of(stamp.parent)
    # An environment outlives the Python that it was made with, when that is replaced by a newer one.
    dangling = python.is_symlink() and not python.exists()
    return stamp.is_file() and stamp.read_text() == key and not dangling
