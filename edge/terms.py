"""Sections of edgellm.toml as the supervisor's and the gateway's own values. Pure."""

from __future__ import annotations

from pathlib import Path

from edge.config import Config
from edge.folders import Folders
from edge.gateway.settings import GatewayConfig
from edge.supervisor.policy import Policy


def policy(config: Config) -> Policy:
    """[restart]."""
    return Policy(stable_s=config.restart.stable_s, backoff_s=config.restart.backoff_s)


def gateway_config(config: Config, folders: Folders) -> GatewayConfig:
    """[gateway]."""
    section = config.gateway
    return GatewayConfig(
        keys_file=Path(section.keys_file) if section.keys_file else folders.config / "keys.toml",
        cors_origins=section.cors_origins,
        hosts=section.hosts,
        max_body_bytes=section.max_body_bytes,
        hold_requests=section.hold.requests,
        hold_bytes=section.hold.bytes,
        hold_seconds=section.hold.seconds,
        unknown_model=section.unknown_model,
        strict=config.strict,
        insecure=config.insecure,
    )
