"""What a supervisor asks of, and tells to, whoever composed it."""

from __future__ import annotations

from collections.abc import Callable
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
