"""Check a chat template with the engine's own parser: start it on a tiny model that holds the template."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from pathlib import Path

from edge.builder.smoke import environment, read_log, request, run_folder, server, short_tmp, smoke_command, wait_ready
from edge.builder.tiny_model import tiny_model
from edge.engine.engine import Engine
from edge.engine.inspect import identity
from edge.errors import EngineBrokenError, EngineDiedError
from edge.linux.procfs import read_usage
from edge.units import GIB, format_bytes

# Without weights to read the engine is up within a second; a first CUDA contact took 17 s on one board.
_DEADLINE_S = 60.0
# The tiny model takes 0.1 GiB; a text that doubles would take all memory of a board before the deadline.
_MOST_BYTES = 2 * GIB
_LOOK_S = 0.1
# A rendered example is the engine's own check at its start; a conversation of one turn is what every client sends.
_QUESTION = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
# common/jinja ends its report with `Error: …`; earlier builds print minja's text behind this sentence.
_REPORTS = (
    re.compile(r"^Error: (.+)$", re.MULTILINE),
    re.compile(r"chat template parsing error: (?!std::exception)(.+)$", re.MULTILINE),
)
_LOADED = re.compile(r": initializing.{0,10} n_slots = ")  # next it reads the template
_REFUSED = re.compile(r"chat template", re.IGNORECASE)


def template_fault(engine: Engine, templates: Mapping[str, str], *, renders: bool = True) -> str | None:
    """Return the engine's reason to refuse a model's chat templates; None if it takes them.

    `templates`: the GGUF keys and their text. The engine's parser judges them, whatever the size of their model: they
    are put into a tiny one. `renders`: a conversation of one turn has to be rendered too; without, a start is enough.
    Raises EngineBrokenError where the engine gives no verdict.
    """
    folder = Path(tempfile.mkdtemp(prefix="edgellm-template-", dir=short_tmp()))
    try:
        return _judge(engine, templates, folder, renders)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judge(engine: Engine, templates: Mapping[str, str], folder: Path, renders: bool) -> str | None:
    who = identity(Path(engine.path))
    model, log, place = folder / "tiny.gguf", folder / "log", run_folder(folder, who)
    socket = place / "s.sock"
    with model.open("wb") as file:
        file.writelines(tiny_model(texts=templates))
    model.chmod(0o644)  # whatever root's umask
    running = server(_command(engine, model, socket), environment(engine, place), log, who)
    with running as child, _bounded(child) as over:
        try:
            wait_ready(socket, child, log, time.monotonic() + _DEADLINE_S)
            if not renders:
                return None
            status, body = request(socket, "POST", "/apply-template", _QUESTION, timeout_s=_DEADLINE_S)
        except TimeoutError:
            return f"it is not rendered within {_DEADLINE_S:.0f} s: it has probably no end"
        except EngineDiedError as died:
            if over.is_set():
                return f"it takes more than {format_bytes(_MOST_BYTES)}: it has probably no end"
            if died.crashed or not _REFUSED.search(died.log):
                raise
            return _reason(died.log)
        except EngineBrokenError:
            if _LOADED.search(read_log(log)) is None:
                raise
            return f"the engine is not ready with it within {_DEADLINE_S:.0f} s: it has probably no end"
        except (OSError, HTTPException) as error:
            if over.is_set():
                return f"it takes more than {format_bytes(_MOST_BYTES)}: it has probably no end"
            raise EngineBrokenError(f"the engine gave no verdict on the chat template: {error}") from error
    return None if status < 400 else _message(body)


@contextlib.contextmanager
def _bounded(child: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """Kill a server that takes more than _MOST_BYTES; the event is set then."""
    over, ended = threading.Event(), threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            usage = read_usage(child.pid)
            if usage is not None and usage.rss_anon_bytes + usage.swap_bytes > _MOST_BYTES:
                over.set()
                child.kill()
                return

    looking = threading.Thread(target=look, name="template-memory", daemon=True)
    looking.start()
    try:
        yield over
    finally:
        ended.set()
        looking.join()


def _command(engine: Engine, model: Path, socket: Path) -> list[str]:
    if engine.kind != "embedded":
        jinja = ["--jinja"] if engine.has("--jinja") else []
        return [*smoke_command(engine, model, socket, gpu=False), *jinja]
    fields = {"model.path": str(model), "n_ctx": 256, "n_parallel": 1, "use_jinja": True, "warmup": False}
    fields |= {"fit_params": False, "cache_ram_mib": 0, "verbosity": 4, "offline": True, "ui": False}
    return [engine.path, *engine.args, "--params", json.dumps(fields), "--socket", str(socket)]


def _reason(log: str) -> str:
    """Return the parser's sentence from the log of a server that refused to start."""
    for pattern in _REPORTS:
        if found := pattern.findall(log):
            return str(found[-1]).strip()
    return "it cannot be parsed"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"]).strip().splitlines()[-1]
    except (ValueError, LookupError, TypeError, RecursionError):
        return "it cannot be rendered"
