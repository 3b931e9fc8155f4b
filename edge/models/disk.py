"""Free space and streaming copies for pull, import and quantize."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from edge.errors import DoesNotFitError
from edge.models.progress import TransferMeter
from edge.units import format_bytes

_SPARE_BYTES = 64 * 1024 * 1024  # a full disk breaks more than a pull
CHUNK_BYTES = 1024 * 1024


def need_space(folder: Path, count: int) -> None:
    """Raises DoesNotFitError when `count` more bytes would fill the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < count + _SPARE_BYTES:
        raise DoesNotFitError(
            f"{format_bytes(count)} are needed under {folder}, {format_bytes(free)} are free",
            "make room (edgellm model list; edgellm model remove NAME), or take a smaller quant",
        )


def copy(source: IO[bytes], target: IO[bytes], meter: TransferMeter) -> str:
    """Copy a stream to its end and return the SHA-256 in hex."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
        meter.add(len(chunk))
    return digest.hexdigest()


# Child processes that end with their parent, also after SIGKILL, so that none writes while the next attempt does.

# The death signal survives exec; the parent is looked at again in case it was gone before the signal was set.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return `command` for a process that dies with the calling process (PR_SET_PDEATHSIG, prctl(2))."""
    return [sys.executable, "-I", "-c", _TIED, str(os.getpid()), *command]
