"""Where one model would run: memory domains, devices, engine and what past starts taught. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge.board.board import Board
from edge.board.memory import MemorySnapshot
from edge.engine.engine import Engine
from edge.plan.calibration import Correction
from edge.plan.plan import DomainBudget, MemoryBudget
from edge.profile.reserve import reserve_bytes

UNIFIED = "unified"
HOST = "host"


@dataclass(frozen=True, slots=True)
class Situation:
    """`gpus` are the domains that layers can go to, in CUDA's order; on unified memory that is `unified` itself."""

    board: Board
    engine: Engine
    available_bytes: dict[str, int]
    reserve_bytes: dict[str, int]
    gpus: tuple[str, ...]
    corrections: Mapping[str, Correction] = field(default_factory=dict)  # by architecture, of this engine

    @property
    def host(self) -> str:
        return UNIFIED if self.board.unified_memory else HOST

    @property
    def all_logits(self) -> bool:
        """Engines before autumn 2026 reserve logits for every token of a batch, not for those that are asked for."""
        return self.engine.era != "load-mode"

    @property
    def discrete(self) -> bool:
        return bool(self.gpus) and not self.board.unified_memory

    def less(self, budget: MemoryBudget) -> Situation:
        """What is left beside a model that is planned already."""
        left = {d: free - (budget[d].required_bytes if d in budget else 0) for d, free in self.available_bytes.items()}
        return replace(self, available_bytes=left)

    def domain(self, name: str) -> DomainBudget:
        """An empty budget of this domain."""
        return DomainBudget(self.available_bytes[name], self.reserve_bytes[name])


def situation(
    board: Board, memory: MemorySnapshot, engine: Engine, reserve: str, corrections: Mapping[str, Correction]
) -> Situation:
    """`reserve` is the profile's formula; it counts on each domain's total."""
    gpus: tuple[str, ...] = ()
    if engine.cuda and board.unified_memory and board.refused is None:
        gpus = (UNIFIED,)
    elif engine.cuda and not board.unified_memory:
        known = [gpu for gpu in board.gpus if gpu.uuid and gpu.uuid in memory.available_bytes]
        gpus = tuple(str(gpu.uuid) for gpu in sorted(known, key=lambda gpu: gpu.pci_bus_id or ""))
    return Situation(
        board,
        engine,
        dict(memory.available_bytes),
        {name: reserve_bytes(reserve, total) for name, total in memory.total_bytes.items()},
        gpus,
        corrections,
    )
