"""What the operator may set about the gateway. Values only."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, field

from edge.units import KIB, MIB


class ClientLimits(Struct, frozen=True):
    """Bounds that keep one rude client from starving the others. Not in the configuration file."""

    connections: int = 512
    header_s: float = 20.0  # from the first byte of a request to its last header
    idle_s: float = 120.0  # between requests; longer than the 20–90 s of common client pools
    grace_s: float = 1.0  # a connection so young may not have been read yet: it is not ended to make room
    stall_s: float = 60.0  # an answer of which the client takes not a byte; it holds a slot meanwhile
    body_idle_s: float = 30.0  # between two pieces of a body
    body_bytes_per_s: int = 500  # on average, once `body_idle_s` is over
    header_field_bytes: int = 16 * KIB
    replay_bytes: int = 256 * KIB  # bodies up to this size are kept, so that they can be sent twice


class GatewayOptions(Struct, frozen=True):
    """`[gateway]` of edgellm.toml and the flags that belong to it. `keys_file` None means that no key can exist."""

    keys_file: Path | None = None
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 * MIB
    hold_requests: int = 64
    hold_bytes: int = 64 * MIB
    hold_seconds: float = 900.0
    unknown_model: str = "only"  # "only" | "strict"
    queue_requests: int = 64  # per model, beyond its slots
    heartbeat_s: float = 10.0  # between comments in a stream that waits; 0: none
    strict: bool = False
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    access_log: Path | None = None  # None: only to the logger edge.access
    log_json: bool = False
    log_prompts: bool = False
    limits: ClientLimits = field(default_factory=ClientLimits)
