"""Configuration of this machine: edgellm.toml, flags and environment as one value.

Each key stands here once, with default, limits and help (fields.py); the reader, `config show`, the JSON
Schema of a profile and docs/configuration.md are derived from it.
"""

# Without `from __future__ import annotations`: as text each of some hundred annotations would be compiled at every
# start, 3 ms in all.
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from edge.board.memory import DEFAULT_RESERVE
from edge.config.devices import DEVICE_KEYS, DeviceConfig
from edge.config.fields import fields_of, key
from edge.units import MIB

# A profile: requested settings and limits for a kind of board. Values only; profiles/*.toml hold them.

_NotNegative = Annotated[float, Meta(ge=0)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_PER_REQUEST = key("default of a request without one")
KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_1", "q4_0"]


class Preset(Struct, frozen=True):
    """Requested settings of one model: keys of a profile, of `[set]`, of `set = {…}` and of --set."""

    quant: Annotated[str, key("the quantization wanted, e.g. Q5_K_M")] = "Q5_K_M"
    prefer: Annotated[
        Literal["balanced", "quality", "speed"],
        key("quality takes a larger quantization when there is room, speed a smaller one"),
    ] = "balanced"
    n_ctx: Annotated[
        int, key("context of one request (slot), in tokens; 0 is what the model was trained for", ge=0, le=1 << 24)
    ] = 8192
    n_ctx_min: Annotated[int, key("the smallest context a slot may get", ge=256, le=1 << 24)] = 4096
    n_parallel: Annotated[int, key("slots: requests worked on at once", ge=1, le=256)] = 1
    backend: Annotated[Literal["any", "cuda", "cpu"], key("backend that the engine must have")] = "any"
    offload: Annotated[Literal["full", "none"], key("which layers go to the GPU")] = "full"
    partial_offload: Annotated[bool, key("on discrete GPUs: layers may stay on the host when not all fit")] = False
    fallback: Annotated[Literal["refuse", "cpu"], key("what to do when the GPU cannot be used")] = "refuse"
    load_mode: Annotated[
        Literal["auto", "none", "mmap", "dio"], key("how weights are read; auto decides by board and plan")
    ] = "auto"
    keep_cached: Annotated[
        bool, key("on unified memory: leave the file in the page cache after READY, for a sooner restart")
    ] = False
    kv_type_k: Annotated[KvType, key("type of the K cache")] = "f16"
    kv_type_v: Annotated[KvType, key("type of the V cache")] = "f16"
    kv_type_min: Annotated[KvType, key("the smallest KV type the ladder may take")] = "q8_0"
    flash_attention: Annotated[Literal["auto", "on", "off"], key("flash attention")] = "auto"
    n_threads: Annotated[int, key("CPU threads; 0 is one a core that others leave free", ge=0, le=1024)] = 0
    n_batch: Annotated[int, key("logical batch", ge=32, le=1 << 16)] = 2048
    n_ubatch: Annotated[int, key("physical batch", ge=32, le=1 << 16)] = 512
    cache_ram: Annotated[
        int, key("cap of the engine's prompt cache and context checkpoints in host memory; 0 is off", ge=0, kind="size")
    ] = 256 * MIB
    split_mode: Annotated[Literal["none", "layer", "row"], key("how several GPUs share a model")] = "layer"
    gpus: Annotated[
        tuple[str, ...],
        key("GPUs to use: UUIDs, indexes of nvidia-smi or names; empty is every visible one", kind="words"),
    ] = ()
    tensor_split: Annotated[tuple[_NotNegative, ...], key("share of each GPU; empty is by free memory")] = ()
    # GGML_CUDA_ENABLE_UNIFIED_MEMORY
    managed_memory: Annotated[bool, key("CUDA managed memory (works around NvMap refusals of L4T 36.4.7)")] = False
    reserve: Annotated[str, key("memory that stays free, e.g. max(1GiB, 10%)", kind="reserve")] = DEFAULT_RESERVE
    power_mode: Annotated[str, key("nvpmodel mode wanted; shown by the doctor, never set")] = ""
    recipe: Annotated[str, key("recipe of `edgellm build`")] = ""
    min_tokens_s: Annotated[float, key("slower models are not chosen when none is named", ge=0)] = 8.0
    warmup_tokens: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1 << 16)], ...], key("prompt lengths warmed while idle")
    ] = (1, 128)
    system_prompt: Annotated[str, key("computed while idle, so that the first request does not wait for it")] = ""
    system_prompt_file: Annotated[
        str, key("system_prompt as a text file; kept computed across restarts from 512 tokens on", one_model=True)
    ] = ""
    saved_prompts: Annotated[
        Literal["auto", "on", "off"],
        key("keep prompts of 512 tokens and more on disk across restarts; auto: on SSDs and hard disks only"),
    ] = "auto"
    saved_prompts_max: Annotated[int, key("disk space of the saved prompts of all models", ge=1 << 20, kind="size")] = (
        1024 * MIB
    )
    nice: Annotated[int, key("nice value of the engine's process", ge=0, le=19)] = 0
    chat_template_file: Annotated[str, key("a Jinja chat template instead of the file's own", one_model=True)] = ""
    chat_template_kwargs: Annotated[dict[str, Any], key("arguments of the chat template")] = {}
    reasoning: Annotated[Literal["auto", "on", "off"], key("thinking; auto leaves it to the chat template")] = "auto"
    reasoning_budget: Annotated[int, key("most tokens of thinking; -1 is no limit, 0 ends it at once", ge=-1)] = -1
    temperature: Annotated[_NotNegative | None, key("default of a request without one; (none): the model's own")] = None
    top_p: Annotated[_Share | None, _PER_REQUEST] = None
    top_k: Annotated[Annotated[int, Meta(ge=0)] | None, _PER_REQUEST] = None
    min_p: Annotated[_Share | None, _PER_REQUEST] = None
    repeat_penalty: Annotated[_NotNegative | None, _PER_REQUEST] = None
    presence_penalty: Annotated[_Penalty | None, _PER_REQUEST] = None
    frequency_penalty: Annotated[_Penalty | None, _PER_REQUEST] = None
    pooling: Annotated[
        Literal["auto", "none", "mean", "cls", "last", "rank"], key("how embeddings are pooled; auto: as the file says")
    ] = "auto"
    mmproj: Annotated[
        str, key("vision or audio projector: auto takes the one beside the model, none, or a path", one_model=True)
    ] = "auto"
    lora: Annotated[tuple[str, ...], key("LoRA adapters, PATH or PATH:SCALE", one_model=True)] = ()
    rope_scaling: Annotated[
        Literal["auto", "none", "linear", "yarn"], key("how positions beyond the trained context are scaled")
    ] = "auto"
    rope_scale: Annotated[float, key("factor of rope_scaling over the trained context; 0: none", ge=0)] = 0.0
    draft: Annotated[
        str, key("smaller model that drafts tokens: NAME[:QUANT], a path or a pulled source", one_model=True)
    ] = ""
    speculation: Annotated[
        Literal["off", "ngram", "mtp", "auto"],
        key("drafts without a second model: repeated text, the file's own MTP layers, or what `bench draft` measured"),
    ] = "off"
    args: Annotated[
        tuple[str, ...], key("further options of the engine, as in llama-server --help", kind="words", one_model=True)
    ] = ()
    ui: Annotated[
        bool | None,
        key("llama.cpp's own web page under /upstream/ID/, where the engine has one; (none): only on loopback"),
    ] = None
    # Above 0, so that the kernel takes the engine before this process, which would restart it.
    oom_score_adj: Annotated[int, key("how readily the kernel kills the engine for memory", ge=0, le=1000)] = 500
    cpus: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=4095)], ...], key("processors the engine may use; empty is all")
    ] = ()


