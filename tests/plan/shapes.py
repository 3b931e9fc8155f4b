"""Boards, engines and models for planner tests, as values: no file is read."""

from __future__ import annotations

from msgspec.structs import replace

from edge.board.board import Board, Cpu, Gpu
from edge.board.memory import MemorySnapshot
from edge.engine.engine import Engine, Flag
from edge.models.meta import ModelMeta, Tensor
from edge.models.open import ModelFile
from edge.units import GIB, MIB

TYPE_BYTES = {"Q4_K_M": 4.9, "Q5_K_M": 5.7, "Q6_K": 6.6, "Q8_0": 8.5, "F16": 16.0, "MXFP4": 4.3}  # bits a weight


def cpu_board(memory_gib: float = 16, cores: int = 8) -> Board:
    return Board(
        id="x86_64",
        module="x86_64 machine",
        soc=None,
        compute_capability=None,
        memory_bytes=int(memory_gib * GIB),
        unified_memory=False,
        cpu=Cpu("test CPU", cores, cores * 2),
    )


def gpu_board(*vram_gib: float, memory_gib: float = 64) -> Board:
    gpus = tuple(
        Gpu(f"GPU {i}", f"GPU-{i}", i, f"00000000:0{i + 1}:00.0", int(size * GIB), "8.9")
        for i, size in enumerate(vram_gib)
    )
    return replace(cpu_board(memory_gib), gpus=gpus, compute_capability="8.9", cuda="12.8")


def jetson(memory_gib: float, module: str = "Jetson", soc: str = "Orin") -> Board:
    return replace(
        cpu_board(memory_gib, 6),
        id="jetson",
        module=module,
        soc=soc,
        compute_capability="8.7",
        unified_memory=True,
        gpus=(Gpu("Orin", compute_capability="8.7"),),
    )


def memory(board: Board, available_gib: float | None = None, gpu_gib: tuple[float, ...] = ()) -> MemorySnapshot:
    """Available: as given, else nine tenths."""
    domain = "unified" if board.unified_memory else "host"
    free = int(available_gib * GIB) if available_gib is not None else board.memory_bytes * 9 // 10
    total, available = {domain: board.memory_bytes}, {domain: free}
    for gpu, size in zip(board.gpus, gpu_gib or [(g.memory_bytes or 0) / GIB * 0.95 for g in board.gpus], strict=False):
        if gpu.uuid:
            total[gpu.uuid], available[gpu.uuid] = gpu.memory_bytes or 0, int(size * GIB)
    return MemorySnapshot(total, available)


def engine(*, cuda: bool = False, era: str = "load-mode", **flags: int) -> Engine:
    """A llama-server of this era. `flags`: more options with their arity."""
    return Engine(
        id=f"test-{era}",
        kind="llama-server",
        path="/opt/llama/llama-server",
        version="1",
        commit="0c1e57098",
        era=era,
        flags=FLAGS_BY_ERA[era] | _verbosity(LEVELS[era]),
        cuda=cuda,
        built_for=(75, 86, 87, 90, 110) if cuda else (),
    )


LEVELS = {"load-mode": 6, "both": 6, "flash-value": 5, "flash-bare": 0}


def _verbosity(levels: int) -> dict[str, Flag]:
    return {name: Flag("--log-verbosity", 1, tuple(map(str, range(levels)))) for name in ("--verbosity", "-lv")}


def _flags(*names: str, switches: str = "") -> dict[str, Flag]:
    table = {}
    for spelling in names:
        for name in spelling.split():
            table[name] = Flag(spelling.split()[-1], 1)
    for spelling in switches.split():
        table[spelling] = Flag(spelling, 0)
    return table


_OLD = (
    "-m --model",
    "-a --alias",
    "--host",
    "-c --ctx-size",
    "-np --parallel",
    "-b --batch-size",
    "-ub --ubatch-size",
    "-ctk --cache-type-k",
    "-ctv --cache-type-v",
    "-ngl --gpu-layers --n-gpu-layers",
    "-sm --split-mode",
    "-ts --tensor-split",
    "-t --threads",
    "-tb --threads-batch",
)
_NEW = (
    *_OLD,
    "-dev --device",
    "-fa --flash-attn",
    "-cram --cache-ram",
    "-fit --fit",
    "--log-colors",
    "-ctxcp --ctx-checkpoints --swa-checkpoints",
    "-mm --mmproj",
    "-ot --override-tensor",
)
_SWITCHES = "--slots --props --metrics --no-warmup --jinja --log-timestamps --log-prefix --no-context-shift --embedding"

