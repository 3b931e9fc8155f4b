"""Switches of the fake llama-server, and how a test makes one.

`write_fake(folder, **switches)` makes an executable that edgellm takes for a llama-server; `argv(folder, **switches)`
is the same for a plan made by hand. The folder keeps `starts` (one pid a line) and `requests.jsonl`. Standard library
only: the fake's own process imports it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("llama_server.py")
# What edgellm looks for in the bytes of a binary.
PROGRESS_MARK = "cmd_child_to_router:state"
CUDA_MARK = "ggml_cuda_init"


@dataclass
class Death:
    """When and how it ends. `at`: line | loading | ready | request. `unless`: not with this in its command line.

    `request` and `chunk` count from 1; with a chunk, the first stream from that request on is meant.
    """

    at: str = "loading"
    lines: list[str] = field(default_factory=list)
    code: int | None = None
    signal: int | None = None
    request: int = 1
    chunk: int = 0  # of a stream; 0 is before the answer
    unless: str = ""


@dataclass
class Switches:
    """One start. `first` overrides the first `first_starts` starts."""

    help_era: str = "load-mode"  # load-mode | both | flash-value | flash-bare
    log_era: str = "new"  # new | 2025 | 2023 | silent
    protocol: bool = True
    load_s: float = 0.02
    steps: int = 4  # of progress while it loads
    stall_at: float | None = None  # stalls at this share of the load, 0…1
    line_pause_s: float = 0.0
    silent_until: str = ""  # no line before this file exists
    health_never: bool = False  # 503 without end
    completions_when: str = ""  # they answer 503 before this file exists, though /health is 200
    models_at_once: bool = False  # /v1/models is 200 while it loads
    ignore_term: bool = False
    wedge_after: int | None = None  # completions that are answered; the next hang, everything else goes on
    gpu: dict[str, str] = field(default_factory=dict)
    list_devices: bool = True
    offloaded: int | None = None
    layers: int = 29
    stray: list[str] = field(default_factory=list)  # lines before the load
    props_n_ctx: int | None = None
    props_slots: int | None = None
    kv_mib: float = 56.0
    tokens_s: float = 100.0
    refuse_chat: bool = False  # 500 for the chat template
    refuse_warm_up: int = 0  # status of every completion
    dots: int = 0  # printed while it loads, one every 0.1 s, without a line end
    slow_s: float = 0.0  # every completion after the first sleeps so long
    poison: str = ""  # a completion with this text in its body ends it by SIGSEGV
    swallow: str = ""  # a completion with this text in its body takes 512 MiB
    decodes: bool = False  # /slots counts up meanwhile
    slots_hang: bool = False  # /slots takes the request and never answers
    hold_mib: int = 0  # of memory, really taken
    chatter: bool = False  # prints a request line, as builds before 2026 do
    death: Death | None = None
    first_starts: int = 0
    first: dict[str, Any] = field(default_factory=dict)


HELP = """usage: llama-server [options]

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
--list-devices                          print list of available devices and exit
-m,    --model FNAME                    model path
-a,    --alias STRING                   set alias for model name
--host HOST                             ip address to listen, or bind to an UNIX socket
--port PORT                             port to listen
-c,    --ctx-size N                     size of the prompt context
-np,   --parallel N                     number of server slots
-b,    --batch-size N                   logical maximum batch size
-ub,   --ubatch-size N                  physical maximum batch size
-ngl,  --gpu-layers, --n-gpu-layers N   number of layers to store in VRAM
-dev,  --device <dev1,dev2,..>          comma-separated list of devices to use for offloading
-t,    --threads N                      number of CPU threads
-tb,   --threads-batch N                number of threads during batch
-ctk,  --cache-type-k TYPE              KV cache data type for K
-ctv,  --cache-type-v TYPE              KV cache data type for V
--keep N                                number of tokens to keep from the initial prompt (default: 0)
--top-k N                               top-k sampling (default: 40, 0 = disabled)
--log-prefix                            Enable prefix in log messages
--log-timestamps                        Enable timestamps in log messages
--no-warmup                             skip warming up the model with an empty run
--metrics                               enable prometheus compatible metrics endpoint
--slots                                 enable slots monitoring endpoint
--props                                 enable changing global properties via POST /props
--jinja                                 use jinja template for chat
"""
ERAS = {
    "load-mode": ["-lm,   --load-mode MODE                 model loading mode (default: auto)"],
    "both": [
        "-lm,   --load-mode MODE                 model loading mode (default: auto)",
        "--no-mmap                               do not memory-map model",
    ],
    "flash-value": ["--no-mmap                               do not memory-map model"],
    "flash-bare": ["--no-mmap                               do not memory-map model"],
}
VERBOSITY = "-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold"
LEVELS = {  # none at all before December 2025; "trace" since May 2026
    "load-mode": ("generic output", "error", "warning", "info", "trace (more info)", "debug"),
    "both": ("generic output", "error", "warning", "info", "trace (more info)", "debug"),
    "flash-value": ("generic output", "error", "warning", "info", "debug"),
    "flash-bare": (),
}
FLASH = "-fa,   --flash-attn [on|off|auto]       set Flash Attention use"
FLASH_BARE = "-fa,   --flash-attn                     enable Flash Attention (default: disabled)"
NEW = [
    "-fit,  --fit [on|off]                   whether to adjust unset arguments to fit in device memory",
    "-cram, --cache-ram N                    set the maximum cache size in MiB",
    "--log-colors [on|off|auto]              Set colored logging",
    "--offline                               Offline mode: forces use of cache",
    "--no-ui                                 disable the web interface",
]


def help_text(era: str) -> str:
    flash = FLASH_BARE if era == "flash-bare" else FLASH
    levels = [f"{'':40} - {number}: {name}" for number, name in enumerate(LEVELS[era])]
    new = NEW if era in ("load-mode", "both") else []
    return HELP + "\n".join([VERBOSITY, *levels, *ERAS[era], flash, *new]) + "\n"


# --- for tests -------------------------------------------------------------------------------------------------------


def argv(folder: Path, **switches: Any) -> tuple[str, ...]:
    """The command of a plan made by hand; `{socket}` is the supervisor's."""
    return (sys.executable, "-S", "-E", str(SERVER), str(_write(folder, switches)), "--host", "{socket}")


