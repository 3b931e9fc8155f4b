"""The embedded engine: llama.cpp's own HTTP server from the xllamacpp wheel, alone in a process of its own.

Run as a script by the supervisor (`python -I embedded.py --params JSON --socket PATH`); it imports nothing of edge, so
that it starts fast and a crash stays its own. `--params` holds CommonParams fields; enums are given by llama.cpp's
names ("q8_0", "mmap", "on"). Log lines go to stderr, the progress protocol to stdout, exactly as llama-server's do.
Exit codes: 0 on SIGTERM once loaded, 1 when the model does not load, 64 for parameters that CommonParams does not know.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

# <sys/prctl.h>
PR_SET_PDEATHSIG = 1

# CommonParams fields that hold enums, and the prefix of their members' names.
ENUMS = {
    "cache_type_k": ("ggml_type", "GGML_TYPE_"),
    "cache_type_v": ("ggml_type", "GGML_TYPE_"),
    "flash_attn_type": ("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
    "load_mode": ("llama_load_mode", "LLAMA_LOAD_MODE_"),
    "pooling_type": ("llama_pooling_type", "LLAMA_POOLING_TYPE_"),
    "split_mode": ("llama_split_mode", "LLAMA_SPLIT_MODE_"),
    "reasoning_format": ("common_reasoning_format", "COMMON_REASONING_FORMAT_"),
    "rope_scaling_type": ("llama_rope_scaling_type", "LLAMA_ROPE_SCALING_TYPE_"),
}
# Members of xllamacpp's enums llama_flash_attn_type and llama_load_mode, without their prefix.
FLASH_ATTENTION = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
LOAD_MODE = {"dio": "DIRECT_IO", "mmap+mlock": "MMAP_MLOCK"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="edgellm-embedded")
    parser.add_argument("--params", required=True)
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    die_with_parent()
    leave_when_stdin_ends()

    import xllamacpp

    params = xllamacpp.CommonParams()
    try:
        apply(xllamacpp, params, json.loads(options.params))
    except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
        print(f"error: invalid argument: {error}", file=sys.stderr)
        return 64
    params.hostnames = [options.socket]
    # SIGTERM keeps its default action while loading: the constructor holds the GIL, a Python handler could not run.
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"E srv  load_model: failed to load model: {error}", file=sys.stderr)
        return 1
    serve_until_sigterm(server, options.socket)
    # Not `del server`: with the progress protocol on, its destructor joins a thread that reads stdin, which stays open
    # as long as our parent lives. Open requests have ended by now; the kernel takes the memory back.
    sys.stderr.flush()
    os._exit(0)


def die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def leave_when_stdin_ends() -> None:
    """Exit when stdin closes, as llama-server does with its progress protocol. A thread: the GIL is free by then."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve_until_sigterm(_server: Any, path: str) -> None:
    """Serve until SIGTERM: the server's threads live as long as the object is referenced.

    Replaces llama.cpp's SIGTERM handler, which stops the server but not this process.
    """
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    if listening(path):  # else SIGTERM came just before and llama.cpp's handler took it
        stopped.wait()


def listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def apply(xllamacpp: Any, params: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        target, leaf = params, name
        while "." in leaf:  # "cpuparams.n_threads", "model.path"
            head, leaf = leaf.split(".", 1)
            target = getattr(target, head)
        if leaf == "chat_template_file":
            leaf, value = "chat_template", Path(value).read_text(encoding="utf-8")
        elif leaf == "lora_adapters":
            value = [adapter(xllamacpp, path, scale) for path, scale in value]
        elif leaf == "types":  # of speculative
            prefix = "COMMON_SPECULATIVE_TYPE_"
            words = (prefix + word.upper().replace("-", "_") for word in value)
            value = [getattr(xllamacpp.common_speculative_type, word) for word in words]
        elif leaf == "user_sampling_config":
            prefix = "COMMON_PARAMS_SAMPLING_CONFIG_"
            value = sum(int(getattr(xllamacpp.common_params_sampling_config, prefix + word)) for word in value)
        if leaf in ENUMS:
            value = enum_member(xllamacpp, leaf, value)
        elif isinstance(getattr(target, leaf), set):
            value = set(value)
        else:
            getattr(target, leaf)  # an unknown field is an error, never dropped
        setattr(target, leaf, value)


def adapter(xllamacpp: Any, path: str, scale: float) -> Any:
    made = xllamacpp.CommonAdapterLoraInfo()
    made.path, made.scale = path, scale
    return made


def enum_member(xllamacpp: Any, field: str, value: str) -> Any:
    enum, prefix = ENUMS[field]
    if field == "flash_attn_type":
        word = FLASH_ATTENTION[value]
    elif field == "load_mode":
        word = LOAD_MODE.get(value, value.upper())
    else:
        word = value.upper().replace("-", "_")
    return getattr(getattr(xllamacpp, enum), prefix + word)


if __name__ == "__main__":
    sys.exit(main())