FLAGS_BY_ERA = {
    "load-mode": _flags(*_NEW, "-lm --load-mode", switches=f"{_SWITCHES} --offline --no-ui --no-webui --reranking"),
    "both": _flags(
        *_NEW, "-lm --load-mode", switches=f"{_SWITCHES} --offline --no-webui --reranking --no-mmap --direct-io"
    ),
    "flash-value": _flags(*_NEW, switches=f"{_SWITCHES} --offline --no-webui --reranking --no-mmap --direct-io"),
    "flash-bare": _flags(*_OLD, switches="--slots --metrics --no-mmap --flash-attn -fa --log-prefix --embedding"),
}


def meta(
    arch: str = "llama",
    *,
    layers: int = 32,
    embd: int = 4096,
    heads: int = 32,
    kv_heads: int | tuple[int, ...] = 8,
    head_size: int = 128,
    ff: int = 14336,
    ctx: int = 131072,
    vocab: int = 128256,
    window: int | None = None,
    quant: str = "Q5_K_M",
    tied: bool = False,
    extra: dict[str, int | float | str | bool] | None = None,
    arrays: dict[str, tuple[int | float | bool, ...]] | None = None,
) -> ModelMeta:
    """A dense model. Keys of `extra` and `arrays` are written without the architecture."""
    bits = TYPE_BYTES[quant]
    per_head = (kv_heads,) * layers if isinstance(kv_heads, int) else kv_heads
    tensors = [Tensor("token_embd.weight", quant, (embd, vocab), 0, int(embd * vocab * bits / 8))]
    for layer in range(layers):
        values = 2 * embd * heads * head_size + 2 * embd * per_head[layer] * head_size + 3 * embd * ff
        tensors.append(Tensor(f"blk.{layer}.all.weight", quant, (values,), 0, int(values * bits / 8)))
    tensors.append(Tensor("output_norm.weight", "F32", (embd,), 0, embd * 4))
    if not tied:
        tensors.append(Tensor("output.weight", quant, (embd, vocab), 0, int(embd * vocab * bits / 8)))
    size = sum(tensor.bytes for tensor in tensors)
    return ModelMeta(
        arch=arch,
        name="test",
        n_layer=layers,
        n_embd=embd,
        n_head=heads,
        n_head_kv=per_head,
        key_length=head_size,
        value_length=head_size,
        n_ctx_train=ctx,
        n_vocab=vocab,
        sliding_window=window,
        n_expert=0,
        quant=quant,
        tensors=tuple(tensors),
        tensor_bytes=size,
        data_offset=4 * MIB,
        file_bytes=size + 4 * MIB,
        chat_template=True,
        tokenizer="gpt2",
        file_type=17,
        extra={f"{arch}.{key}": value for key, value in {"feed_forward_length": ff, **(extra or {})}.items()},
        arrays={f"{arch}.{key}": value for key, value in (arrays or {}).items()},
    )


def model(name: str = "Test-8B", header: ModelMeta | None = None) -> ModelFile:
    header = header or meta()
    path = f"/models/{name}-{header.quant}.gguf"
    return ModelFile(name, header.quant, path, (path,), header.file_bytes, f"{name}-{header.quant}", header)


def with_experts(header: ModelMeta, count: int, ff: int) -> ModelMeta:
    """The header with `count` experts in place of each layer's feed-forward, by llama.cpp's tensor names."""
    bits = TYPE_BYTES[header.quant]
    values = header.n_embd * ff * count
    extra = [
        Tensor(f"blk.{layer}.ffn_{part}_exps.weight", header.quant, (values,), 0, int(values * bits / 8))
        for layer in range(header.n_layer)
        for part in ("up", "gate", "down")
    ]
    tensors = (*header.tensors, *extra)
    size = sum(tensor.bytes for tensor in tensors)
    return replace(header, tensors=tensors, tensor_bytes=size, file_bytes=size + header.data_offset, n_expert=count)
