"""What this machine serves: edgellm.toml, flags and environment as one value. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.profile.reserve import DEFAULT_RESERVE
from edge.units import MIB


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One `[[model]]`. `set` holds settings of this model only (keys of profile.settings)."""

    id: str
    ref: str
    aliases: tuple[str, ...] = ()
    preload: bool = True
    ttl_s: float = 0.0  # idle seconds until it sleeps; 0 is never
    priority: int = 0
    pin: bool = False
    warm_at: str = ""  # "08:00"
    role: str = "chat"  # "chat" | "embedding" | "rerank"
    set: dict[str, object] = field(default_factory=dict)
    origin: str = ""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    dirs: tuple[str, ...] = ()  # extra, read-only


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    reserve: str = DEFAULT_RESERVE


@dataclass(frozen=True, slots=True)
class HoldConfig:
    """How much the gateway may keep waiting for a model."""

    requests: int = 64
    bytes: int = 64 * MIB
    seconds: float = 900.0


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    keys_file: str = ""  # empty: keys.toml in the config folder
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 * MIB
    unknown_model: str = "only"  # "only" | "strict"
    queue: int = 8  # requests in line for a slot, per model
    tls_cert: str = ""
    tls_key: str = ""
    access_log: str = "text"  # "text" | "json" | "off"
    log_prompts: bool = False
    hold: HoldConfig = HoldConfig()


@dataclass(frozen=True, slots=True)
class RestartConfig:
    stable_s: float = 60.0
    backoff_s: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
    stall_s: float = 60.0
    wedge_s: float = 60.0
    drain_s: float = 30.0
    term_s: float = 10.0
    device_attempts: int = 3


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    jtop: str = "auto"  # "auto" | "off"
    interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ThermalConfig:
    """`act` false only observes. Margins are below the trip point at which the hardware throttles."""

    act: bool = False
    max_watts: float | None = None
    warn_margin_c: float = 10.0
    act_margin_c: float = 4.0


@dataclass(frozen=True, slots=True)
class Override:
    """A wish set above the profile, for every model."""

    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """`origins` names, by dotted key, where each value came from; what is not there is the default."""

    profile: str = "auto"
    listen: tuple[str, ...] = ("127.0.0.1:8080",)
    strict: bool = False
    insecure: bool = False
    engine: str = ""  # id or path; empty: the selected one
    models: tuple[ModelConfig, ...] = ()
    store: StoreConfig = StoreConfig()
    memory: MemoryConfig = MemoryConfig()
    gateway: GatewayConfig = GatewayConfig()
    restart: RestartConfig = RestartConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    thermal: ThermalConfig = ThermalConfig()
    overrides: dict[str, Override] = field(default_factory=dict)  # wishes by key
    origins: dict[str, str] = field(default_factory=dict)
