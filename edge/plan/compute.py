"""Estimate the engine's compute buffers: llama.cpp's graph allocator, run over the tensors of a few layers. Pure.

Source: llama.cpp 0c1e57098, ggml/src/ggml-alloc.c, and the order in which src/models/*.cpp make and last use their
tensors. `memory.py` corrects it by what a real start took.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from edge.models.meta import ModelMeta
from edge.plan.kv_cache import ENCODERS, PLAIN_KV, KvBytes, LayerShape, integer, slot_context, window_cells
from edge.plan.plan import Settings

_F32, _F16, _I64 = 4, 2, 8
_DELTA_NETS = frozenset({"qwen35", "qwen35moe", "qwen3next", "qwen4exp"})
_GATED_ATTENTION = _DELTA_NETS  # the gate is a half of Q's projection, and waits until attention is done
_FUSED_FEED_FORWARD = frozenset({"chatglm", "glm4", "phi3", "phimoe"})  # gate and up are one matrix
_WITHOUT_FEED_FORWARD = frozenset({"mamba", "mamba2"})
_KEYS_FIRST = frozenset({"gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss"})
_NORMED_VALUES = frozenset({"gemma3n", "gemma4"})
_NORM_AFTER = frozenset({"exaone4", "olmo2"})  # not before attention and feed-forward: `n` is not made
_LATE_SOFTMAX = frozenset({"gpt-oss"})  # of the chosen experts only
_SMALL_INPUTS = 128 * 1024  # copies of states, ids of outputs, and what alignment to 128 bytes adds

# The tensors of a layer in the graph's order: +name:size takes memory, -name frees it after its last use, a>b reuses
# a's memory for b (in-place operation). `x` is the residual. Sizes are names of `_sizes` and `_attention_sizes`.

# Embeddings of the tokens, and Gemma's for all layers. llama.cpp since October 2026 also builds those of a batch that
# mixes tokens and images (build_inp_embd): its result `c` is never used, and so never freed.
_HOST_START = "+i:embd {inputs} +x:embd +read:per_layers +pl:per_layers -read"
_MIXED_START = "+i:embd +m:embd {inputs} +pl:per_layers +x:embd +b:embd +c:embd -m -b"
_DEVICE_START = "+pl:per_layers +x:embd {inputs}"  # copies of what the host has
# Several devices that hold all layers work on four batches at once, each with inputs of its own that stay
# (llama-context.cpp, pipeline_parallel; GGML_SCHED_MAX_COPIES).
_PIPELINE_COPIES = 4
_PIPELINE_START = "+copies:copies +pl:per_layers +x:none {inputs}"

_QUERY, _QUERY_GATED = "+n:embd +q:q +r:q -q", "+n:embd +g:q2 +r:q"
_VALUES_KEYS = "+v:v +k:k -n +s:k -k -s -v"
_KEYS_VALUES = "+k:k +s:k -k +v:v -n -s -v"
_KEYS_NORMED_VALUES = "+k:k +s:k -k +v:v -n +w:v -v -s -w"
_QKV_LATENT = (
    "+n:embd +l:lora +q:q_mla -l +qn:absorbed +qp:q_rope -q +r:q -qn -qp"
    " +kv:k -n +kc:latent +kp:rope -kv +k:k -kc -kp -k"
)
_FLASH = "+f:flash -r"
_SCORES = "+kq:scores -r +c:out -kq +f:out -c"
_SCORES_LATENT = "+vc:v_copy +kq:scores -r +f:out -vc -kq"
_OUT = "+o:embd -f -x o>x"
_OUT_GATED = "+p:out -g p>g +o:embd -f -g -x o>x"
_OUT_LATENT = "+m:out_mla -f +f:out_mla -m +o:embd -f -x o>x"
# Q, K, V and the output are multiplied by a rotation where the cache is quantized (attn_inp_k_rot, attn_inp_v_rot).
_ROTATED_QUERY = "+t:q -r t>r"
_ROTATED_VALUES_KEYS = "+v:v +w:v -v +k:k -n +s:k -k +u:k -s -u -w"
_ROTATED_KEYS_VALUES = "+k:k +s:k -k +u:k -s +v:v -n +w:v -v -u -w"
_ROTATED_OUT = "+t:out -f t>f"
_FEED = "+n:embd +g:feed +u:feed -n +h:feed -g -u +o:embd -h -x o>x"
_FEED_FUSED = "+n:embd +g:feed2 -n +h:feed -g +o:embd -h -x o>x"
# The outputs of all experts of a token are one tensor until their sum is made.
_ROUTER = "+p:experts +a:experts +v:used -p +s:one +w:used -v -s"
# CUDA chooses the experts in one kernel: tensors between stay allocated until it ends (ggml_cuda_topk_moe_fusion).
_ROUTER_FUSED = "+l:experts +p:experts +a:experts +v:used +s:one +c:one +w:used -l -p -v -s -c"
_EXPERTS = "+g:expert +u:expert +h:expert -g -u +d:routed -h -a"
_REDUCED = "-w +y:embd -d"
# CUDA sums up to 15 of them in one kernel, for which they outlive their weighted copy (ggml-cuda.cu,
# ggml_cuda_match_moe_weighted_reduction and add_alloc_dep).
_REDUCED_FUSED, _FUSED_EXPERTS = "+e:routed +y:embd -e -d -w", range(2, 16)
_SHARED = "+g:shared +u:shared +h:shared -g -u +o:embd -h -o"
_PER_LAYER_FIRST = "+pe:per_layer +a:per_layers -x0 +b:per_layers -a -pl +pl:per_layers -b +o:embd -pe -o"
_PER_LAYER = "+pe:per_layer +o:embd -pe -o"
_MAMBA = "+n:embd +z:inner2 -n +cc:conv_in -cs +cv:inner -cc +xb:proj +dt:rank +d:inner -dt +y:scan -d -xb"
_MAMBA_ENDS = "+c:inner -z -y +h:inner -c -cv +o:embd -h -o"
_MAMBA2 = "+n:embd +z:ssm_in -n +cc:conv_in -cs +cv:channels -cc +dt:rank +y:scan -dt"
_MAMBA2_ENDS = "+c:inner -z +m:inner -cv -y +h:inner -c -m +r:inner -h +o:embd -r -x o>x"
_DELTA = (
    "+n:embd +cs:history +p:channels +cc:conv_in -cs -p +st:state +cv:channels -cc +q:keys +k:keys +a:rank +b:rank"
    " +y:scan -q -k -cv -a -b -st +r:inner -y +z:inner -n +s:inner -z -s +o:embd -r -o"
)


class Arena:
    """Memory that is handed out as ggml-alloc.c does: the hole that fits best, else the end."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._holes: list[tuple[int, int]] = []  # offset and size; none touches another or the end
        self._end = 0
        self.places: dict[str, tuple[int, int]] = {}  # offset and size of what is held

    def take(self, name: str, size: int) -> None:
        fitting = (hole for hole in self._holes if hole[1] >= size)
        hole = min(fitting, key=lambda hole: (hole[1], -hole[0]), default=None)
        if hole is None:
            at, self._end = self._end, self._end + size
        else:
            at = hole[0]
            self._holes.remove(hole)
            if hole[1] > size:
                self._holes.append((at + size, hole[1] - size))
        self.places[name] = at, size
        self.peak_bytes = max(self.peak_bytes, self._end)

    def free(self, name: str) -> None:
        at, size = self.places.pop(name)
        stop, apart = at + size, []
        for hole in self._holes:
            if sum(hole) == at:
                at = hole[0]
            elif hole[0] == stop:
                stop += hole[1]
            else:
                apart.append(hole)
        self._holes = apart
        if stop == self._end:
            self._end = at
        elif stop > at:
            self._holes.append((at, stop - at))

    def run(self, program: str, sizes: Mapping[str, int]) -> None:
        for kind, name, other in _steps(program):
            if kind == "+":
                self.take(name, sizes[other])
            elif kind == "-":
                self.free(name)
            else:
                self.places[other] = self.places.pop(name)


