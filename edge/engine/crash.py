"""Where a server crashed: the instruction and the function, from gdb where it is installed."""

from __future__ import annotations

import re
import shutil

from edge.engine.engine import Engine
from edge.engine.faults import EngineBrokenError, EngineDiedError
from edge.engine.smoke import smoke

# `=> 0x5555555 <ggml_backend_amx_mul_mat+42>:  ldtilecfg -0x80(%rsp)`, the answer to `x/i $pc`.
_INSTRUCTION = re.compile(r"^=> 0x[0-9a-f]+(?: <[^>]*>)?:\s+(.+?)\s*$", re.MULTILINE)
# `#0  0x000055 in ggml_compute_forward (...)`, or without the address where the line is known.
_FRAME = re.compile(r"^#0\s+(?:0x[0-9a-f]+ in )?([^\s(]+)", re.MULTILINE)


def locate_crash(engine: Engine, *, gpu: bool) -> str | None:
    """Run the engine once more under gdb: "ldtilecfg in ggml_backend_amx_mul_mat". None without gdb or a crash."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return None
    # -nx: no ~/.gdbinit. A build has no debug information to fetch, and a question on the terminal would wait forever.
    options = ("-nx", "-q", "-batch", "-iex", "set debuginfod enabled off", "-ex", "set confirm off")
    # llama-server ignores SIGPIPE; a stop there would be taken for the crash.
    steps = ("-ex", "handle SIGPIPE SIGTERM nostop noprint pass", "-ex", "run", "-ex", "x/i $pc", "-ex", "bt 1")
    try:
        smoke(engine, gpu=gpu, under=(gdb, *options, *steps, "--args"))
    except EngineDiedError as error:
        return crash_place(error.log)
    except EngineBrokenError:
        return None
    return None


def crash_place(text: str) -> str | None:
    """Read gdb's answers. Pure."""
    instruction, frame = _INSTRUCTION.search(text), _FRAME.search(text)
    if instruction is None:
        return None
    name = " ".join(instruction[1].split())
    return f"{name} in {frame[1]}" if frame else name
