"""The command `edgellm`. `up` goes to its launcher before typer is imported, so that the engine starts first."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress

_DEBUG = "EDGELLM_DEBUG"  # 1: the traceback of a bug is printed too
_SHOWN_CHARACTERS = 300  # of the text of an exception that may quote a whole document
_BUG = 70  # EX_SOFTWARE of sysexits.h
_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_IO_ERROR = 74  # EX_IOERR of sysexits.h


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. The only place that catches every error."""
    arguments = sys.argv[1:] if argv is None else argv
    from edge.errors import EdgeError

    _prepare_streams()
    try:
        code = _run(arguments)
    except EdgeError as error:
        report(error)
        code = error.exit_code
    except BrokenPipeError:
        code = _BROKEN_PIPE
    except OSError as error:
        report(*_explained(error))
        code = _IO_ERROR
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        report(*_located(error))
        code = _BUG
    return _flush(code)


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["up"]:
        # Nothing of the launch is garbage, and looking for some costs more than a tenth of its CPU time.
        gc.disable()
        _import_pathlib()
        from edge.daemon.launch import up

        return up(arguments[1:])
    from edge.cli.app import run

    return run(arguments)


def _import_pathlib() -> None:
    """Import pathlib without urllib.parse, which only Path.as_uri() needs: 3 to 5 ms before the spawn.

    Python 3.13 does so itself. A later import of urllib.parse finds it as ever.
    """
    name = "urllib.parse"
    if sys.version_info >= (3, 13) or name in sys.modules or "pathlib" in sys.modules:
        import pathlib

        return

    def quote_from_bytes(data: bytes, safe: str | bytes = "/") -> str:
        from urllib.parse import quote_from_bytes as quote

        return quote(data, safe)

    stand_in = type(sys)(name)
    vars(stand_in)["quote_from_bytes"] = quote_from_bytes
    sys.modules[name] = stand_in
    try:
        import pathlib  # noqa: F401
    finally:
        del sys.modules[name]


def _prepare_streams() -> None:
    """Open /dev/null for closed standard streams; replace, or keep as read, what the locale's encoding cannot express.

    Without the first, a socket would get the number of stdout and receive what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this stream's
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
        elif hasattr(stream, "reconfigure"):
            with suppress(ValueError):  # a stdin of which a part was read
                stream.reconfigure(errors=("surrogateescape", "replace", "backslashreplace")[number])


def _flush(code: int) -> int:
    """Write buffered output. Return another code than 0 if that fails: the interpreter would exit with 120 later."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            # What is still buffered would fail again when the interpreter closes the stream, with exit code 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            code = code or (_BROKEN_PIPE if isinstance(error, BrokenPipeError) else _IO_ERROR)
            if code == _IO_ERROR:
                report(*_explained(error))
    return code


def _no_current_folder() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is imported only for an error with a file
    except OSError:
        return True
    return False


def _explained(error: OSError) -> tuple[Exception, str | None]:
    """Return an error that names the file, its owner and the reason, and the next step."""
    import errno
    from pathlib import Path

    from edge.linux.files import visible

    reason = error.strerror or str(error)
    if error.errno == errno.ENOENT and error.filename is None and _no_current_folder():
        return OSError("the current folder was removed"), "change to a folder that exists"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OSError(f"no file can be opened: {reason}"), "raise the limit: `ulimit -n`"
    if error.filename is None:
        return OSError(f"the output could not be written: {reason}"), None
    hint = "check the path and the space on its disk"
    if error.errno == errno.EROFS:
        hint = "its file system is read-only: mount it writable, or name another folder with --state-dir"
    if error.errno in (errno.EACCES, errno.EPERM):
        path = Path(error.filename)
        with suppress(OSError, KeyError):  # a folder that may not be entered; a user that passwd(5) does not list
            near = next((step for step in (path, *path.parents) if visible(step)), path)
            hint = f"{near} belongs to {near.owner()}: run it as that user, or with sudo"
    return OSError(f"{error.filename}: {reason}"), hint


def _located(error: Exception) -> tuple[Exception, str]:
    """Describe an unexpected exception in one sentence, with its place in the source and the next step."""
    import traceback
    from pathlib import Path

    hint = f"please report it, with the traceback that {_DEBUG}=1 in the environment prints"
    if os.environ.get(_DEBUG) == "1":
        with suppress(OSError):
            traceback.print_exception(error)
        hint = "please report it, with the traceback above"
    package = Path(__file__).parents[1]
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    file, line = [each for each in frames if each[0].is_relative_to(package)][-1]  # `main` is one
    text = f"{type(error).__name__}: {error}"[:_SHOWN_CHARACTERS]
    return RuntimeError(f"this is a bug in edgellm: {text} ({file.relative_to(package.parent)}:{line})"), hint


def report(error: Exception, hint: str | None = None) -> None:
    """Print one sentence, the table where there is one, and the hint on stderr."""
    head = "\x1b[31merror:\x1b[0m" if sys.stderr.isatty() else "error:"
    from edge.units import printable

    table, hint = getattr(error, "table", None), getattr(error, "hint", hint)
    lines = [f"{head} {printable(str(error))}"]
    lines += [printable(table, newlines=True)] if table else []
    lines += [f"  hint: {printable(hint)}"] if hint else []
    with suppress(OSError):
        print("\n".join(lines), file=sys.stderr, flush=True)