@lru_cache(maxsize=64)
def _steps(program: str) -> tuple[tuple[str, str, str], ...]:
    """Split a program: what is done, the tensor, and its size or its new name."""
    found = []
    for step in program.split():
        kind = step[0] if step[0] in "+-" else ">"
        name, _, other = step.lstrip("+-").partition(":" if kind == "+" else ">")
        found.append((kind, name, other))
    return tuple(found)


def compute_bytes(
    meta: ModelMeta, memory: KvBytes, settings: Settings, *, all_logits: bool = False, mixed: bool = True
) -> int:
    """Return the bytes where one domain holds all layers.

    `all_logits`: logits of every token of a batch. `mixed`: a batch may mix tokens and images, or it is not known.
    """
    if meta.arch in ENCODERS:
        return _encoder(meta, memory, settings)
    starts = (_HOST_START, _MIXED_START) if mixed else (_HOST_START,)
    widest = max(_graph_bytes(meta, memory, settings, all_logits, start) for start in starts)
    return widest + _output(meta, settings)


def device_compute_bytes(meta: ModelMeta, memory: KvBytes, settings: Settings, *, all_logits: bool = False) -> int:
    """Return the bytes on a GPU that holds layers; the inputs that it needs are there too."""
    if meta.arch in ENCODERS:
        return _encoder(meta, memory, settings)
    start = _PIPELINE_START if _copies(meta, settings) > 1 else _DEVICE_START
    return _graph_bytes(meta, memory, settings, all_logits, start)


