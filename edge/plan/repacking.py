"""Count the weights that a CPU engine keeps in a layout of its own, beside those of the file. Pure."""

from __future__ import annotations

from itertools import takewhile

from edge.board.board import Board
from edge.engine.engine import Engine
from edge.plan.inputs import PlanInputs, Weights
from edge.plan.plan import Settings

# AMX adds four bytes a block to these (ggml-cpu/amx/mmq.cpp, get_row_size): old and new size.
_AMX_BLOCKS = {"Q8_0": (34, 38), "Q4_K": (144, 148), "Q5_K": (176, 180)}


def repacked_types(board: Board, engine: Engine) -> frozenset[str]:
    """Return the tensor types that the engine keeps in a layout of this CPU (ggml-cpu/repack.cpp), with its kernels."""
    isa = set(board.cpu.isa)
    if "asimd" in isa:  # the embedded engine is built for the base of Armv8, without these instructions
        fast = {"asimddp", "i8mm"} & isa and engine.kind != "embedded"
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"}) if fast else frozenset()
    if _amx(board, engine):
        return frozenset({"F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "MXFP4"})
    return _x86_types(isa, engine)


def _x86_types(isa: set[str], engine: Engine) -> frozenset[str]:
    found = {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"} if "avx2" in isa else set()
    return frozenset(found | ({"Q2_K"} if "avx512f" in isa and engine.kind != "embedded" else set()))


def _amx(board: Board, engine: Engine) -> bool:
    """Whether ggml-cpu/amx has the matrices: a native build, seen on the host of an H200."""
    return "amx_int8" in board.cpu.isa and engine.kind != "embedded"


def repacked_bytes(weights: Weights, inputs: PlanInputs) -> int:
    """Return the bytes of the matrices that this engine repacks for this CPU; AMX takes no stacks of experts."""
    types, stacked = repacked_types(inputs.board, inputs.engine), weights.stacked
    if not _amx(inputs.board, inputs.engine):
        return sum(size for kind, size in weights.matrices.items() if kind in types)
    stacked_types = _x86_types(set(inputs.board.cpu.isa), inputs.engine)
    flat = {kind: size - stacked.get(kind, 0) for kind, size in weights.matrices.items() if kind in types}
    grown = sum(size + _amx_bytes(kind, size) for kind, size in flat.items())
    return grown + sum(size for kind, size in stacked.items() if kind in stacked_types)


def _amx_bytes(kind: str, size: int) -> int:
    """Return what a matrix of this type grows by in the layout of AMX."""
    old, new = _AMX_BLOCKS.get(kind, (1, 1))
    return size * (new - old) // old


def host_weights_bytes(weights: Weights, settings: Settings, inputs: PlanInputs) -> int:
    """Return the bytes of all weights on the CPU: repacked matrices beside the mapping that they were read from.

    Without a mapping only a table that is the output too is there twice, once repacked.
    """
    types = repacked_types(inputs.board, inputs.engine)
    if settings.load_mode != "mmap":
        flat = {kind: size - weights.stacked.get(kind, 0) for kind, size in weights.matrices.items()}
        grown = sum(_amx_bytes(*each) for each in flat.items()) if _amx(inputs.board, inputs.engine) else 0
        return weights.file_bytes + grown + (weights.tied_bytes if weights.tied_type in types else 0)
    unmapped = sum(size for kind, size in takewhile(lambda each: each[0] in types, weights.tail))
    return weights.file_bytes - unmapped + repacked_bytes(weights, inputs)
