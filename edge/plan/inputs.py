"""The inputs of a plan: memory domains, devices, engine and calibrations. Values only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise, takewhile

from msgspec import Struct, field
from msgspec.structs import replace

from edge.board.board import Board, Gpu, only_gpus
from edge.board.memory import MemorySnapshot, reserve_bytes
from edge.config.values import Preset
from edge.engine import gpu_code
from edge.engine.engine import Engine
from edge.models.meta import ModelMeta, Tensor
from edge.models.open import ModelFile
from edge.plan.calibration import Calibration
from edge.plan.choices import LoadChoice
from edge.plan.kv_cache import ENCODERS, KvBytes, integer, memory_of
from edge.plan.other_load import free_cores
from edge.plan.plan import DomainBudget, MemoryBudget

# Every set of this many GPUs is tried: 31 sets. Of more, the newest and the roomiest of each number.
_MOST_GPUS_TRIED = 5
UNIFIED = "unified"
HOST = "host"


class RemoteServer(Struct, frozen=True):
    """An rpc-server, with the memory domains of its devices. It serves one engine, with all of its devices."""

    endpoint: str
    domains: tuple[str, ...]


class PlanInputs(Struct, frozen=True):
    """Memory and devices of one machine. `gpus`: domains for layers in CUDA's order; `unified` on unified memory.

    `remotes`: rpc-servers that may be used. In the inputs of one set of devices `gpus` begins with their domains.
    """

    board: Board
    engine: Engine
    available_bytes: dict[str, int]
    reserve_bytes: dict[str, int]
    gpus: tuple[str, ...]
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)  # of this engine, by calibration_key
    load_choices: tuple[LoadChoice, ...] = ()  # measured for this board and engine
    busy_cores: int = 0  # by other processes, as telemetry saw it
    remotes: tuple[RemoteServer, ...] = ()
    draft_on: str | None = None  # domain of the drafter, in the inputs of one set of devices; None: that of the model

    @property
    def host(self) -> str:
        return UNIFIED if self.board.unified_memory else HOST

    @property
    def threads(self) -> int:
        """Return the engine's threads: one a core that no other process keeps busy.

        Within an affinity or a quota the load of the whole machine says nothing.
        """
        cpu = self.board.cpu
        return max(1, cpu.usable_cores or free_cores(cpu.physical_cores, self.busy_cores))

    @property
    def all_logits(self) -> bool:
        """Return whether logits are reserved for every token of a batch, as before autumn 2026."""
        return self.engine.era != "load-mode"

    @property
    def mixed_batches(self) -> bool:
        """Return whether a batch may mix tokens and images, as since October 2026; the pinned build is older."""
        return not self.engine.assumed and not (self.engine.commit or "").startswith("0c1e57098")

    @property
    def discrete(self) -> bool:
        return bool(self.gpus) and not self.board.unified_memory

    @property
    def overrides_tensors(self) -> bool:
        """Return whether this engine places single tensors (--override-tensor, since April 2025)."""
        return bool({"--override-tensor", "-ot"} & self.engine.flags.keys())

    def room_bytes(self, name: str) -> int:
        """Return what this domain has beside its reserve."""
        return max(0, self.available_bytes[name] - self.reserve_bytes[name])

    def less(self, budget: MemoryBudget) -> PlanInputs:
        """Return the inputs with the memory that is left beside a planned model, and the servers that it leaves."""
        left = {d: free - (budget[d].required_bytes if d in budget else 0) for d, free in self.available_bytes.items()}
        free = tuple(server for server in self.remotes if not budget.keys() & set(server.domains))
        return replace(self, available_bytes=left, remotes=free)

    @property
    def remote_domains(self) -> tuple[str, ...]:
        return tuple(domain for server in self.remotes for domain in server.domains)

    @property
    def local_gpus(self) -> tuple[str, ...]:
        return tuple(gpu for gpu in self.gpus if not is_remote(gpu))

    @property
    def used_servers(self) -> tuple[str, ...]:
        """Return the endpoints whose devices are among `gpus`."""
        return tuple(server.endpoint for server in self.remotes if set(server.domains) & set(self.gpus))

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
        known = [gpu for gpu in usable_gpus(board, engine) if gpu.uuid and gpu.uuid in memory.available_bytes]
        gpus = tuple(str(gpu.uuid) for gpu in sorted(known, key=lambda gpu: gpu.pci_bus_id or ""))
    return PlanInputs(
        board,
        engine,
        dict(memory.available_bytes),
        {name: reserve_bytes(reserve, total) for name, total in memory.total_bytes.items()},
        gpus,
        calibrations,
    )


def usable_gpus(board: Board, engine: Engine) -> list[Gpu]:
    """Return the GPUs that this engine's machine code runs on; all where either side is unknown."""
    if not engine.built_for:
        return list(board.gpus)
    archs = [(gpu, gpu_code.architecture(gpu.compute_capability)) for gpu in board.gpus]
    return [gpu for gpu, arch in archs if arch is None or gpu_code.runs(engine.built_for, arch)]


