"""Render settings as the command line of one llama-server, in the spellings that its own --help lists. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edge.engine.engine import Engine, Flag
from edge.models.open import ModelFile
from edge.plan.inputs import EXPERT_PATTERN
from edge.plan.plan import ColdStart, EngineOptions, Settings
from edge.units import MIB

# Render settings as fields of xllamacpp's CommonParams, for the embedded engine: JSON, enum values by name. Pure.


def common_params(settings: Settings, model: ModelFile, alias: str) -> dict[str, Any]:
    """Return the fields by name, nested ones dotted. The embedded engine's process adds the socket."""
    limit = settings.images.max_tokens if settings.images else None
    return {
        "model.path": model.path,
        "model_alias": [alias],
        "n_ctx": settings.n_ctx,
        "n_parallel": settings.n_parallel,
        "n_gpu_layers": settings.n_gpu_layers,
        "n_batch": settings.n_batch,
        "n_ubatch": settings.n_ubatch,
        "cache_type_k": settings.kv_type_k,
        "cache_type_v": settings.kv_type_v,
        "flash_attn_type": settings.flash_attention,
        "load_mode": settings.load_mode,
        "n_ctx_checkpoints": settings.ctx_checkpoints,
        "cache_ram_mib": settings.cache_ram_bytes // MIB,
        "cpuparams.n_threads": settings.n_threads,
        "cpuparams_batch.n_threads": settings.n_threads,
        "n_threads_http": 4,
        "kv_unified": False,
        "fit_params": False,
        "ctx_shift": False,
        "warmup": False,
        "verbosity": 4,
        "ui": settings.ui,
        "offline": True,
        "use_jinja": settings.role == "chat",
        "endpoint_metrics": True,
        "endpoint_props": True,
        "endpoint_slots": True,
        "embedding": settings.role != "chat",
        "pooling_type": "rank" if settings.role == "rerank" else "unspecified",
        **({"mmproj.path": settings.mmproj} if settings.mmproj else {}),
        # The embedded engine is built for the CPU alone.
        **({"speculative.draft.n_gpu_layers": 0} if settings.draft_device == "none" else {}),
        **({"image_max_tokens": limit} if limit else {}),
    }


SOCKET = "{socket}"
NO_OPTIONS = EngineOptions()


class Argv(Struct, frozen=True):
    """A rendered command line. `dropped`: options that this engine does not know."""

    args: tuple[str, ...]
    dropped: tuple[str, ...] = ()


def render(
    settings: Settings, engine: Engine, model: ModelFile, alias: str, options: EngineOptions = NO_OPTIONS
) -> Argv:
    """Return the command line, `options` last, with `{socket}` for the engine's private socket."""
    if engine.kind == "embedded":
        fields = {**common_params(settings, model, alias), **options.params}
        params = json.dumps(fields, separators=(",", ":"), sort_keys=True)
        return Argv((engine.path, *engine.args, "--params", params, "--socket", SOCKET))
    line = _Line(engine)
    line.add(("--model", "-m"), model.path, needed=True)
    line.add(("--alias", "-a"), alias)
    line.add(("--host",), SOCKET, needed=True)
    _context(line, settings)
    _placement(line, settings, model.meta.n_layer)
    line.load_mode(settings.load_mode)
    _logging(line)
    _endpoints(line, settings)
    for off in engine.without:
        if off.args and off.args[0] not in line.args:
            line.args += off.args
    return Argv((engine.path, *line.args, *options.args), (*line.dropped, *options.unknown))


def cold_start(
    choice: tuple[str, float], settings: Settings, engine: Engine, model: ModelFile, alias: str, options: EngineOptions
) -> ColdStart:
    """Return the command of a start without the page cache. `choice`: its load mode, below which share of the file."""
    mode, below = choice
    return ColdStart(mode, render(replace(settings, load_mode=mode), engine, model, alias, options).args, below)


