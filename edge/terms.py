"""Convert configuration and plan into the options of supervisor and gateway. Pure."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from edge.config import Config
from edge.folders import Folders
from edge.gateway.settings import GatewayConfig
from edge.plan.plan import LaunchPlan, ModelPlan
from edge.prepare import Prepared, config_of, wants_gpu, wishes_of
from edge.status import Degraded
from edge.supervisor.hygiene import hygiene
from edge.supervisor.pace import expected_speed
from edge.supervisor.policy import Policy
from edge.supervisor.terms import Terms


def gateway_config(config: Config, folders: Folders) -> GatewayConfig:
    """Return the [gateway] section with its paths resolved."""
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
        queue_requests=section.queue,
        heartbeat_s=section.heartbeat_s,
        tls_cert=Path(section.tls_cert) if section.tls_cert else None,
        tls_key=Path(section.tls_key) if section.tls_key else None,
        access_log=None if section.access_log == "off" else folders.instance_run / "log" / "access.log",
        log_json=section.access_log == "json",
        log_prompts=section.log_prompts,
    )


def terms_of(prepared: Prepared, model: ModelPlan, last_good_tokens_s: float | None = None) -> Terms:
    """Return the options of a model's supervisor. `last_good_tokens_s`: speed of the last good start on this rung."""
    wishes, plan = wishes_of(prepared, model.id), model.ladder.plans[model.ladder.chosen]
    config = config_of(prepared, model.id)
    return Terms(
        policy=Policy(**asdict(prepared.config.restart)),
        hygiene=hygiene(wishes),
        strict=prepared.config.strict,
        capability=prepared.board.compute_capability,
        l4t=prepared.board.l4t,
        system_prompt=wishes.system_prompt,
        warmup_tokens=wishes.warmup_tokens,
        preload=config.preload,
        ttl_s=config.ttl_s,
        expected_speed=expected_speed(prepared.board, (plan.model or model.model).meta, plan, last_good_tokens_s),
        known=(*without_device(prepared, plan), *other_engine(prepared)),
    )


def without_device(prepared: Prepared, plan: LaunchPlan) -> tuple[Degraded, ...]:
    """Return the degradation of a plan for the CPU under a profile that requests the GPU; empty otherwise."""
    if not wants_gpu(prepared.profile) or plan.settings.n_gpu_layers > 0:
        return ()
    because = prepared.board.refused or "no GPU can be used with this engine"
    return (Degraded("device", "GPU", "CPU", because),)


def other_engine(prepared: Prepared) -> tuple[Degraded, ...]:
    """Return the degradation of an engine that was rolled back; empty otherwise."""
    fallback = prepared.fallback
    return (Degraded("engine", fallback.instead_of, fallback.engine, fallback.because),) if fallback else ()
