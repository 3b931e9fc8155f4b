"""What a kind of board is asked to do: wishes and limits. Values only; profiles/*.toml hold them."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.profile.reserve import DEFAULT_RESERVE
from edge.units import MIB


@dataclass(frozen=True, slots=True)
class Wishes:
    """The settings of one model: keys of a profile, of `set = {…}` and of --set. settings.py describes them."""

    quant: str = "Q5_K_M"
    prefer: str = "balanced"  # "balanced" | "quality" | "speed"
    n_ctx: int = 8192  # wished, over all slots; 0 is the trained context
    n_ctx_min: int = 4096  # each slot keeps at least this
    n_parallel: int = 1
    backend: str = "any"  # "cuda" | "cpu" | "any": what the engine must have
    offload: str = "full"  # "full" | "none"
    partial_offload: bool = False  # discrete GPUs: may layers go to the host when not all fit?
    fallback: str = "refuse"  # "refuse" | "cpu": when the wanted backend is not there
    load_mode: str = "auto"  # "auto" | "none" | "mmap" | "dio"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    kv_type_min: str = "q8_0"  # the smallest that the ladder may take
    flash_attention: str = "auto"  # "auto" | "on" | "off"
    n_threads: int = 0  # 0 is one a physical core
    n_batch: int = 2048
    n_ubatch: int = 512
    cache_ram: int = 256 * MIB  # bytes; the engine's prompt cache in host memory
    split_mode: str = "layer"  # "none" | "layer" | "row"
    tensor_split: tuple[float, ...] = ()  # empty: by free memory of each card
    managed_memory: bool = False  # GGML_CUDA_ENABLE_UNIFIED_MEMORY
    reserve: str = DEFAULT_RESERVE
    power_mode: str = ""  # nvpmodel's name; wished, never set by us
    recipe: str = ""  # of `edgellm build`
    min_tokens_s: float = 8.0  # a model that the board's memory would make slower is not chosen by itself
    warmup_tokens: tuple[int, ...] = (1, 128)  # prompt lengths that are warmed while idle
    system_prompt: str = ""  # computed while idle, so that the first user does not wait for it
    nice: int = 0  # of the engine's process
    oom_score_adj: int = 500  # of the engine's process: the kernel shall take it before us
    cpus: tuple[int, ...] = ()  # the engine's processors; empty: all


@dataclass(frozen=True, slots=True)
class Tier:
    """A range of memory in a profile. `memory_max_bytes` None is no limit; `names` are profiles that mean this tier."""

    name: str
    memory_max_bytes: int | None
    names: tuple[str, ...]
    values: dict[str, object]


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of `auto`: the profile to use for boards that match. Empty conditions match every board."""

    profile: str
    socs: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    gpus_min: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """`origins` names, by key, where each wish came from; keys that are not there are the code's defaults."""

    name: str
    summary: str
    wishes: Wishes
    tiers: tuple[Tier, ...] = ()
    choices: tuple[Choice, ...] = ()
    tier: str | None = None  # after resolve_tier
    sections: dict[str, object] = field(
        default_factory=dict
    )  # restart.*, thermal.*, telemetry.*, memory.*: below edgellm.toml
    origins: dict[str, str] = field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()