class RestartConfig(Struct, frozen=True):
    """`[restart]`: when the supervisor waits, restarts and kills an engine. Seconds are monotonic."""

    # As long as the longest pause: an engine that lived so long was in no crash loop.
    stable_s: Annotated[float, key("seconds of READY after which a start counts as good", ge=0)] = 60.0
    # No pause before the first restart: most crashes are single.
    backoff_s: Annotated[
        tuple[Annotated[float, Meta(ge=0)], ...], key("pauses before the next starts; the last repeats")
    ] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
    # No log line, byte or CPU time for a minute: no load that works is this quiet.
    stall_s: Annotated[float, key("a load without progress for so long is restarted", ge=1)] = 60.0
    # A prompt that is being processed burns CPU or GPU submit time.
    wedge_s: Annotated[float, key("an engine without CPU or GPU activity during a request is restarted", ge=1)] = 60.0
    drain_s: Annotated[float, key("longest wait for open requests before an engine stops", ge=0)] = 30.0
    # llama-server frees GPU memory in about a second.
    term_s: Annotated[float, key("from SIGTERM to SIGKILL", ge=0)] = 10.0
    # The driver of a cold board came up within three tries in every report (FC-74).
    device_attempts: Annotated[int, key("more starts when the GPU does not come up", ge=0, le=100)] = 3


