"""Start-up lines as llama.cpp prints them, rendered from its message formats with values of our own.

Three eras: `new` (2026, -lv 4 with prefix and time), `2025` (no prefix), `2023` (VRAM, decimal comma). Standard library
only: the fake server runs it as its own process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Start:
    """What one start says. `gpu` devices by name; `offloaded` None is everything where there is a GPU."""

    era: str = "new"
    gpu: dict[str, str] = field(default_factory=dict)  # "CUDA0": "Orin"
    layers: int = 29
    offloaded: int | None = None
    n_ctx: int = 2048
    n_slots: int = 1
    kv_mib: float = 56.0
    weights_mib: float = 900.0
    archs: str = "870"
    load_mode: str = "mmap"

    @property
    def on_gpu(self) -> int:
        return self.offloaded if self.offloaded is not None else self.layers if self.gpu else 0


def before_load(start: Start) -> Iterator[str]:
    if start.era == "new":
        yield "srv  llama_server: initializing ..."
        yield "cmn  common_param: common_params_print_info: verbosity = 4 (adjust with the `-lv N` CLI arg)"
        yield "cmn  common_param: device_info:"
        for device, name in start.gpu.items():
            yield f"cmn  common_param:   - {device}   : {name} (30500 MiB, 29100 MiB free)"
        yield "cmn  common_param:   - CPU     : Some Processor (31000 MiB, 31000 MiB free)"
        cuda = f" | CUDA : ARCHS = {start.archs} | NO_VMM = 1 | USE_GRAPHS = 1" if start.gpu else ""
        yield f"cmn  common_param: system_info: n_threads = 8 (n_threads_batch = 8) / 8{cuda} | CPU : NEON = 1 |"
        yield "srv    load_model: loading model 'model.gguf'"
        yield "llama_model_loader: loaded meta data with 26 key-value pairs and 311 tensors from model.gguf"
        for device, name in start.gpu.items():
            yield f"llama_prepare_model_devices: using device {device} ({name}) (0000:01:00.0) - 29100 MiB free"
    elif start.era == "2025":
        yield from _cuda_init("ggml_cuda_init", start)
        yield "build: 5600 (0a1b2c3d) with cc (Ubuntu) for aarch64-linux-gnu"
        yield "main: HTTP server is listening, hostname: 127.0.0.1, port: 8080, http threads: 7"
        yield "main: loading model"
        yield "srv    load_model: loading model 'model.gguf'"
        for device, name in start.gpu.items():
            yield f"llama_model_load_from_file_impl: using device {device} ({name}) - 22000 MiB free"
        yield "llama_model_loader: loaded meta data with 26 key-value pairs and 311 tensors from model.gguf"
    else:
        yield "main: build = 1700 (0a1b2c3d)"
        yield from _cuda_init("ggml_init_cublas", start)
        yield "llama_model_loader: loaded meta data with 23 key-value pairs and 201 tensors from model.gguf"


def _cuda_init(function: str, start: Start) -> Iterator[str]:
    if start.gpu:
        yield f"{function}: found {len(start.gpu)} CUDA devices:"
        for index, name in enumerate(start.gpu.values()):
            yield f"  Device {index}: {name}, compute capability 8.7, VMM: yes"


def tensors(start: Start) -> Iterator[str]:
    """Up to where the bytes are read."""
    if start.era == "2023":
        if start.gpu:
            yield "llm_load_tensors: using CUDA for GPU acceleration"
            yield f"llm_load_tensors: offloaded {start.on_gpu}/{start.layers} layers to GPU"
            yield "llm_load_tensors: VRAM used: 601,02 MiB"
        return
    how = f"load_mode = {start.load_mode}" if start.era == "new" else "mmap = true"
    yield f"load_tensors: loading model tensors, this can take a while... ({how})"
    if start.gpu or start.offloaded is not None:
        yield f"load_tensors: offloaded {start.on_gpu}/{start.layers} layers to GPU"
    for device in start.gpu if start.on_gpu else ("CPU_Mapped",):
        yield f"load_tensors:   {device} model buffer size = {start.weights_mib / max(1, len(start.gpu)):8.2f} MiB"


def after_load(start: Start) -> Iterator[str]:
    places = list(start.gpu) if start.on_gpu else ["CPU"]
    if start.era == "2023":
        yield f"llama_new_context_with_model: n_ctx      = {start.n_ctx}"
        yield "llama_kv_cache_init: VRAM kv self = 5,50 MiB"
        yield f"llama_new_context_with_model: KV self size  =   {start.kv_mib:.2f} MiB".replace(".", ",")
        return
    yield "llama_context: constructing llama_context"
    yield f"llama_context: n_ctx         = {start.n_ctx}"
    for place in places:
        yield f"llama_kv_cache:      {place} KV buffer size = {start.kv_mib / len(places):8.2f} MiB"
    cells = f"{start.n_ctx:6d} cells, {start.layers - 1:3d} layers,  1/1 seqs"
    yield f"llama_kv_cache: size = {start.kv_mib:7.2f} MiB ({cells}), K (f16): {start.kv_mib / 2:7.2f} MiB"
    if start.era == "new":
        yield "sched_reserve: reserve took 26.65 ms, sched copies = 1"
        slot = start.n_ctx // start.n_slots
        yield f"srv    load_model: initializing, n_slots = {start.n_slots}, n_ctx_slot = {slot}, kv_unified = 'false'"
        yield "srv  llama_server: model loaded"
        yield "srv  llama_server: listening on http://127.0.0.1:8080"
    else:
        yield f"srv          init: initializing slots, n_slots = {start.n_slots}"
        yield "main: model loaded"
        yield "main: server is listening on http://127.0.0.1:8080 - starting the main loop"


def whole(start: Start) -> list[str]:
    """All lines of a start that goes well, without prefix."""
    return [*before_load(start), *tensors(start), *after_load(start)]


def prefixed(text: str, engine_s: float, level: str = "I") -> str:
    """`0.00.285.018 I `: --log-timestamps and --log-prefix."""
    micros = round(engine_s * 1e6)
    minutes, rest = divmod(micros, 60_000_000)
    seconds, rest = divmod(rest, 1_000_000)
    return f"{minutes}.{seconds:02d}.{rest // 1000:03d}.{rest % 1000:03d} {level} {text}"


class Clock:
    """The engine's own, from its first line."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def stamp(self, text: str, level: str = "I") -> str:
        return prefixed(text, time.monotonic() - self._began_s, level)