def host_compute_bytes(meta: ModelMeta, memory: KvBytes, settings: Settings, *, mixed: bool = True) -> int:
    """Return the bytes on the host beside an offloaded model: inputs, embeddings and output of one batch."""
    row, copies = _rows(settings) * _F32, _copies(meta, settings)
    inputs = sum(_inputs(meta, memory, settings).values()) + row * (2 if mixed else 1) * meta.n_embd
    computed = row * ((3 if mixed else 1) * meta.n_embd + _per_layers(meta))
    return copies * inputs + computed + _output(meta, settings)


def _graph_bytes(meta: ModelMeta, memory: KvBytes, settings: Settings, all_logits: bool, start: str) -> int:
    """Return the bytes of a batch's graph; `start`: the program of its embeddings and inputs."""
    arena, inputs = Arena(), _inputs(meta, memory, settings)
    sizes = {**_sizes(meta, settings), **inputs, "none": 0}
    sizes["copies"] = _PIPELINE_COPIES * (sizes["embd"] + sizes["per_layers"] + sum(inputs.values()))
    own = "none" if start == _PIPELINE_START else ""
    arena.run(start.format(inputs=" ".join(f"+{name}:{own or name}" for name in inputs)), sizes)
    sample = _sample(meta, memory)
    if sample and _reads_history(meta, sample[0][0]):
        arena.run("+cs:history", sizes)
    # Layers that attend to the cache of an earlier one are not in the sample, and need its mask.
    borrowed = bool(integer(meta, "attention.shared_kv_layers")) or meta.arch == "gemma3n"
    for index, (layer, feed) in enumerate(sample):
        later = [each for each, _ in sample[index + 1 :]]
        last = not borrowed and layer.cells not in {each.cells for each in later}
        history = any(_reads_history(meta, each) for each in later[:1])
        program = _layer(meta, layer, settings, feed, last=last, history=history)
        if sizes["per_layers"]:  # the embeddings are needed until the first layer's end
            first = program.replace("-x o>x", "x>x0 o>x", 1) if not index else program
            program = f"{program} {_PER_LAYER}" if first == program else f"{first} {_PER_LAYER_FIRST}"
        arena.run(program, {**sizes, **_attention_sizes(meta, memory, layer, settings)})
    if not all_logits and settings.role == "chat":
        return arena.peak_bytes
    logits = _rows(settings) * _F32 * ((meta.n_vocab or 0) + 4 * meta.n_embd) + sum(inputs.values())
    return max(arena.peak_bytes, logits)


def _sample(meta: ModelMeta, memory: KvBytes) -> list[tuple[LayerShape, str]]:
    """Return the first layers of each kind, in their order, and their feed-forward: the holes repeat soon."""
    dense = integer(meta, "leading_dense_block_count")
    experts = integer(meta, "expert_used_count")
    repeats = 3 if len(set(memory.layers)) == 1 else 6  # holes of one kind of layer repeat sooner
    seen: list[tuple[LayerShape, str]] = []
    for index, layer in enumerate(memory.layers):
        feed = "experts" if experts and index >= dense else "dense"
        if meta.arch in _WITHOUT_FEED_FORWARD or index == len(memory.layers) - 1:
            feed = ""  # the last layer feeds forward only the rows that give an output
        kind = (layer, feed)
        if seen.count(kind) < repeats:
            seen.append(kind)
    return seen


def _reads_history(meta: ModelMeta, layer: LayerShape) -> bool:
    """Return whether the layer before this one reads the state of its convolution."""
    return layer.recurrent and layer.cells == "none" and bool(_inner(meta)) and meta.arch not in _DELTA_NETS


