"""A rung without optional accelerations: what is tried when the same crash came twice while starting. Pure."""

from __future__ import annotations

from dataclasses import replace

from edge.engine.engine import Engine
from edge.model.file import ModelFile
from edge.plan.argv import render
from edge.plan.plan import LaunchPlan, Reason, Settings

_UNQUANTIZED = ("f32", "f16", "bf16")


def plain(plan: LaunchPlan, engine: Engine, file: ModelFile, alias: str) -> LaunchPlan:
    """The same memory or less; no flash attention (a quantized V cache keeps it), no direct I/O, no CUDA graphs."""
    settings = plain_settings(plan.settings)
    line = render(settings, engine, plan.model or file, alias)
    env = dict(plan.env)
    if engine.cuda:
        env["GGML_CUDA_DISABLE_GRAPHS"] = "1"
    because = Reason("accelerations", "off", "it crashed twice in a row while starting with them", "supervisor")
    return replace(
        plan, settings=settings, argv=line.args, env=env, reasons=(*plan.reasons, because), warnings=line.dropped
    )


def plain_settings(settings: Settings) -> Settings:
    needs_flash = settings.kv_type_v not in _UNQUANTIZED
    return replace(
        settings,
        flash_attention=settings.flash_attention if needs_flash else "off",
        load_mode="none" if settings.load_mode == "dio" else settings.load_mode,
        cache_ram_bytes=0,
    )
