"""The ways in which one model may be run: the rungs of its ladder, and the CPU where the GPU stays away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge.plan.plan import LaunchPlan, ModelPlan, Reason
from edge.supervisor.hooks import Hooks


class Plans:
    """`count` rungs of the memory ladder. `cpu_rung` is on it, or above it and planned when needed, or nowhere."""

    def __init__(self, model: ModelPlan, hooks: Hooks) -> None:
        self.count = len(model.ladder.plans)
        self.cpu_rung = _cpu_rung(model, hooks.cpu is not None)
        self._model = model
        self._hooks = hooks
        self._cpu: LaunchPlan | None = None

    def at(self, rung: int, *, plain: bool = False) -> LaunchPlan:
        """Raises EdgeError when the plan for the CPU cannot be made."""
        plan = self._model.ladder.plans[rung] if rung < self.count else self._on_cpu(rung)
        return self._hooks.plain(plan) if plain else plan

    def _on_cpu(self, rung: int) -> LaunchPlan:
        if self._cpu is None:
            assert self._hooks.cpu is not None
            cpu, because = self._hooks.cpu(), Reason("rung", "CPU", "the GPU is not there")
            self._cpu = replace(cpu, rung=rung, reasons=(*cpu.reasons, because))
        return self._cpu


def _cpu_rung(model: ModelPlan, can_plan: bool) -> int | None:
    plans = model.ladder.plans
    if plans[0].settings.n_gpu_layers <= 0:
        return None
    on_ladder = next((i for i, plan in enumerate(plans) if plan.settings.n_gpu_layers <= 0), None)
    return on_ladder if on_ladder is not None else len(plans) if can_plan else None


def card(model: ModelPlan, plan: LaunchPlan) -> dict[str, Any]:
    """The model as llama-server's /v1/models describes it under `meta`."""
    file, settings = plan.model or model.model, plan.settings
    return {
        "n_vocab": file.meta.n_vocab,
        "n_ctx": settings.n_ctx // max(1, settings.n_parallel),
        "n_ctx_train": file.meta.n_ctx_train,
        "n_embd": file.meta.n_embd,
        "size": file.meta.tensor_bytes,
        "ftype": file.quant,
    }
