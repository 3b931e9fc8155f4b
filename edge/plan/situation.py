"""The inputs of a plan: memory domains, devices, engine and calibrations. Values only."""

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
    """Memory and devices of one machine. `gpus`: domains for layers in CUDA's order; `unified` on unified memory."""

    board: Board
    engine: Engine
    available_bytes: dict[str, int]
    reserve_bytes: dict[str, int]
    gpus: tuple[str, ...]
    calibrations: Mapping[str, Correction] = field(default_factory=dict)  # by architecture, of this engine

    @property
    def host(self) -> str:
        return UNIFIED if self.board.unified_memory else HOST

    @property
    def all_logits(self) -> bool:
        """Whether logits are reserved for every token of a batch, as before autumn 2026."""
        return self.engine.era != "load-mode"

    @property
    def discrete(self) -> bool:
        return bool(self.gpus) and not self.board.unified_memory

    def less(self, budget: MemoryBudget) -> Situation:
        """Return the inputs with the memory that is left beside a planned model."""
        left = {d: free - (budget[d].required_bytes if d in budget else 0) for d, free in self.available_bytes.items()}
        return replace(self, available_bytes=left)

    def domain(self, name: str) -> DomainBudget:
        """Return an empty budget of this domain."""
        return DomainBudget(self.available_bytes[name], self.reserve_bytes[name])


def situation(
    board: Board, memory: MemorySnapshot, engine: Engine, reserve: str, calibrations: Mapping[str, Correction]
) -> Situation:
    """Build the inputs. `reserve` is the preset's formula, applied to each domain's total."""
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
        calibrations,
    )
