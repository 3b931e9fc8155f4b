"""The inputs of a plan: memory domains, devices, engine and calibrations. Values only."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from edge.board.board import Board
from edge.board.memory import MemorySnapshot, reserve_bytes
from edge.engine.engine import Engine
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile
from edge.plan.calibration import Calibration
from edge.plan.kv_cache import ENCODERS, KvBytes, integer, memory_of
from edge.plan.plan import DomainBudget, MemoryBudget

UNIFIED = "unified"
HOST = "host"


class PlanInputs(Struct, frozen=True):
    """Memory and devices of one machine. `gpus`: domains for layers in CUDA's order; `unified` on unified memory."""

    board: Board
    engine: Engine
    available_bytes: dict[str, int]
    reserve_bytes: dict[str, int]
    gpus: tuple[str, ...]
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)  # by architecture, of this engine

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

    def less(self, budget: MemoryBudget) -> PlanInputs:
        """Return the inputs with the memory that is left beside a planned model."""
        left = {d: free - (budget[d].required_bytes if d in budget else 0) for d, free in self.available_bytes.items()}
        return replace(self, available_bytes=left)

    def domain(self, name: str) -> DomainBudget:
        """Return an empty budget of this domain."""
        return DomainBudget(self.available_bytes[name], self.reserve_bytes[name])


def situation(
    board: Board, memory: MemorySnapshot, engine: Engine, reserve: str, calibrations: Mapping[str, Calibration]
) -> PlanInputs:
    """Build the inputs. `reserve` is the preset's formula, applied to each domain's total."""
    gpus: tuple[str, ...] = ()
    if engine.cuda and board.unified_memory and board.refused is None:
        gpus = (UNIFIED,)
    elif engine.cuda and not board.unified_memory:
        known = [gpu for gpu in board.gpus if gpu.uuid and gpu.uuid in memory.available_bytes]
        gpus = tuple(str(gpu.uuid) for gpu in sorted(known, key=lambda gpu: gpu.pci_bus_id or ""))
    return PlanInputs(
        board,
        engine,
        dict(memory.available_bytes),
        {name: reserve_bytes(reserve, total) for name, total in memory.total_bytes.items()},
        gpus,
        calibrations,
    )


# Divide tensors: input tables stay on the host, the last layers and the output go to the GPU. Pure.

# Read row by row on the CPU whatever is offloaded.
_INPUT = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.", "token_embd_norm.")


class Weights(Struct, frozen=True):
    """Bytes of weights. `tied_bytes`: an input table that is the output too: kept twice when offloaded."""

    input_bytes: int
    output_bytes: int
    by_layer: tuple[int, ...]
    tied_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.input_bytes + self.output_bytes + sum(self.by_layer)

    def of(self, share: range) -> int:
        """Return the bytes of these layers on a GPU; the number after the last layer is the output."""
        count = len(self.by_layer)
        output = self.output_bytes + self.tied_bytes if count in share else 0
        return output + sum(self.by_layer[share.start : min(share.stop, count)])


def weights(meta: ModelMeta) -> Weights:
    """Return the bytes of the header's tensors."""
    by_layer, count = [0] * meta.n_layer, meta.n_layer - integer(meta, "nextn_predict_layers")
    input_bytes = output_bytes = tied_bytes = 0
    has_output, decodes = False, meta.arch in ("lfm2", "lfm2moe")
    for tensor in meta.tensors:
        name = tensor.name
        if name.startswith("blk."):
            index = int(name.split(".", 2)[1])
            if index < count:  # later ones predict further tokens; the engine skips them
                by_layer[index] += tensor.bytes
        elif name.startswith(_INPUT):
            input_bytes += tensor.bytes
            if name == "token_embd.weight":
                tied_bytes = tensor.bytes
        else:
            output_bytes += tensor.bytes
            has_output = has_output or name == "output.weight"
            # Without a last norm there is no output to compute: this is an encoder.
            decodes = decodes or name == "output_norm.weight"
    return Weights(input_bytes, output_bytes, tuple(by_layer), tied_bytes if decodes and not has_output else 0)


# A model file with what a plan needs of its header, computed once. Pure.


class Candidate(Struct, frozen=True):
    file: ModelFile
    weights: Weights
    memory: KvBytes


def candidate_of(file: ModelFile) -> Candidate:
    return Candidate(file, weights(file.meta), memory_of(file.meta))


# Decide what a model can serve: a file that pools its output, or only encodes, cannot chat. Pure.

_LAST, _RANK = 3, 4  # llama_pooling_type


def role_of(meta: ModelMeta, requested: str) -> str:
    """Return `requested`, or the role of the file's pooling type where that is chat and the file cannot."""
    if requested != "chat":
        return requested
    pooling = integer(meta, "pooling_type")
    if pooling == _RANK:
        return "rerank"
    return "embedding" if pooling or meta.arch in ENCODERS else "chat"


def in_one_batch(meta: ModelMeta) -> bool:
    """Return whether the whole input has to fit one batch."""
    return meta.arch in ENCODERS or integer(meta, "pooling_type") != _LAST
