"""Child processes that end with their parent, also after SIGKILL, so that none writes while the next attempt does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

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
