"""The variants of one model's plan: rungs of its memory ladder, safe mode, and the CPU where the GPU is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from edge.engine.engine import Engine
from edge.models.open import ModelFile
from edge.plan.argv import render
from edge.plan.plan import LaunchPlan, ModelPlan, Reason, Settings


class PlanVariants:
    """The plans of one model. `cpu_rung` is one of the `count` rungs, or the one above them, planned when needed.

    `cpu_rung` is None where the CPU is no fallback.
    """

    def __init__(
        self,
        model: ModelPlan,
        safe_mode: Callable[[LaunchPlan], LaunchPlan],
        cpu: Callable[[], LaunchPlan] | None,
    ) -> None:
        self.count = len(model.ladder.plans)
        self.cpu_rung = _cpu_rung(model, cpu is not None)
        self._model = model
        self._safe_mode = safe_mode
        self._cpu = cpu
        self._cpu_plan: LaunchPlan | None = None

    def at(self, rung: int, *, safe_mode: bool = False) -> LaunchPlan:
        """Return the plan of a rung. Raises EdgeError when the plan for the CPU cannot be made."""
        plan = self._model.ladder.plans[rung] if rung < self.count else self._on_cpu(rung)
        return self._safe_mode(plan) if safe_mode else plan

    def _on_cpu(self, rung: int) -> LaunchPlan:
        if self._cpu_plan is None:
            assert self._cpu is not None
            cpu, because = self._cpu(), Reason("rung", "CPU", "the GPU is not there")
            self._cpu_plan = replace(cpu, rung=rung, reasons=(*cpu.reasons, because))
        return self._cpu_plan


def _cpu_rung(model: ModelPlan, can_plan: bool) -> int | None:
    plans = model.ladder.plans
    if plans[0].settings.n_gpu_layers <= 0:
        return None
    on_ladder = next((i for i, plan in enumerate(plans) if plan.settings.n_gpu_layers <= 0), None)
    return on_ladder if on_ladder is not None else len(plans) if can_plan else None


def model_info(model: ModelPlan, plan: LaunchPlan) -> dict[str, Any]:
    """Return what llama-server's /v1/models shows of the model under `meta`."""
    file, settings = plan.model or model.model, plan.settings
    return {
        "n_vocab": file.meta.n_vocab,
        "n_ctx": settings.n_ctx // max(1, settings.n_parallel),
        "n_ctx_train": file.meta.n_ctx_train,
        "n_embd": file.meta.n_embd,
        "size": file.meta.tensor_bytes,
        "ftype": file.quant,
    }


# Render a rung in safe mode: with optional accelerations off, for an engine that crashed the same way twice.
# Pure.

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
