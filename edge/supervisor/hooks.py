"""Callbacks of a supervisor."""

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
    """Callbacks of a supervisor. They run on the event loop and must not block."""

    on_change: Callable[[Supervisor, Machine, Machine], None] = lambda *_: None  # before, after
    on_line: Callable[[str], None] = lambda _: None  # each log line of the engine
    on_speed: Callable[[Supervisor, float], None] = lambda *_: None  # tokens/s, measured while idle
    safe_mode: Callable[[LaunchPlan], LaunchPlan] = lambda plan: plan  # the plan without optional accelerations
    cpu: Callable[[], LaunchPlan] | None = None  # plan for the CPU when the GPU stays absent; None: refuse
    driver: Callable[[], str | None] = lambda: None  # evidence that the GPU's device nodes open, or None