class TelemetryConfig(Struct, frozen=True):
    """`[telemetry]`."""

    jtop: Annotated[Literal["auto", "off"], key("read jetson-stats where it runs")] = "auto"
    interval_s: Annotated[float, key("seconds between samples", ge=0.1, le=60)] = 1.0


class ThermalConfig(Struct, frozen=True):
    """`[thermal]`. Margins are below the trip point at which the hardware throttles."""

    act: Annotated[bool, key("hold work back near the throttle point; false only observes")] = False
    max_watts: Annotated[Annotated[float, Meta(ge=1)] | None, key("hold the mean power at this, whatever act is")] = (
        None
    )
    warn_margin_c: Annotated[float, key("warn this far below the throttle point", ge=0, le=60)] = 10.0
    act_margin_c: Annotated[float, key("act this far below the throttle point", ge=0, le=60)] = 4.0


class Tier(Struct, frozen=True):
    """A range of memory in a profile. `memory_max_bytes` None is no limit; `values` are its settings by key."""

    name: Annotated[str, key("name of the tier")] = ""
    memory_max_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None, key("boards up to this memory", title="memory_max", kind="size")
    ] = None
    names: Annotated[tuple[str, ...], key("profile names that mean this tier")] = ()
    values: dict[str, object] = field(default_factory=dict)


class ModelChoice(Struct, frozen=True):
    """A row of `auto`: the profile to use for boards that match. Empty conditions match every board."""

    profile: Annotated[str, key("profile to use")] = ""
    socs: Annotated[tuple[str, ...], key("systems on chip, e.g. Orin")] = ()
    containers: Annotated[tuple[str, ...], key("containers, e.g. wsl2")] = ()
    gpus_min: Annotated[int, key("at least so many discrete GPUs", ge=0)] = 0


class Profile(Struct, frozen=True):
    """`origins` names, by key, where each setting came from; a key that it lacks has its default.

    `sections` holds restart.*, thermal.* and telemetry.*, which edgellm.toml overrides; `tier` is known after
    resolve_tier.
    """

    name: str
    summary: str
    preset: Preset
    tiers: tuple[Tier, ...] = ()
    choices: tuple[ModelChoice, ...] = ()
    tier: str | None = None
    sections: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    source: str = ""
    notes: tuple[str, ...] = ()


SETTINGS = fields_of(Preset)
# Tables that a profile may hold and edgellm.toml overrides.
SECTIONS = {
    **fields_of(RestartConfig, "restart."),
    **fields_of(TelemetryConfig, "telemetry."),
    **fields_of(ThermalConfig, "thermal."),
}
TIER_KEYS = fields_of(Tier)
CHOICE_KEYS = fields_of(ModelChoice)


class ModelConfig(Struct, frozen=True):
    """One `[[model]]`. `set` holds settings of this model only; with `command` another engine than llama.cpp serves."""

    id: Annotated[str, key("public id of the model; from ref where it is missing")] = ""
    ref: Annotated[str, key("NAME[:QUANT], a path, hf://, modelscope://, pypi:// or https://")] = ""
    aliases: Annotated[tuple[str, ...], key("other ids of this model")] = ()
    preload: Annotated[bool, key("load at start; false loads at the first request")] = True
    ttl_s: Annotated[float, key("idle seconds until the model sleeps; 0 is never", ge=0)] = 0.0
    priority: Annotated[int, key("higher is planned first and evicted last")] = 0
    pin: Annotated[bool, key("never evict")] = False
    warm_at: Annotated[str, key("time of day, HH:MM, by which the model is warm")] = ""
    return_to: Annotated[str, key("id of the model that comes back once this one sleeps, if there is room")] = ""
    role: Annotated[Literal["chat", "embedding", "rerank"], key("kind of requests it serves")] = "chat"
    command: Annotated[
        tuple[str, ...], key("another engine in place of ref: its command line, with {port} for its loopback port")
    ] = ()
    memory: Annotated[
        int, key("with command: host memory that it takes, until that is measured", ge=0, kind="size")
    ] = 0
    gpu_memory: Annotated[int, key("with command: memory of the first GPU that it takes", ge=0, kind="size")] = 0
    ready: Annotated[str, key("with command: path that answers 2xx once it serves")] = "/health"
    routes: Annotated[
        tuple[str, ...], key("with command: paths that it serves; one that ends in / is a prefix; empty is all")
    ] = ()
    env: Annotated[dict[str, str], key("with command: variables of its environment")] = {}
    set: dict[str, object] = field(default_factory=dict)
    origin: str = ""


class StoreConfig(Struct, frozen=True):
    """`[store]`: where models are looked for beside the store's own folder."""

    dirs: Annotated[tuple[str, ...], key("extra model folders, read only")] = ()