def _context(line: _Line, settings: Settings) -> None:
    line.add(("--ctx-size", "-c"), str(settings.n_ctx), needed=True)
    line.add(("--parallel", "-np"), str(settings.n_parallel), needed=True)
    line.add(("--batch-size", "-b"), str(settings.n_batch))
    line.add(("--ubatch-size", "-ub"), str(settings.n_ubatch))
    line.add(("--cache-type-k", "-ctk"), settings.kv_type_k)
    line.add(("--cache-type-v", "-ctv"), settings.kv_type_v)
    line.flash_attention(settings.flash_attention)
    line.add(("--cache-ram", "-cram"), str(settings.cache_ram_bytes // MIB))
    line.add(("--ctx-checkpoints", "-ctxcp", "--swa-checkpoints"), str(settings.ctx_checkpoints))
    line.add(("--no-context-shift",))


def _experts_on_cpu(settings: Settings, n_layer: int) -> str:
    layers = "|".join(str(index) for index in range(n_layer - settings.cpu_expert_layers, n_layer))
    return rf"blk\.({layers})\.{EXPERT_PATTERN}=CPU"


def _placement(line: _Line, settings: Settings, n_layer: int) -> None:
    line.add(("--n-gpu-layers", "-ngl", "--gpu-layers"), str(settings.n_gpu_layers))
    if settings.rpc:  # before --device, which names devices that exist (llama.cpp reads its options in their order)
        line.add(("--rpc",), ",".join(settings.rpc), needed=True)
    if settings.devices:
        line.add(("--device", "-dev"), ",".join(settings.devices))
    elif settings.n_gpu_layers == 0:
        line.add(("--device", "-dev"), "none")
    if settings.split_mode:
        line.add(("--split-mode", "-sm"), settings.split_mode)
    if settings.tensor_split:
        line.add(("--tensor-split", "-ts"), ",".join(f"{share:g}" for share in settings.tensor_split))
    if settings.cpu_expert_layers:
        line.add(("--override-tensor", "-ot"), _experts_on_cpu(settings, n_layer), needed=True)
    _drafter(line, settings.draft_device)
    line.add(("--fit", "-fit"), "off")
    line.add(("--threads", "-t"), str(settings.n_threads))
    line.add(("--threads-batch", "-tb"), str(settings.n_threads))
    if settings.mmproj:
        line.add(("--mmproj", "-mm"), settings.mmproj)
    if settings.images and settings.images.max_tokens:
        line.add(("--image-max-tokens",), str(settings.images.max_tokens))


# More layers than any drafter has. Without a number older builds keep it on the CPU, and newer ones take all layers.
_ALL_LAYERS = "999"


def _drafter(line: _Line, device: str | None) -> None:
    """Place the drafter. Without an option for its device it is on the GPU of the model, or has no layer there."""
    devices, layers = (
        ("--spec-draft-device", "--device-draft", "-devd"),
        ("--spec-draft-ngl", "--gpu-layers-draft", "-ngld"),
    )
    if device is None:
        return
    if line.known(devices):
        line.add(devices, device)
    if device != "none":
        line.add(layers, _ALL_LAYERS)
    elif not line.known(devices):
        line.add(layers, "0")


def _logging(line: _Line) -> None:
    names = ("--verbosity", "-lv", "--log-verbosity")
    known = line.known(names)
    levels = known[1].values if known else ()
    if len(levels) > 1:
        # The last level prints prompts and answers; the one before it every stage line that the gates read. Builds
        # before December 2025 list no levels: their default prints the stages, anything above it the prompts.
        line.add(names, levels[-2])
    line.add(("--log-timestamps",))
    line.add(("--log-prefix",))
    line.add(("--log-colors",), "off")


def _endpoints(line: _Line, settings: Settings) -> None:
    if not settings.ui:
        line.add(("--no-ui", "--no-webui"))
    # Without its own warm-up: the supervisor warms with real completions.
    for name in ("--offline", "--no-warmup", "--slots", "--props", "--metrics"):
        line.add((name,))
    if settings.role == "embedding":
        line.add(("--embedding", "--embeddings"), needed=True)
    elif settings.role == "rerank":
        line.add(("--reranking", "--rerank"), needed=True)
    else:
        line.add(("--jinja",))


class _Line:
    """A command line under construction, in the spellings that the engine knows."""

    def __init__(self, engine: Engine) -> None:
        self.flags = engine.flags
        self.args: list[str] = []
        self.dropped: list[str] = []

    def known(self, names: Iterable[str]) -> tuple[str, Flag] | None:
        return next(((name, self.flags[name]) for name in names if name in self.flags), None)

    def add(self, names: tuple[str, ...], *value: str, needed: bool = False) -> None:
        """Append an option, or without a value a switch; a `needed` one even where --help does not list it."""
        found = self.known(names)
        if found or needed:
            self.args += [found[0] if found else names[0], *value]
        else:
            self.dropped.append(f"{' '.join((names[0], *value))}: this engine does not know it")

    def flash_attention(self, value: str) -> None:
        """Append --flash-attn: with a value since mid-2025, a bare switch before."""
        names = ("--flash-attn", "-fa")
        found = self.known(names)
        if found is None or found[1].arity:
            self.add(names, value)
        elif value == "on":
            self.add(names)

    def load_mode(self, mode: str) -> None:
        """Append --load-mode (since mid-2026), or --no-mmap and --direct-io, which it replaced (FC-28)."""
        if self.known(("--load-mode",)):
            self.add(("--load-mode",), mode)
        elif mode == "none":
            self.add(("--no-mmap",))
        elif mode == "dio":  # engines without it: reading without a mapping is the nearest
            self.add(("--direct-io", "-dio", "--no-mmap"))


# Build the engine's whole environment from an allow-list: an inherited LLAMA_ARG_* would undo the plan. Pure.

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# CUDA's upper limit. The default is smaller than what one llama.cpp compiles from PTX, which would repeat every start.
_CUDA_CACHE_MAX_BYTES = 4 * 1024**3
# How often a thread of an OpenMP build looks before it sleeps at a barrier; libgomp's default is 300000. Two threads on
# two cores beside one busy process: 64 tokens took 28 s by default and 1.0 s with 1000; alone 0.34 and 0.27 s
# (docs/numbers.md, tests/bench/cpu_threads.py).
_OPENMP_SPINS = "1000"
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


class EnvFacts(Struct, frozen=True):
    """Paths of this installation that the environment names."""

    home: str
    cache: str  # edgellm's cache folder
    wsl: bool = False


def environment(
    engine: Engine, facts: EnvFacts, *, gpus: tuple[str, ...] | None = None, managed_memory: bool = False
) -> dict[str, str]:
    """Return the environment. `gpus`: UUIDs that CUDA may see; () hides all, None leaves it open (integrated GPU)."""
    env = {
        "PATH": _PATH,
        "HOME": facts.home,
        "LC_ALL": "C",
        "XDG_CACHE_HOME": facts.cache,
        "LLAMA_CACHE": f"{facts.cache}/llama.cpp",
        "GOMP_SPINCOUNT": _OPENMP_SPINS,
    }
    if engine.progress_protocol:
        env["LLAMA_SERVER_ROUTER_PORT"] = "1"  # any value: progress lines on stdout
    for off in engine.without:
        env |= off.environment
    libraries = [path for path in (engine.library_path, "/usr/lib/wsl/lib" if facts.wsl else None) if path]
    if libraries:
        env["LD_LIBRARY_PATH"] = ":".join(libraries)
    if engine.cuda:
        env |= {
            "CUDA_CACHE_PATH": f"{facts.cache}/cuda",
            "CUDA_CACHE_MAXSIZE": str(_CUDA_CACHE_MAX_BYTES),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_MODULE_LOADING": "LAZY",
        }
        if gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if managed_memory:
            env["GGML_CUDA_ENABLE_UNIFIED_MEMORY"] = "1"
    return env


def other_environment(
    facts: EnvFacts, own: Mapping[str, str], *, gpus: tuple[str, ...] | None = None
) -> dict[str, str]:
    """Return the environment of an engine beside llama.cpp; `own` wins. `gpus`: as in `environment`."""
    env = {"PATH": _PATH, "HOME": facts.home, "LC_ALL": "C.UTF-8", "XDG_CACHE_HOME": facts.cache}
    if facts.wsl:
        env["LD_LIBRARY_PATH"] = "/usr/lib/wsl/lib"
    if gpus is not None:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return env | dict(own)


def redacted(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy for printing, without values whose names look like a secret."""
    return {
        name: "[hidden]" if any(word in name.upper() for word in _SECRET) else value
        for name, value in sorted(env.items())
    }


_SECRET_NAME = re.compile(r"-(key|token|secret|password|auth)(?=-|$)")  # not of --image-max-tokens


def redacted_args(args: Sequence[str]) -> list[str]:
    """Return a copy to keep, without values of options whose names look like a secret, and without URLs with a user."""
    hidden, found = False, list[str]()
    for word in args:
        if word.startswith("--"):
            hidden = _SECRET_NAME.search(word) is not None
            found.append(word)
        else:
            found.append("[hidden]" if hidden or re.search(r"://[^/]*@", word) else word)
    return found