def _layer(meta: ModelMeta, layer: LayerShape, settings: Settings, feed: str, *, history: bool, last: bool) -> str:
    """Return the program of one layer.

    `history`: it reads the convolution's state for the next. `last`: no later layer needs the mask of its cache.
    """
    reads, parts = "+cs:history" if history else "", []
    rotated = "" if _plain_cache(settings) or _latent(meta) else _ROTATED_OUT
    attends, recurrent = layer.cells != "none", layer.recurrent and bool(_inner(meta))
    if attends:
        parts += [_attention(meta, settings), f"-{layer.cells}" if last else ""]
    if recurrent and meta.arch in _DELTA_NETS:
        parts += [_DELTA, reads]
    elif recurrent and attends:
        parts += ["+cs:history", _MAMBA2, rotated, "+w:embd -f", _MAMBA2_ENDS.replace("-x o>x", "-o -x w>x"), reads]
    elif recurrent and integer(meta, "ssm.group_count"):
        parts += [_MAMBA2, reads, _MAMBA2_ENDS]
    elif recurrent:
        parts += [_MAMBA, reads, _MAMBA_ENDS]
    elif attends:
        gated = meta.arch in _GATED_ATTENTION
        parts += [reads, rotated, _OUT_LATENT if _latent(meta) else _OUT_GATED if gated else _OUT]
    else:
        parts.append(reads)
    if feed == "experts":
        parts.append(_mixture(meta, settings))
    elif feed:
        parts.append(_FEED_FUSED if meta.arch in _FUSED_FEED_FORWARD else _FEED)
    program = " ".join(parts)
    return program.replace("+n:embd ", "").replace(" -n", "") if meta.arch in _NORM_AFTER else program


def _mixture(meta: ModelMeta, settings: Settings) -> str:
    """Return the program of a feed-forward of experts, and of one that every token uses."""
    shared = integer(meta, "expert_shared_feed_forward_length") or integer(meta, "expert_shared_count")
    used, count, cuda = integer(meta, "expert_used_count"), integer(meta, "expert_count"), settings.n_gpu_layers > 0
    router = _ROUTER_FUSED if cuda and not count & (count - 1) and meta.arch not in _LATE_SOFTMAX else _ROUTER
    experts = _EXPERTS if shared else _EXPERTS.replace("+h", "-n +h")
    reduced = _REDUCED_FUSED if cuda and used in _FUSED_EXPERTS else _REDUCED
    return f"+n:embd {router} {experts} {reduced} {f'{_SHARED} -n' if shared else ''} -x y>x"


def _attention(meta: ModelMeta, settings: Settings) -> str:
    """Return the program up to the output of attention, `f`."""
    flash, rotated = settings.flash_attention != "off", not _plain_cache(settings)
    if _latent(meta):  # its cache is not rotated
        return f"{_QKV_LATENT} {_FLASH if flash else _SCORES_LATENT}"
    query = _QUERY_GATED if meta.arch in _GATED_ATTENTION else _QUERY
    if flash and rotated:
        rest = _ROTATED_KEYS_VALUES if meta.arch in _KEYS_FIRST else _ROTATED_VALUES_KEYS
        return f"{query} {_ROTATED_QUERY} {rest} {_FLASH}"
    rest = _KEYS_VALUES if meta.arch in _KEYS_FIRST else _VALUES_KEYS
    return f"{query} {_KEYS_NORMED_VALUES if meta.arch in _NORMED_VALUES else rest} {_FLASH if flash else _SCORES}"


def _feed_forward(meta: ModelMeta) -> int:
    """Return the number of values per token in a dense feed-forward."""
    return integer(meta, "feed_forward_length") or 4 * meta.n_embd


def _inner(meta: ModelMeta) -> int:
    return integer(meta, "ssm.inner_size")


def _latent(meta: ModelMeta) -> bool:
    return bool(integer(meta, "attention.key_length_mla"))


def _per_layers(meta: ModelMeta) -> int:
    """Return the number of values per token in Gemma's embeddings for all layers; they stay through the graph."""
    return meta.n_layer * integer(meta, "embedding_length_per_layer_input")


def _sizes(meta: ModelMeta, settings: Settings) -> dict[str, int]:
    """Return the bytes of the tensors of a batch that are the same in each layer."""
    row, embd = _rows(settings) * _F32, meta.n_embd
    used, experts = integer(meta, "expert_used_count"), integer(meta, "expert_count")
    feed = _feed_forward(meta)
    expert = integer(meta, "expert_feed_forward_length") or feed
    shared = integer(meta, "expert_shared_feed_forward_length") or integer(meta, "expert_shared_count") * expert
    inner, state, groups = (integer(meta, f"ssm.{key}") for key in ("inner_size", "state_size", "group_count"))
    rank, channels = integer(meta, "ssm.time_step_rank"), inner + 2 * groups * state
    states = settings.n_parallel * _F32 * state * inner
    history = settings.n_parallel * max(0, integer(meta, "ssm.conv_kernel") - 1) * _F32 * channels
    values = {
        "embd": embd,
        "feed": feed,
        "feed2": 2 * feed,
        "experts": experts,
        "used": used,
        "one": 1,
        "expert": used * expert,
        "routed": used * embd,
        "shared": shared,
        "per_layer": integer(meta, "embedding_length_per_layer_input"),
        "per_layers": _per_layers(meta),
        "inner": inner,
        "inner2": 2 * inner,
        "proj": rank + 2 * state,
        "rank": rank,
        "channels": channels,
        "keys": groups * state,
        "ssm_in": inner + channels + rank,
    }
    sizes = {name: row * count for name, count in values.items()}
    sizes |= {"scan": row * inner + states, "state": states, "history": history}
    return sizes | {"conv_in": row * channels + history}