def restricted(preset: Preset, inputs: PlanInputs) -> PlanInputs:
    """Return the inputs with the GPUs that the preset's `gpus` names. Raises ConfigError."""
    if not preset.gpus or not inputs.discrete:
        return inputs
    named = {gpu.uuid for gpu in only_gpus(inputs.board, preset.gpus).gpus}
    return replace(inputs, gpus=tuple(gpu for gpu in inputs.gpus if gpu in named))


def is_remote(domain: str) -> bool:
    """Return whether a memory domain is of an rpc-server: it has the name of llama.cpp's buffers there."""
    return domain.startswith("RPC")


def device_sets(preset: Preset, inputs: PlanInputs) -> tuple[tuple[str, ...], ...]:
    """Return the sets of devices to try, in the order of preference: this board alone, then with rpc-servers.

    Each token crosses the network once for each server, so that as few as possible are used, in their given order. The
    local GPUs are last, where the output is computed: its logits are larger than any other tensor between devices.
    """
    own = inputs.gpus if preset.offload == "full" else ()
    sets = list(gpu_sets(preset, inputs))
    remote: tuple[str, ...] = ()
    for server in inputs.remotes:
        remote += server.domains
        sets.append((*remote, *own))
    return tuple(sets)


def gpu_sets(preset: Preset, inputs: PlanInputs) -> tuple[tuple[str, ...], ...]:
    """Return the sets of GPUs to try, in the order of preference; at least one, which may be empty.

    Fewer GPUs come first: with layers split over them they compute one after the other, and each pays a CUDA context.
    `row` splits each matrix, so that more GPUs are faster. Of equal size newer GPUs come first, then more room.
    """
    gpus = inputs.gpus
    if not inputs.discrete or preset.offload != "full" or len(gpus) == 1:
        return (gpus,)
    if len(preset.tensor_split) == len(gpus) and any(preset.tensor_split):
        return (tuple(gpu for gpu, share in zip(gpus, preset.tensor_split, strict=True) if share > 0),)
    age = {str(gpu.uuid): gpu_code.architecture(gpu.compute_capability) or 0 for gpu in inputs.board.gpus}

    def newest(chosen: Sequence[str]) -> tuple[int, int]:
        return min(age.get(gpu, 0) for gpu in chosen), sum(inputs.room_bytes(gpu) for gpu in chosen)

    if preset.split_mode == "none":
        return tuple(sorted(((gpu,) for gpu in gpus), key=newest, reverse=True))
    if len(gpus) <= _MOST_GPUS_TRIED:
        sets = [chosen for size in range(1, len(gpus) + 1) for chosen in combinations(gpus, size)]
    else:
        by_age = sorted(gpus, key=lambda gpu: newest((gpu,)), reverse=True)
        by_room = sorted(gpus, key=inputs.room_bytes, reverse=True)
        best = {frozenset(order[:size]) for order in (by_age, by_room) for size in range(1, len(gpus) + 1)}
        sets = [tuple(gpu for gpu in gpus if gpu in chosen) for chosen in best]
    # One process uses one MIG instance, however many it sees (NVIDIA's MIG user guide, "CUDA Device Enumeration").
    sets = [chosen for chosen in sets if len(chosen) == 1 or not any(gpu.startswith("MIG-") for gpu in chosen)]
    few_first = 1 if preset.split_mode == "layer" else -1
    return tuple(sorted(sorted(sets, key=newest, reverse=True), key=lambda chosen: few_first * len(chosen)))


