"""The errors that reach an operator, each with its exit code (sysexits.h) and a hint.

EdgeError                    1   failed
├── UsageError              64   the command line is wrong
├── BadDataError            65   a file has the wrong content
│   └── BadModelError       65   ... a GGUF file
├── UnavailableError        69   not running, not reachable, not found
│   ├── NotRunningError     69   no edgellm answers in this run folder
│   ├── AlreadyRunningError 69   another edgellm holds this run folder
│   ├── AddressInUseError   69   another process listens on the address
│   ├── EngineMissingError  69   no engine fits the plan
│   └── ModelMissingError   69   no such model in the store
├── BugError                70   our fault
├── TemporaryError          75   a later attempt may succeed
│   ├── DoesNotFitError     75   memory or disk is too small now
│   ├── DeviceMissingError  75   the GPU does not answer, or not yet
│   │   ├── RemoteMissingError 75 an rpc-server of [[device]] does not answer
│   │   └── DiskHangsError  75   a disk does not answer a read
│   └── TimedOutError       75
└── ConfigError             78   a profile or edgellm.toml is wrong
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class EdgeError(Exception):
    """One sentence on the fault. `hint` is one next step, `table` details for a terminal; `kind` never changes."""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "failed"

    def __init__(self, message: str, hint: str | None = None, *, table: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.table = table


class UsageError(EdgeError):
    exit_code = 64
    kind = "usage"


class BadDataError(EdgeError):
    exit_code = 65
    kind = "bad_data"


class BadModelError(BadDataError):
    kind = "bad_model"


class UnavailableError(EdgeError):
    exit_code = 69
    kind = "unavailable"


class NotRunningError(UnavailableError):
    kind = "not_running"


class AlreadyRunningError(UnavailableError):
    kind = "already_running"


class AddressInUseError(UnavailableError):
    kind = "address_in_use"


class EngineMissingError(UnavailableError):
    """`recipe` is the argument for `edgellm build -p`; None if a build would not help."""

    kind = "engine_missing"

    def __init__(self, message: str, hint: str | None = None, *, recipe: str | None = None) -> None:
        super().__init__(message, hint)
        self.recipe = recipe


class ModelMissingError(UnavailableError):
    kind = "model_missing"


class BugError(EdgeError):
    exit_code = 70
    kind = "bug"


class TemporaryError(EdgeError):
    exit_code = 75
    kind = "temporary"


class DoesNotFitError(TemporaryError):
    kind = "does_not_fit"


class DeviceMissingError(TemporaryError):
    """`patience_s`: seconds after boot within which the driver may still bring the device up."""

    kind = "device_missing"

    def __init__(
        self, message: str, hint: str | None = None, *, table: str | None = None, patience_s: float = 0.0
    ) -> None:
        super().__init__(message, hint, table=table)
        self.patience_s = patience_s


class RemoteMissingError(DeviceMissingError):
    """An rpc-server that does not answer. `busy`: it accepts connections, and serves another client."""

    kind = "remote_missing"

    def __init__(self, message: str, hint: str | None = None, *, patience_s: float = 0.0, busy: bool = False) -> None:
        super().__init__(message, hint, patience_s=patience_s)
        self.busy = busy


class DiskHangsError(DeviceMissingError):
    """A disk that does not answer: a dead drive, or a network file system whose server is away."""

    kind = "disk_hangs"


def read_hangs(path: str, waited_s: float, patience_s: float) -> DeviceMissingError:
    """Return the error for a read of `path` that has not returned for `waited_s`."""
    what = f"a read of {path} has not returned for {waited_s:.0f} s"
    if path.startswith(("/proc/", "/sys/", "/dev/")):
        hint = "a driver hangs behind this file: see `dmesg`; its module needs to be reloaded, or the board a reboot"
        return DeviceMissingError(what, hint, patience_s=patience_s)
    hint = "its disk does not answer: see `dmesg`, and `findmnt -T` with this path"
    return DiskHangsError(what, hint, patience_s=patience_s)


class TimedOutError(TemporaryError):
    kind = "timed_out"


class ConfigError(EdgeError):
    exit_code = 78
    kind = "config"


# Errors of engines and builds.


class EngineBrokenError(BadDataError):
    """A file that is not a llama-server that runs here. Exit code 65."""

    kind = "engine_broken"


class EngineDiedError(EngineBrokenError):
    """An engine that ended by itself. `log` is what it printed; `crashed`: a signal such as SIGSEGV ended it."""

    def __init__(self, message: str, log: str, *, crashed: bool) -> None:
        super().__init__(message)
        self.log = log
        self.crashed = crashed


class BuildError(EdgeError):
    """A build or its proof failed. What was installed before is untouched. Exit code 1."""

    kind = "build_failed"


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Turn ENOSPC and EDQUOT in the block into a BuildError that names the disk (FC-14)."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f": {error.filename}" if error.filename else ""
        raise BuildError(f"the disk is full{where}", "free some space; the engine in use is untouched") from error
