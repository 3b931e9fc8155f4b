"""Options of the gateway: the [gateway] section with its paths resolved, and bounds of one client. Values only."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, field

from edge.config.values import GatewayConfig
from edge.units import KIB

_SECTION = GatewayConfig()  # the defaults of the keys stand there


class ClientLimits(Struct, frozen=True):
    """Bounds that keep one client from starving the others. Not in the configuration file."""

    connections: int = 512
    connections_per_peer: int = 256  # of one address that is not loopback
    handshakes: int = 128  # of TLS, in progress
    probe_s: float = 2.0  # for the request of a connection that was accepted for probes only
    header_s: float = 20.0  # from the first byte of a request to its last header
    idle_s: float = 120.0  # between requests; longer than the 20–90 s of common client pools
    grace_s: float = 1.0  # a connection so young may not have been read yet: it is not ended to make room
    stall_s: float = 60.0  # an answer of which the client takes not a byte; it holds a slot meanwhile
    body_idle_s: float = 30.0  # between two pieces of a body
    body_bytes_per_s: int = 500  # on average, once `body_idle_s` is over
    header_field_bytes: int = 16 * KIB
    header_bytes: int = 32 * KIB  # all of one request, as nginx has it (large_client_header_buffers 4 8k)
    replay_bytes: int = 256 * KIB  # bodies up to this size are kept, so that they can be sent twice

    @property
    def probe_connections(self) -> int:
        """Connections beyond `connections` that serve probes only."""
        return self.connections // 16


class GatewayOptions(Struct, frozen=True):
    """`[gateway]` of edgellm.toml and the flags beside it. `keys_file` None: no key can exist."""

    keys_file: Path | None = None
    cors_origins: tuple[str, ...] = _SECTION.cors_origins
    hosts: tuple[str, ...] = _SECTION.hosts
    max_body_bytes: int = _SECTION.max_body_bytes
    hold_requests: int = _SECTION.hold.requests
    hold_bytes: int = _SECTION.hold.bytes
    hold_seconds: float = _SECTION.hold.seconds
    unknown_model: str = _SECTION.unknown_model
    default_model: str = _SECTION.default_model  # empty: several models answer only to their names
    queue_requests: int = _SECTION.queue
    heartbeat_s: float = _SECTION.heartbeat_s
    strict: bool = False
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    access_log: Path | None = None  # None: only to the logger edge.access
    log_json: bool = False
    log_prompts: bool = _SECTION.log_prompts
    limits: ClientLimits = field(default_factory=ClientLimits)
