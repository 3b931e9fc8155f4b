"""A stand-in for llama-server as a build would make it: --version, --help of any era, --list-devices, one completion.

`write_server(path, ...)` writes an executable script that carries its behaviour; nothing of it is read from outside.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

# In the format of llama.cpp's own printer: names padded to seven columns, the description from column 40 on.
COMMON = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM
-m,    --model FNAME                    model path to load
--list-devices                          print list of available devices and exit
--log-verbosity N                       set the verbosity threshold
-np,   --parallel N                     number of server slots
--host HOST                             ip address to listen, or bind to an UNIX socket
--repack, -nr, --no-repack              whether to enable weight repacking (default: enabled)
                                        (env: LLAMA_ARG_REPACK)
--no-warmup                             skip warming up the model with an empty run
"""
LOAD_MODE = """\
-lm,   --load-mode MODE                 model loading mode (default: auto)
                                        - auto: mmap, unless a device does not support it
                                        - none: no special loading mode
                                        - mmap: memory-map model
                                        - dio: use DirectIO if available
                                        (env: LLAMA_ARG_LOAD_MODE)
"""
NO_MMAP = """\
--no-mmap                               do not memory-map model (slower load but may reduce pageouts)
"""
FLASH_VALUE = """\
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
"""
FLASH_BARE = """\
-fa,   --flash-attn                     enable Flash Attention (default: disabled)
"""
FIT = """\
-fit,  --fit [on|off]                   whether to adjust unset arguments to fit in device memory
-cram, --cache-ram N                    set the maximum cache size in MiB (default: 8192)
"""
ERAS = {
    "load-mode": COMMON + LOAD_MODE + FLASH_VALUE + FIT,
    "both": COMMON + LOAD_MODE + NO_MMAP + FLASH_VALUE + FIT,
    "flash-value": COMMON + NO_MMAP + FLASH_VALUE,
    "flash-bare": COMMON + NO_MMAP + FLASH_BARE,
}

_BODY = """
import http.server, json, os, socketserver, sys, signal

arguments = sys.argv[1:]
here = os.path.dirname(os.path.abspath(__file__))
if B["trace"]:
    with open(B["trace"], "a") as file:
        file.write(json.dumps({"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd(),
                               "uid": os.getuid()}) + "\\n")
if B["needs_library"] and here not in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
    sys.stderr.write(sys.argv[0] + ": error while loading shared libraries: libllama.so.0: "
                     "cannot open shared object file: No such file or directory\\n")
    sys.exit(127)
if B["signal"] and B["signal"][0] in arguments:
    os.kill(os.getpid(), B["signal"][1])
if "--version" in arguments:
    sys.stderr.write(B["version"] + "\\nbuilt with GNU 12.2.0 for Linux x86_64\\n")
    sys.exit(B["version_code"])
if "--help" in arguments:
    sys.stdout.write(B["help"])
    sys.exit(0)
if "--list-devices" in arguments:
    sys.stderr.write(B["devices_stderr"])
    if B["driver_folder"] and B["driver_folder"] not in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        B["devices"] = []
    sys.stdout.write("Available devices:\\n" + "".join("  " + line + "\\n" for line in B["devices"]))
    sys.exit(0)
for argument in arguments:
    if argument.startswith("--") and argument not in B["help"]:
        sys.stderr.write("error: invalid argument: " + argument + "\\n")
        sys.exit(1)
if B["crashes_without"] and B["crashes_without"] not in " ".join(arguments):
    os.kill(os.getpid(), B["crash"])
if B["dies"]:
    sys.stderr.write(B["dies"] + "\\n")
    sys.exit(1)
sys.stderr.write(B["log"] + "\\n")
sys.stderr.flush()


class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self):
        return "unix"

    def log_message(self, *_):
        pass

    def answer(self, code, document):
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"status": "ok"})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(B["completion_code"], {"content": "x", "tokens_predicted": B["tokens"],
                                           "timings": {"predicted_per_second": 50.0}})


class Server(socketserver.UnixStreamServer):
    def get_request(self):
        request, _ = super().get_request()
        return request, ("unix", 0)


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
Server(arguments[arguments.index("--host") + 1], Handler).serve_forever()
"""


def write_server(path: Path, **behaviour: Any) -> Path:
    """`era` picks the help text, `python` the interpreter; the other keywords are those of `defaults` below."""
    era = behaviour.pop("era", "load-mode")
    python = behaviour.pop("python", sys.executable)
    defaults: dict[str, Any] = {
        "version": "version: 0.5.0-dev (build 0, commit 0c1e57098)",
        "version_code": 0,
        "help": ERAS[era],
        "devices": [],
        "devices_stderr": "",
        "driver_folder": "",  # without it in LD_LIBRARY_PATH no device is seen
        "needs_library": False,
        "dies": "",
        "signal": None,  # ["--help", 4]: what this argument is answered with
        "crashes_without": "",  # it crashes at the start unless these arguments are given
        "crash": signal.SIGSEGV,
        "log": "load_tensors: offloaded 3/3 layers to GPU",
        "completion_code": 200,
        "tokens": 16,
        "trace": "",
        # These two are markers in the file's bytes, as in a real binary.
        "cuda": False,
        "progress": False,
    }
    unknown = set(behaviour) - set(defaults)
    assert not unknown, unknown
    settings = {**defaults, **behaviour}
    markers = []
    if settings.pop("cuda"):
        markers.append("ggml_cuda_init")
    if settings.pop("progress"):
        markers.append("cmd_child_to_router:state")
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = json.dumps(json.dumps(settings))
    head = f"#!{python} -IS\n# {' '.join(markers)}\nimport json\nB = json.loads({encoded})\n"
    path.write_text(head + _BODY)
    path.chmod(0o755)
    return path
