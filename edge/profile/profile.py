"""A profile: requested settings and limits for a kind of board. Values only; profiles/*.toml hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from edge.profile.fields import RESERVE, SIZE, fields_of
from edge.profile.reserve import DEFAULT_RESERVE
from edge.units import MIB

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """Requested settings of one model: keys of a profile, of `[set]`, of `set = {…}` and of --set."""

    quant: Annotated[str, Meta(description="the quantization wanted, e.g. Q5_K_M")] = "Q5_K_M"
    prefer: Annotated[
        Literal["balanced", "quality", "speed"],
        Meta(description="quality takes a larger quantization when there is room, speed a smaller one"),
    ] = "balanced"
    n_ctx: Annotated[
        int,
        Meta(ge=0, le=1 << 24, description="context in tokens, over all slots; 0 is what the model was trained for"),
    ] = 8192
    n_ctx_min: Annotated[int, Meta(ge=256, le=1 << 24, description="the smallest context a slot may get")] = 4096
    n_parallel: Annotated[int, Meta(ge=1, le=256, description="slots: requests worked on at once")] = 1
    backend: Annotated[Literal["any", "cuda", "cpu"], Meta(description="backend that the engine must have")] = "any"
    offload: Annotated[Literal["full", "none"], Meta(description="which layers go to the GPU")] = "full"
    partial_offload: Annotated[
        bool, Meta(description="on discrete GPUs: layers may stay on the host when not all fit")
    ] = False
    fallback: Annotated[Literal["refuse", "cpu"], Meta(description="what to do when the GPU cannot be used")] = "refuse"
    load_mode: Annotated[
        Literal["auto", "none", "mmap", "dio"], Meta(description="how weights are read; auto decides by board and plan")
    ] = "auto"
    kv_type_k: Annotated[KvType, Meta(description="type of the K cache")] = "f16"
    kv_type_v: Annotated[KvType, Meta(description="type of the V cache")] = "f16"
    kv_type_min: Annotated[KvType, Meta(description="the smallest KV type the ladder may take")] = "q8_0"
    flash_attention: Annotated[Literal["auto", "on", "off"], Meta(description="flash attention")] = "auto"
    n_threads: Annotated[int, Meta(ge=0, le=1024, description="CPU threads; 0 is one a physical core")] = 0
    n_batch: Annotated[int, Meta(ge=32, le=1 << 16, description="logical batch")] = 2048
    n_ubatch: Annotated[int, Meta(ge=32, le=1 << 16, description="physical batch")] = 512
    cache_ram: Annotated[
        int,
        Meta(
            ge=0,
            extra=SIZE,
            description="cap of the engine's prompt cache and context checkpoints in host memory; 0 is off",
        ),
    ] = 256 * MIB
    split_mode: Annotated[Literal["none", "layer", "row"], Meta(description="how several GPUs share a model")] = "layer"
    tensor_split: Annotated[
        tuple[Annotated[float, Meta(ge=0)], ...], Meta(description="share of each GPU; empty is by free memory")
    ] = ()
    # GGML_CUDA_ENABLE_UNIFIED_MEMORY
    managed_memory: Annotated[
        bool, Meta(description="CUDA managed memory (works around NvMap refusals of L4T 36.4.7)")
    ] = False
    reserve: Annotated[str, Meta(extra=RESERVE, description="memory that stays free, e.g. max(1GiB, 10%)")] = (
        DEFAULT_RESERVE
    )
    power_mode: Annotated[str, Meta(description="nvpmodel mode wanted; shown by the doctor, never set")] = ""
    recipe: Annotated[str, Meta(description="recipe of `edgellm build`")] = ""
    min_tokens_s: Annotated[float, Meta(ge=0, description="slower models are not chosen when none is named")] = 8.0
    warmup_tokens: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1 << 16)], ...], Meta(description="prompt lengths warmed while idle")
    ] = (1, 128)
    system_prompt: Annotated[
        str, Meta(description="computed while idle, so that the first request does not wait for it")
    ] = ""
    nice: Annotated[int, Meta(ge=0, le=19, description="nice value of the engine's process")] = 0
    # Above 0, so that the kernel takes the engine before this process, which would restart it.
    oom_score_adj: Annotated[
        int, Meta(ge=0, le=1000, description="how readily the kernel kills the engine for memory")
    ] = 500
    cpus: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=4095)], ...], Meta(description="processors the engine may use; empty is all")
    ] = ()


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """`[restart]`: when the supervisor waits, restarts and kills an engine. Seconds are monotonic."""

    # As long as the longest pause: an engine that lived so long was in no crash loop.
    stable_s: Annotated[float, Meta(ge=0, description="seconds of READY after which a start counts as good")] = 60.0
    # No pause before the first restart: most crashes are single.
    backoff_s: Annotated[
        tuple[Annotated[float, Meta(ge=0)], ...], Meta(description="pauses before the next starts; the last repeats")
    ] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
    # No log line, byte or CPU time for a minute: no load that works is this quiet.
    stall_s: Annotated[float, Meta(ge=1, description="a load without progress for so long is restarted")] = 60.0
    # A prompt that is being processed burns CPU or GPU submit time.
    wedge_s: Annotated[
        float, Meta(ge=1, description="an engine without CPU or GPU activity during a request is restarted")
    ] = 60.0
    drain_s: Annotated[float, Meta(ge=0, description="longest wait for open requests before an engine stops")] = 30.0
    # llama-server frees GPU memory in about a second.
    term_s: Annotated[float, Meta(ge=0, description="from SIGTERM to SIGKILL")] = 10.0
    # The driver of a cold board came up within three tries in every report (FC-74).
    device_attempts: Annotated[int, Meta(ge=0, le=100, description="more starts when the GPU does not come up")] = 3


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """`[telemetry]`."""

    jtop: Annotated[Literal["auto", "off"], Meta(description="read jetson-stats where it runs")] = "auto"
    interval_s: Annotated[float, Meta(ge=0.1, le=60, description="seconds between samples")] = 1.0


@dataclass(frozen=True, slots=True)
class ThermalConfig:
    """`[thermal]`. Margins are below the trip point at which the hardware throttles."""

    act: Annotated[bool, Meta(description="hold work back near the throttle point; false only observes")] = False
    max_watts: Annotated[Annotated[float, Meta(ge=1)] | None, Meta(description="hold work back above this power")] = (
        None
    )
    warn_margin_c: Annotated[float, Meta(ge=0, le=60, description="warn this far below the throttle point")] = 10.0
    act_margin_c: Annotated[float, Meta(ge=0, le=60, description="act this far below the throttle point")] = 4.0


@dataclass(frozen=True, slots=True)
class Tier:
    """A range of memory in a profile. `memory_max_bytes` None is no limit; `values` are its settings by key."""

    name: Annotated[str, Meta(description="name of the tier")] = ""
    memory_max_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(title="memory_max", extra=SIZE, description="boards up to this memory"),
    ] = None
    names: Annotated[tuple[str, ...], Meta(description="profile names that mean this tier")] = ()
    values: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of `auto`: the profile to use for boards that match. Empty conditions match every board."""

    profile: Annotated[str, Meta(description="profile to use")] = ""
    socs: Annotated[tuple[str, ...], Meta(description="systems on chip, e.g. Orin")] = ()
    containers: Annotated[tuple[str, ...], Meta(description="containers, e.g. wsl2")] = ()
    gpus_min: Annotated[int, Meta(ge=0, description="at least so many discrete GPUs")] = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """`origins` names, by key, where each setting came from; a key that it lacks has its default.

    `sections` holds restart.*, thermal.* and telemetry.*, which edgellm.toml overrides; `tier` is known after
    resolve_tier.
    """

    name: str
    summary: str
    wishes: Wishes
    tiers: tuple[Tier, ...] = ()
    choices: tuple[Choice, ...] = ()
    tier: str | None = None
    sections: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()


SETTINGS = fields_of(Wishes)
# Tables that a profile may hold and edgellm.toml overrides.
SECTIONS = {
    **fields_of(RestartConfig, "restart."),
    **fields_of(TelemetryConfig, "telemetry."),
    **fields_of(ThermalConfig, "thermal."),
}
TIER_KEYS = fields_of(Tier)
CHOICE_KEYS = fields_of(Choice)
