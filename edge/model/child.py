"""Child processes that end with us, even when we are killed: they must not go on writing behind the next attempt."""

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
    """`command` as one whose process dies when the calling thread's process does (PR_SET_PDEATHSIG)."""
    return [sys.executable, "-I", "-c", _TIED, str(os.getpid()), *command]
