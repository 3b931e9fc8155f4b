"""Render a rung in safe mode: with optional accelerations off, for an engine that crashed the same way twice. Pure."""

from __future__ import annotations

from dataclasses import replace

from edge.engine.engine import Engine
from edge.model.file import ModelFile
from edge.plan.argv import render
from edge.plan.plan import LaunchPlan, Reason, Settings

_UNQUANTIZED = ("f32", "f16", "bf16")


def safe_mode(plan: LaunchPlan, engine: Engine, file: ModelFile, alias: str) -> LaunchPlan:
    """Return the plan without flash attention (a quantized V cache keeps it), direct I/O and CUDA graphs.

    It takes the same memory or less.
    """
    settings = safe_settings(plan.settings)
    line = render(settings, engine, plan.model or file, alias)
    env = dict(plan.env)
    if engine.cuda:
        env["GGML_CUDA_DISABLE_GRAPHS"] = "1"  # ggml-cuda.cu reads it before the first graph is captured
    because = Reason("accelerations", "off", "it crashed twice in a row while starting with them", "supervisor")
    return replace(
        plan, settings=settings, argv=line.args, env=env, reasons=(*plan.reasons, because), warnings=line.dropped
    )


def safe_settings(settings: Settings) -> Settings:
    # llama.cpp refuses a quantized V cache without flash attention (llama-context.cpp: "V cache quantization requires
    # flash_attn").
    needs_flash = settings.kv_type_v not in _UNQUANTIZED
    return replace(
        settings,
        flash_attention=settings.flash_attention if needs_flash else "off",
        load_mode="none" if settings.load_mode == "dio" else settings.load_mode,
        cache_ram_bytes=0,
    )
