"""What a supervisor asks of, and tells to, whoever composed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge.plan.plan import LaunchPlan
from edge.supervisor.state import Machine

if TYPE_CHECKING:
    from edge.supervisor.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Hooks:
    """None of them may block for long: they run on the loop.

    `plain` renders a rung without optional accelerations. `cpu` makes the plan for when the GPU stays away (None:
    refuse). `driver` looks at the GPU's device nodes: evidence, or None. `on_speed`: tokens/s, measured while idle.
    """

    on_change: Callable[[Supervisor, Machine, Machine], None] = lambda *_: None
    on_line: Callable[[str], None] = lambda _: None
    on_speed: Callable[[Supervisor, float], None] = lambda *_: None
    plain: Callable[[LaunchPlan], LaunchPlan] = lambda plan: plan
    cpu: Callable[[], LaunchPlan] | None = None
    driver: Callable[[], str | None] = lambda: None


def cpu_rung(plans: Sequence[LaunchPlan], can_plan: bool) -> int | None:
    """Where the GPU is not used: on the ladder, or one above it that is planned when it is needed. None: nowhere."""
    if plans[0].settings.n_gpu_layers <= 0:
        return None
    on_ladder = next((i for i, plan in enumerate(plans) if plan.settings.n_gpu_layers <= 0), None)
    return on_ladder if on_ladder is not None else len(plans) if can_plan else None