class MemoryConfig(Struct, frozen=True):
    """`[memory]`."""

    reserve: Annotated[
        str, key("memory that stays free, of MemTotal or of a GPU's VRAM, e.g. max(1GiB, 10%)", kind="reserve")
    ] = DEFAULT_RESERVE
    limit: Annotated[
        int,
        key("memory that all models together may take; 0 is all beside the reserve", ge=0, kind="size"),
    ] = 0


class HoldConfig(Struct, frozen=True):
    """`[gateway.hold]`: how much the gateway keeps waiting while a model loads."""

    requests: Annotated[int, key("requests held while a model loads", ge=0)] = 64
    bytes: Annotated[int, key("bytes of held bodies, and of answers kept whole", ge=0, kind="size")] = 64 * MIB
    # A 35 GB model takes ten minutes from the SD card of a Jetson (60 MB/s).
    seconds: Annotated[float, key("longest hold", ge=0)] = 900.0


class GatewayConfig(Struct, frozen=True):
    """`[gateway]`."""

    keys_file: Annotated[str, key("file of API keys; empty is keys.toml in the config folder")] = ""
    cors_origins: Annotated[tuple[str, ...], key("web origins that may call the API")] = ()
    hosts: Annotated[tuple[str, ...], key("extra names the Host header may carry")] = ()
    max_body_bytes: Annotated[int, key("largest request body", ge=1024, kind="size")] = 64 * MIB
    unknown_model: Annotated[Literal["only", "strict"], key("only: any name gets the only model; strict: 404")] = "only"
    default_model: Annotated[str, key("id or alias for requests that name no model; empty: 404 with several")] = ""
    queue: Annotated[int, key("requests that wait for a slot of a model before others get 429", ge=0)] = 64
    heartbeat_s: Annotated[float, key("seconds between comments in a stream that waits; 0: none", ge=0)] = 10.0
    tls_cert: Annotated[str, key("certificate chain, PEM; with it the API speaks TLS")] = ""
    tls_key: Annotated[str, key("key of the certificate, PEM")] = ""
    access_log: Annotated[Literal["text", "json", "off"], key("one line a request, in the run folder")] = "text"
    log_prompts: Annotated[bool, key("the access log holds the start of each request's body")] = False
    hold: HoldConfig = HoldConfig()


class Override(Struct, frozen=True):
    """A setting above the profile, for every model."""

    value: object
    origin: str


class Config(Struct, frozen=True):
    """`origins` names, by dotted key, where each value came from; a key that it lacks has its default."""

    profile: Annotated[str, key("kind of board: auto, orin, thor, xavier, cuda, multi-gpu, wsl2, cpu, or a file")] = (
        "auto"
    )
    listen: Annotated[tuple[str, ...], key("addresses of the API, host:port")] = ("127.0.0.1:8080",)
    strict: Annotated[bool, key("refuse to serve when degraded")] = False
    insecure: Annotated[bool, key("serve other machines without a key")] = False
    engine: Annotated[str, key("engine id or a llama-server binary; empty is the selected one")] = ""
    models: tuple[ModelConfig, ...] = ()
    devices: tuple[DeviceConfig, ...] = ()
    store: StoreConfig = StoreConfig()
    memory: MemoryConfig = MemoryConfig()
    gateway: GatewayConfig = GatewayConfig()
    restart: RestartConfig = field(default_factory=RestartConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    thermal: ThermalConfig = field(default_factory=ThermalConfig)
    overrides: dict[str, Override] = field(default_factory=dict)  # settings by key
    notes: tuple[str, ...] = ()  # for `plan` and the console
    origins: dict[str, str] = field(default_factory=dict)


# Keys of edgellm.toml except `[[model]]` and `[set]`, dotted, and those of one `[[model]]`.
CONFIG_KEYS = fields_of(Config)
MODEL_KEYS = fields_of(ModelConfig)


def place_of(key: str) -> str | None:
    """Return the section that a misplaced key belongs to, as it is written; None for an unknown key."""
    dotted = next((known for known in CONFIG_KEYS if known == key or known.endswith(f".{key}")), None)
    if dotted is not None:
        table, _, name = dotted.rpartition(".")
        return f"[{table}] of edgellm.toml: {name} = …" if table else f"the top of edgellm.toml: {name} = …"
    if key in SETTINGS:
        return f"[set], or for one model: set = {{ {key} = … }}"
    if key in DEVICE_KEYS:
        return f"[[device]]: {key} = …"
    return f"[[model]]: {key} = …" if key in MODEL_KEYS else None