def write_fake(folder: Path, **switches: Any) -> Path:
    """An executable that `edgellm --engine PATH` takes for a llama-server of the given era."""
    path = folder / "llama-server"
    settings = _write(folder, switches)
    marks = [PROGRESS_MARK] if switches.get("protocol", True) else []
    marks += [CUDA_MARK] if switches.get("gpu") or switches.get("cuda") else []
    path.write_text(
        f"#!{sys.executable} -S\n# {' '.join(marks)}\nimport runpy, sys\n"
        f"sys.argv[1:1] = [{str(settings)!r}]\nrunpy.run_path({str(SERVER)!r}, run_name='__main__')\n"
    )
    path.chmod(0o755)
    return path


def _write(folder: Path, switches: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: value for name, value in switches.items() if name != "cuda"}
    path = folder / "switches.json"
    path.write_text(json.dumps(asdict(Switches(**known))))
    return path


def change(folder: Path, **switches: Any) -> None:
    """From the next start on."""
    path = folder / "switches.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {k: _plain(v) for k, v in switches.items()}))


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Death) else value


def starts(folder: Path) -> list[int]:
    """The pids of all starts."""
    path = folder / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def requests(folder: Path) -> list[dict[str, Any]]:
    path = folder / "requests.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_switches(path: Path, number: int) -> Switches:
    raw = json.loads(path.read_text())
    if number <= raw["first_starts"]:
        raw |= raw["first"]
    death = raw.pop("death")
    return replace(Switches(**raw), death=Death(**death) if death else None)
