"""Configuration of this machine: edgellm.toml, flags and environment as one value.

Each key stands here once, with default, limits and help (fields.py); the reader, `config show`, the JSON
Schema of a profile and docs/configuration.md are derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from edge.profile.fields import fields_of, key
from edge.profile.profile import SETTINGS
from edge.profile.profile import RestartConfig as RestartConfig
from edge.profile.profile import TelemetryConfig as TelemetryConfig
from edge.profile.profile import ThermalConfig as ThermalConfig
from edge.profile.reserve import DEFAULT_RESERVE
from edge.units import MIB


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One `[[model]]`. `set` holds settings of this model only."""

    id: Annotated[str, key("public id of the model; from ref where it is missing")] = ""
    ref: Annotated[str, key("NAME[:QUANT], a path, hf://, pypi:// or https://")] = ""
    aliases: Annotated[tuple[str, ...], key("other ids of this model")] = ()
    preload: Annotated[bool, key("load at start; false loads at the first request")] = True
    ttl_s: Annotated[float, key("idle seconds until the model sleeps; 0 is never", ge=0)] = 0.0
    priority: Annotated[int, key("higher is planned first and evicted last")] = 0
    pin: Annotated[bool, key("never evict")] = False
    warm_at: Annotated[str, key("time of day, HH:MM, by which the model is warm")] = ""
    role: Annotated[Literal["chat", "embedding", "rerank"], key("kind of requests it serves")] = "chat"
    set: dict[str, object] = field(default_factory=dict)
    origin: str = ""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`[store]`: where models are looked for beside the store's own folder."""

    dirs: Annotated[tuple[str, ...], key("extra model folders, read only")] = ()


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """`[memory]`."""

    reserve: Annotated[
        str, key("memory that stays free, of MemTotal or of a GPU's VRAM, e.g. max(1GiB, 10%)", kind="reserve")
    ] = DEFAULT_RESERVE


@dataclass(frozen=True, slots=True)
class HoldConfig:
    """`[gateway.hold]`: how much the gateway keeps waiting while a model loads."""

    requests: Annotated[int, key("requests held while a model loads", ge=0)] = 64
    bytes: Annotated[int, key("bytes of bodies held while a model loads", ge=0, kind="size")] = 64 * MIB
    # A 35 GB model takes ten minutes from the SD card of a Jetson (60 MB/s).
    seconds: Annotated[float, key("longest hold", ge=0)] = 900.0


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`[gateway]`."""

    keys_file: Annotated[str, key("file of API keys; empty is keys.toml in the config folder")] = ""
    cors_origins: Annotated[tuple[str, ...], key("web origins that may call the API")] = ()
    hosts: Annotated[tuple[str, ...], key("extra names the Host header may carry")] = ()
    max_body_bytes: Annotated[int, key("largest request body", ge=1024, kind="size")] = 64 * MIB
    unknown_model: Annotated[Literal["only", "strict"], key("only: any name gets the only model; strict: 404")] = "only"
    queue: Annotated[int, key("requests that wait for a slot of a model before others get 429", ge=0)] = 64
    heartbeat_s: Annotated[float, key("seconds between comments in a stream that waits; 0: none", ge=0)] = 10.0
    tls_cert: Annotated[str, key("certificate chain, PEM; with it the API speaks TLS")] = ""
    tls_key: Annotated[str, key("key of the certificate, PEM")] = ""
    access_log: Annotated[Literal["text", "json", "off"], key("one line a request, in the run folder")] = "text"
    log_prompts: Annotated[bool, key("the access log holds the start of each request's body")] = False
    hold: HoldConfig = HoldConfig()


@dataclass(frozen=True, slots=True)
class Override:
    """A setting above the profile, for every model."""

    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """`origins` names, by dotted key, where each value came from; a key that it lacks has its default."""

    profile: Annotated[str, key("kind of board: auto, orin, thor, xavier, cuda, multi-gpu, wsl2, cpu, or a file")] = (
        "auto"
    )
    listen: Annotated[tuple[str, ...], key("addresses of the API, host:port")] = ("127.0.0.1:8080",)
    strict: Annotated[bool, key("refuse to serve when degraded")] = False
    insecure: Annotated[bool, key("serve other machines without a key")] = False
    engine: Annotated[str, key("engine id or a llama-server binary; empty is the selected one")] = ""
    models: tuple[ModelConfig, ...] = ()
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
    return f"[[model]]: {key} = …" if key in MODEL_KEYS else None