# Divide tensors: input tables stay on the host, the last layers and the output go to the GPU. Pure.

# The pattern of llama.cpp's own --n-cpu-moe (common/common.h, LLM_FFN_EXPS_REGEX).
EXPERT_PATTERN = r"ffn_(up|down|gate|gate_up)_(ch|)exps"
EXPERTS = re.compile(EXPERT_PATTERN)
# Read row by row on the CPU whatever is offloaded.
_INPUT = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.", "token_embd_norm.")


class Weights(Struct, frozen=True):
    """Bytes of weights. `tied_bytes`: an input table that is the output too: kept twice when offloaded."""

    input_bytes: int
    output_bytes: int
    by_layer: tuple[int, ...]
    tied_bytes: int
    experts: tuple[int, ...] = ()  # of by_layer, what --override-tensor can keep on the host
    largest_bytes: int = 0  # the largest tensor of a layer
    matrices: Mapping[str, int] = {}  # by type: bytes that a CPU may repack
    tail: tuple[tuple[str, int], ...] = ()  # the last matrices of the file, from its end: type and bytes
    hosted_bytes: int = 0  # of input_bytes: of layers, which `args` keep on the host
    tied_type: str = ""
    stacked: Mapping[str, int] = {}  # of `matrices`: those of all experts of a layer

    @property
    def file_bytes(self) -> int:
        return self.input_bytes + self.output_bytes + sum(self.by_layer)

    def of(self, share: range, cpu_expert_layers: int = 0) -> int:
        """Return the bytes of these layers on a GPU; the number after the last layer is the output."""
        count = len(self.by_layer)
        output = self.output_bytes + self.tied_bytes if count in share else 0
        hosted = slice(max(share.start, count - cpu_expert_layers), share.stop)
        on_host = sum(self.experts[hosted]) if cpu_expert_layers else 0
        return output + sum(self.by_layer[share.start : min(share.stop, count)]) - on_host


# "blk.x" and "blk.-1" are names of a hostile or a future file: their bytes count as part of the output.
_BLOCK = re.compile(r"blk\.(\d{1,6})\.", re.ASCII)


def layer_of(tensor: Tensor) -> int | None:
    """Return the index of the layer that a tensor belongs to."""
    block = _BLOCK.match(tensor.name)
    return None if block is None else int(block[1])