def _attention_sizes(meta: ModelMeta, memory: KvBytes, layer: LayerShape, settings: Settings) -> dict[str, int]:
    """Return the bytes of the tensors of a batch that depend on the layer's cache."""
    row, heads = _rows(settings) * _F32, meta.n_head
    windowed = layer.cells == "window"
    key = (integer(meta, "attention.key_length_swa") if windowed else 0) or meta.key_length
    value = (integer(meta, "attention.value_length_swa") if windowed else 0) or meta.value_length
    cells = window_cells(memory, settings) if windowed else slot_context(settings.n_ctx, settings.n_parallel)
    unpacked = 0
    if settings.n_gpu_layers and not _plain_cache(settings):
        # CUDA's flash attention reads no other types for a batch (ggml_cuda_flash_attn_ext_get_alloc_size)
        unpacked = settings.n_parallel * cells * (layer.key + layer.value) * _F16
    rope = key - value if _latent(meta) else 0
    return {
        "q": row * heads * key,
        "q2": row * heads * 2 * key,
        "k": row * layer.key,
        "v": row * layer.value,
        "out": row * heads * value,
        "flash": row * heads * value + unpacked,
        "scores": row * heads * cells,
        "lora": row * integer(meta, "attention.q_lora_rank"),
        "q_mla": row * heads * integer(meta, "attention.key_length_mla"),
        "out_mla": row * heads * integer(meta, "attention.value_length_mla"),
        "absorbed": row * heads * value,
        "latent": row * value,
        "q_rope": row * heads * rope,
        "rope": row * rope,
        "v_copy": settings.n_parallel * cells * value * _F16,
    }


def _inputs(meta: ModelMeta, memory: KvBytes, settings: Settings) -> dict[str, int]:
    """Return the bytes of positions and the like, and those of mask and indices of the windowed and the whole cache."""
    rows, flash = _rows(settings), settings.flash_attention != "off"
    kinds = {layer.cells for layer in memory.layers}
    cells = {"window": window_cells(memory, settings), "full": slot_context(settings.n_ctx, settings.n_parallel)}
    widest = max((layer.value for layer in memory.layers), default=0)
    # Without flash attention the mask is not converted, and V is stored transposed: an index for each value.
    mask, indices = (_F16, 2) if flash else (_F32, 1 + widest)
    rotations = 0 if _plain_cache(settings) or _latent(meta) else _F32 * (meta.key_length**2 + 64 * 64)
    return {
        "positions": rows * _F32 * 8 + _SMALL_INPUTS,
        **{
            kind: rows * (cells[kind] * mask + _I64 * indices) + rotations
            for kind in ("window", "full")
            if kind in kinds or (not kinds and kind == "full")
        },
    }


def _encoder(meta: ModelMeta, memory: KvBytes, settings: Settings) -> int:
    """Return the bytes of an encoder: no gate in the feed-forward, no logits."""
    values = 2 * _feed_forward(meta) + meta.n_embd
    return _rows(settings) * _F32 * values + sum(_inputs(meta, memory, settings).values())


def _copies(meta: ModelMeta, settings: Settings) -> int:
    """Return how many batches are computed at once."""
    whole = settings.n_gpu_layers > meta.n_layer and settings.split_mode == "layer" and not settings.cpu_expert_layers
    return _PIPELINE_COPIES if whole and len(settings.devices) > 1 else 1


def _plain_cache(settings: Settings) -> bool:
    return settings.kv_type_k in PLAIN_KV and settings.kv_type_v in PLAIN_KV


def _output(meta: ModelMeta, settings: Settings) -> int:
    return settings.n_parallel * _F32 * (meta.n_vocab or 0)


def _rows(settings: Settings) -> int:
    return min(settings.n_ubatch, settings.n_batch, settings.n_ctx)
