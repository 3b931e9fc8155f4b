"""The variants of one model's plan: rungs of its memory ladder, remedies, and the CPU where the GPU is absent."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge.errors import BugError, EdgeError, TimedOutError
from edge.linux.procfs import resident_ratio
from edge.linux.slow_reads import ReadHangs, answer_of
from edge.linux.timeouts import DeadlineExceeded, in_thread
from edge.plan.plan import LaunchPlan, ModelPlan, Reason
from edge.supervisor.remedies import Remedies
from edge.supervisor.status import Degraded

# Planning asks NVML (5 s each call), rpc-servers and an engine for its flags: most of a minute if all of them are slow.
CPU_PLAN_S = 60.0
CACHE_LOOK_S = 1.0  # the event loop waits meanwhile: the disk of the model may hang


class PlanVariants:
    """The plans of one model. `cpu_rung` is one of the `count` rungs, or the one above them, planned when needed.

    `cpu_rung` is None where the CPU is no fallback. For layers on other boards it is the plan for this board alone.
    """

    def __init__(self, model: ModelPlan, remedies: Remedies | None, cpu: Callable[[], LaunchPlan] | None) -> None:
        self.count = len(model.ladder.plans)
        self.cpu_rung = _cpu_rung(model, cpu is not None)
        self._model = model
        self._remedies = remedies
        self._cpu = cpu
        self._cpu_plan: LaunchPlan | EdgeError | None = None  # an error: why there is none
        self._planning: asyncio.Task[None] | None = None
        self._planned: Callable[[], None] = lambda: None

    def known(self, rung: int) -> bool:
        """Return whether the plan of a rung is made."""
        return rung < self.count or isinstance(self._cpu_plan, LaunchPlan)

    def at(self, rung: int, remedies: Sequence[str] = ()) -> LaunchPlan:
        """Return the plan of a rung. Raises EdgeError when the plan for the CPU could not be made."""
        plan = self._model.ladder.plans[rung] if rung < self.count else self._cpu_plan
        if isinstance(plan, EdgeError):
            raise plan
        assert plan is not None, "plan_on_cpu comes first"
        return self._remedies.apply(plan, remedies) if self._remedies is not None else plan

    def plan_on_cpu(self, rung: int, planned: Callable[[], None]) -> None:
        """Make the plan for the CPU in a thread and call `planned`; then `at` returns it, or raises why it failed.

        Once the GPU is gone, calls into its driver are the likeliest to hang: they must not hold the event loop.
        """
        self._planned = planned
        self._planning = asyncio.create_task(self._plan(rung))

    def argv_now(self, plan: LaunchPlan) -> tuple[str, ...]:
        """Return the command for what the page cache holds of the model's file now."""
        if plan.cold is None:
            return plan.argv
        look = partial(resident_ratio, Path((plan.model or self._model.model).path))
        try:
            return plan.argv_at(answer_of(look, CACHE_LOOK_S, CACHE_LOOK_S))
        except ReadHangs:  # the engine meets the same disk, and its start is watched
            return plan.argv

    def abandon(self) -> None:
        """End the planning, if there is one: `planned` is called at once, and `at` raises TimedOutError."""
        if self._planning is not None:
            self._planning.cancel()
            self._end_planning(TimedOutError("the plan for the CPU was given up"))

    def degradations(self, rung: int, applied: Sequence[tuple[str, str]]) -> tuple[Degraded, ...]:
        """Return what the remedies in force change on a rung. `applied`: id and kind of the failure."""
        return self._remedies.degradations(self.at(rung), applied) if self._remedies is not None and applied else ()

    async def _plan(self, rung: int) -> None:
        assert self._cpu is not None
        try:
            plan = await in_thread(self._cpu, CPU_PLAN_S)
        except DeadlineExceeded:
            hint = "see `edgellm doctor` for the driver that does not answer"
            self._end_planning(TimedOutError(f"the plan for the CPU took more than {CPU_PLAN_S:.0f} s", hint))
        except EdgeError as error:
            self._end_planning(error)
        except Exception as error:
            self._end_planning(BugError(f"the plan for the CPU could not be made: {error!r}", "please report this"))
        else:
            because = Reason("rung", "CPU", "the GPU is not there")
            if self._model.ladder.plans[self._model.ladder.chosen].settings.rpc:
                because = Reason("rung", "this board alone", "the rpc-server is not there")
            self._end_planning(replace(plan, rung=rung, reasons=(*plan.reasons, because)))

    def _end_planning(self, outcome: LaunchPlan | EdgeError) -> None:
        self._cpu_plan, self._planning = outcome, None
        self._planned()


def _cpu_rung(model: ModelPlan, can_plan: bool) -> int | None:
    plans = model.ladder.plans
    if plans[model.ladder.chosen].settings.rpc:
        return len(plans) if can_plan else None
    if plans[0].settings.n_gpu_layers <= 0:
        return None
    on_ladder = next((i for i, plan in enumerate(plans) if plan.settings.n_gpu_layers <= 0), None)
    return on_ladder if on_ladder is not None else len(plans) if can_plan else None


def model_info(model: ModelPlan, plan: LaunchPlan) -> dict[str, Any]:
    """Return what llama-server's /v1/models shows of the model under `meta`, and more; of another engine its routes."""
    if model.other is not None:
        return {"routes": list(model.other.routes)}
    file, settings = plan.model or model.model, plan.settings
    layers = file.meta.n_layer + 1  # with the output
    return {
        "n_vocab": file.meta.n_vocab,
        "n_ctx": settings.n_ctx // max(1, settings.n_parallel),
        "n_ctx_train": file.meta.n_ctx_train,
        "n_embd": file.meta.n_embd,
        "size": file.meta.tensor_bytes,
        "size_vram": file.meta.tensor_bytes * min(max(0, settings.n_gpu_layers), layers) // layers,
        "n_params": sum(math.prod(tensor.shape) for tensor in file.meta.tensors),
        "ftype": file.quant,
        "arch": file.meta.arch,
        "capabilities": [settings.role if settings.role != "chat" else "completion", *(["vision"] * bool(file.mmproj))],
    }


def template_file(model: ModelPlan, plan: LaunchPlan) -> str | None:
    """Return the file whose header holds the chat template; None with `chat_template_file` or another engine."""
    given = any(word.split("=")[0] in ("--chat-template", "--chat-template-file") for word in plan.argv)
    if model.other is not None or given or "chat_template_file" in plan.options.params:
        return None
    return (plan.model or model.model).path