def weights(meta: ModelMeta) -> Weights:
    """Return the bytes of the header's tensors."""
    experts, largest = [0] * meta.n_layer, 0
    by_layer, count = [0] * meta.n_layer, meta.n_layer - integer(meta, "nextn_predict_layers")
    input_bytes = output_bytes = tied_bytes = 0
    has_output, decodes = False, meta.arch in ("lfm2", "lfm2moe")
    matrices: dict[str, int] = {}
    stacked: dict[str, int] = {}
    for tensor in meta.tensors:
        name = tensor.name
        if _is_matrix(tensor):
            matrices[tensor.type] = matrices.get(tensor.type, 0) + tensor.bytes
            if EXPERTS.search(name):
                stacked[tensor.type] = stacked.get(tensor.type, 0) + tensor.bytes
        index = layer_of(tensor)
        if index is not None:
            if index < count:  # later ones predict further tokens; see with_mtp_layers
                by_layer[index] += tensor.bytes
                largest = max(largest, tensor.bytes)
                if EXPERTS.search(name):
                    experts[index] += tensor.bytes
        elif name.startswith(_INPUT):
            input_bytes += tensor.bytes
            if name == "token_embd.weight":
                tied_bytes = tensor.bytes
        else:
            output_bytes += tensor.bytes
            has_output = has_output or name == "output.weight"
            # Without a last norm there is no output to compute: this is an encoder.
            decodes = decodes or name == "output_norm.weight"
    tied, kind = tied_bytes if decodes and not has_output else 0, ""
    if tied:
        kind = next(tensor.type for tensor in meta.tensors if tensor.name == "token_embd.weight")
        matrices[kind] = matrices.get(kind, 0) + tied
    by_offset = sorted(meta.tensors, key=lambda tensor: -tensor.offset)
    tail = tuple((tensor.type, tensor.bytes) for tensor in takewhile(_is_matrix, by_offset)) if not meta.split else ()
    found = Weights(input_bytes, output_bytes, tuple(by_layer), tied, tuple(experts), largest, matrices, tail)
    return replace(found, tied_type=kind, stacked=stacked)


def _is_matrix(tensor: Tensor) -> bool:
    """Return whether the engine multiplies with it, in rows that every repacked layout divides."""
    return not tensor.name.startswith(_INPUT) and len(tensor.shape) > 1 and tensor.shape[1] % 8 == 0


# A model file with what a plan needs of its header, computed once. Pure.


class Candidate(Struct, frozen=True):
    """A file that could be served. `mtp_layers`: so many of its layers draft, 0 where they are not used."""

    file: ModelFile
    weights: Weights
    memory: KvBytes
    drafter: Candidate | None = None
    mtp_layers: int = 0


def candidate_of(file: ModelFile) -> Candidate:
    return Candidate(file, weights(file.meta), memory_of(file.meta))


# Options of `args` that keep tensors of the first N layers on the host, or of all: pattern of the tensors' names
# (common/common.h, LLM_FFN_EXPS_REGEX and LLM_FFN_DENSE_REGEX).
_DENSE = re.compile(r"\.ffn_(up|down|gate)\.")
_ON_HOST = {"--cpu-moe": EXPERTS, "--n-cpu-moe": EXPERTS, "--n-cpu-ffn": _DENSE}
_ON_HOST |= {"-cmoe": EXPERTS, "-ncmoe": EXPERTS, "-ncffn": _DENSE}


def with_hosted(candidate: Candidate, preset: Preset) -> Candidate:
    """Return the candidate with the weights that `args` keep on the host counted there, like its input tables."""
    words, weights = (*preset.args, ""), candidate.weights
    by_layer, experts = list(weights.by_layer), list(weights.experts)
    kept: set[str] = set()
    for word, value in pairwise(words):
        if word not in _ON_HOST:
            continue
        layers = len(by_layer) if word in ("--cpu-moe", "-cmoe") else int(value) if value.isdecimal() else 0
        for tensor in candidate.file.meta.tensors:
            index = layer_of(tensor)
            if index is None or index >= min(layers, len(by_layer)) or tensor.name in kept:
                continue
            if by_layer[index] >= tensor.bytes and _ON_HOST[word].search(tensor.name):
                kept.add(tensor.name)
                by_layer[index] -= tensor.bytes
                experts[index] -= tensor.bytes if EXPERTS.search(tensor.name) else 0
    hosted = sum(weights.by_layer) - sum(by_layer)
    if not hosted:
        return candidate
    moved = replace(
        weights,
        input_bytes=weights.input_bytes + hosted,
        by_layer=tuple(by_layer),
        experts=tuple(experts),
        hosted_bytes=hosted,
    )
    return replace(candidate, weights=moved)


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
