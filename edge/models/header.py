"""Read a GGUF header as ModelMeta: safe on hostile files, no tensor data."""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from io import FileIO
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec

from edge.linux.files import private_dir, read_bounded, write_atomic
from edge.linux.slow_reads import reading
from edge.models.meta import ModelMeta, Split, Tensor
from edge.models.quant import REMOVED_TYPES, TENSOR_TYPES, UNKNOWN, confirms, file_type_label
from edge.models.reader import DESCRIPTION, GgufReader, RawHeader, RawTensor, Scalar
from edge.models.verdict import HeaderVerdict, VerdictError, damaged, truncated

# The largest published model has 126 layers (Llama 3.1 405B).
_MAX_LAYERS = 4096
# llama.cpp prints these as they are (llama_model_loader and print_info): a newline would forge lines of its log.
# In an error it quotes the others: a sentence in them could be read as the cause of an exit.
_IDENTIFIERS = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "adapter.type")
_IDENTIFIER = re.compile(r"[\w.+-]{0,64}")
_PRINTED = (*_IDENTIFIERS, "general.name", "general.type")
# It prints the texts of special tokens and the labels too (llama_vocab::impl::print_info, llama_model::print_info). A
# line break is legitimate there; a log line behind it is none. The shortest line that is looked for has 19 characters.
_LOG_LINE = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} [A-Z] ", re.MULTILINE)  # the prefix of --log-prefix
_TOKENS, _LABELS = "tokenizer.ggml.tokens", "classifier.output_labels"
_AFTER_BREAK_CHARACTERS = 16
_DEFAULT_SPECIAL = (0, 1, 2, 3, 11, 100, 101, 102, 103)  # llama_vocab::impl::load, where no key names a token
# Architectures that only predict tokens for a larger model, src/llama-arch.cpp.
_DRAFTERS = ("eagle3", "dflash")
# LLM_KV_TOKENIZER_CHAT_TEMPLATE and LLM_KV_TOKENIZER_CHAT_TEMPLATE_N, src/llama-arch.cpp.
CHAT_TEMPLATE = "tokenizer.chat_template"
_MAX_VALUE = 1 << 40  # of a dimension, head count or context; larger is damage
_KEPT_FORMAT = 2  # of the files of `read_kept`: increase it when ModelMeta or its values change
_KEPT_FILES = 64  # of 20 to 300 kB, by the number of tensors
Opening = Callable[[Path], int]  # returns a descriptor for reading


def open_by_name(path: Path) -> int:
    """Open a file for reading. A FIFO would block the caller until something writes to it."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


def read_header(path: Path, *, complete: bool = True, opening: Opening = open_by_name) -> ModelMeta:
    """Read the header of one file. `complete` also requires that the file holds every tensor's bytes.

    `opening` gives the descriptor, which is closed here. Raises VerdictError (a BadModelError) that names what the file
    is instead, OSError when it cannot be read.
    """
    with _open_regular(path, opening) as file:
        size = os.fstat(file.fileno()).st_size
        reader = GgufReader(file, size, path.name)
        with reading(path):
            raw = reader.header()
            printed = _printed(reader, raw)
    try:
        return _meta(raw, size, complete, printed)
    except _BadError as error:
        raise VerdictError(error.verdict, path.name) from None


def read_kept(path: Path, folder: Path | None) -> ModelMeta:
    """Read a complete header, or what an earlier call kept of it in `folder`: by path, size, mtime and inode.

    To skip a vocabulary of 150 000 tokens and as many merges takes 40 ms of CPU time (Xeon), at every plan. The file is
    opened in any case: it must be readable, and a start remembers which files its plan opened. Raises as `read_header`.
    """
    if folder is None:
        return read_header(path)
    with _open_regular(path) as file:
        state = os.fstat(file.fileno())
    identity = [_KEPT_FORMAT, state.st_size, state.st_mtime_ns, state.st_ino]
    kept = folder / f"{sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
        found = msgspec.json.decode(read_bounded(kept, mine=True), type=_Kept)
        if found.identity == identity:
            return found.meta
    meta = read_header(path)
    with suppress(OSError, ValueError):  # a full or read-only disk costs only the time
        private_dir(folder)
        write_atomic(kept, msgspec.json.encode(_Kept(identity, meta)).decode(), durable=False)
        for old in sorted(folder.glob("*.json"), key=_changed_ns)[:-_KEPT_FILES]:
            old.unlink(missing_ok=True)
    return meta


class _Kept(msgspec.Struct, frozen=True):
    identity: list[int]
    meta: ModelMeta


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def read_templates(path: Path) -> dict[str, str]:
    """Return the chat templates of a model by their keys: the default one, and named ones such as `.tool_use`.

    Raises VerdictError, OSError.
    """
    with _open_regular(path) as file:
        raw = GgufReader(file, os.fstat(file.fileno()).st_size, path.name, whole=CHAT_TEMPLATE).header()
    found = {key: str(value) for key, value in raw.values.items() if key.startswith(CHAT_TEMPLATE)}
    return {key: text for key, text in found.items() if text.strip()}


def peek_kind(path: Path) -> str | None:
    """Return the kind of a file by its first keys (`model`, `mmproj`, ...), else None. Reads one window."""
    try:
        with _open_regular(path) as file:
            raw = GgufReader(file, os.fstat(file.fileno()).st_size, path.name).peek()
    except (OSError, VerdictError):
        return None
    return _kind(raw, str(raw.values.get("general.architecture", "")), True)


def _open_regular(path: Path, opening: Opening = open_by_name) -> FileIO:
    """Open a file. Raises VerdictError for what is none, OSError."""
    with reading(path):
        descriptor = opening(path)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device"
        raise VerdictError(HeaderVerdict("not_a_file", f"is {what}, not a file", "give a .gguf file"), path.name)
    return FileIO(descriptor, "rb")


def peek_stream(file: BinaryIO, size: int, name: str) -> tuple[str, str, int]:
    """Return (kind, architecture, layers) from the first bytes of a file. Raises VerdictError."""
    raw = GgufReader(file, size, name).peek()
    arch = str(raw.values.get("general.architecture", ""))
    layers = raw.values.get(f"{arch}.block_count", 0)
    return _kind(raw, arch, True), arch, layers if isinstance(layers, int) else 0


class _BadError(Exception):
    def __init__(self, verdict: HeaderVerdict) -> None:
        super().__init__(verdict.sentence)
        self.verdict = verdict


def _printed(reader: GgufReader, raw: RawHeader) -> list[str]:
    """Return the texts of arrays that llama.cpp prints as they are. Raises VerdictError."""
    named = (value for key, value in raw.values.items() if key.startswith("tokenizer.") and key.endswith("_token_id"))
    texts = reader.strings(raw, _TOKENS, (*_DEFAULT_SPECIAL, *(value for value in named if isinstance(value, int))))
    for key in raw.strings_at:
        if key.endswith(f".{_LABELS}"):
            texts += reader.strings(raw, key, range(raw.lengths[key]))
    return texts


def _check_printed(raw: RawHeader, printed: list[str]) -> None:
    """Raise _BadError for a text that would forge lines of llama.cpp's log."""
    for name in (*raw.values, *raw.lengths, *(tensor.name for tensor in raw.tensors)):
        if not name.isprintable():
            raise _BadError(damaged("the name of a key or tensor holds control characters"))
    for text in printed:
        if any(len(line.strip()) > _AFTER_BREAK_CHARACTERS for line in text.split("\n")[1:]):
            raise _BadError(damaged("a special token or label holds a line break and a line behind it"))


def _check_names(raw: RawHeader) -> None:
    """Raise _BadError for a name that would forge lines of llama.cpp's log. What is too long was not kept."""
    for key in _PRINTED:
        value = raw.values.get(key)
        if key in raw.lengths or (isinstance(value, str) and not value.isprintable()):
            raise _BadError(damaged(f"key {key!r} holds control characters, or more than any name"))
        if key in _IDENTIFIERS and not _IDENTIFIER.fullmatch(str(value or "")):
            raise _BadError(damaged(f"key {key!r} is {str(value)[:64]!r}, which is no identifier"))


def _check_projector(raw: RawHeader) -> None:
    """Raise _BadError for texts of a projector that would forge lines of llama.cpp's log (tools/mtmd/clip.cpp)."""
    kinds = [key for key in (*raw.values, *raw.lengths) if key.startswith("clip.") and key.endswith("projector_type")]
    if not all(str(raw.values.get(key, "\n")).isprintable() for key in kinds):
        raise _BadError(damaged("a type of projector holds control characters"))
    # That of a model is printed with its line breaks escaped.
    if DESCRIPTION in raw.lengths or _LOG_LINE.search(str(raw.values.get(DESCRIPTION, ""))):
        raise _BadError(damaged(f"key {DESCRIPTION!r} holds a line of a log, or is too long"))


def _meta(raw: RawHeader, size: int, complete: bool, printed: list[str]) -> ModelMeta:
    get = _Keys(raw)
    _check_printed(raw, printed)
    # GGUF_DEFAULT_ALIGNMENT; ggml refuses other than powers of two, and a zero would divide by zero below.
    alignment = get.integer("general.alignment", 32)
    if alignment < 1 or alignment & (alignment - 1):
        raise _BadError(damaged(f"alignment {alignment} is no power of two"))
    data_offset = -(-raw.end // alignment) * alignment
    tensors = tuple(_tensors(raw, alignment, size - data_offset))
    if complete:
        _check_complete(tensors, data_offset, size)
    _check_names(raw)
    arch = get.text("general.architecture") or UNKNOWN
    kind = _kind(raw, arch, bool(tensors))
    if kind == "mmproj":
        _check_projector(raw)
    n_layer = _layers(get, arch, tensors)
    heads = get.per_layer(f"{arch}.attention.head_count", n_layer, 0)
    n_head, n_embd = max(heads, default=0), get.integer(f"{arch}.embedding_length", 0)
    # llama.cpp's rule where attention.key_length is absent: llama_hparams::n_embd_head_k.
    head_size = n_embd // n_head if n_head else 0
    window = get.integer(f"{arch}.attention.sliding_window", 0)
    file_type = get.integer("general.file_type", -1)
    tokens = raw.lengths.get("tokenizer.ggml.tokens")
    return ModelMeta(
        arch=arch,
        name=get.text("general.name"),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=get.per_layer(f"{arch}.attention.head_count_kv", n_layer, heads),
        key_length=get.integer(f"{arch}.attention.key_length", head_size),
        value_length=get.integer(f"{arch}.attention.value_length", head_size),
        n_ctx_train=get.integer(f"{arch}.context_length", 0),
        n_vocab=get.integer(f"{arch}.vocab_size", tokens or 0) or None,
        sliding_window=window or None,
        n_expert=get.integer(f"{arch}.expert_count", 0),
        quant=quant_of(None if file_type < 0 else file_type, tensors),
        tensors=tensors,
        tensor_bytes=sum(tensor.bytes for tensor in tensors),
        data_offset=data_offset,
        file_bytes=size,
        chat_template=CHAT_TEMPLATE in raw.values or CHAT_TEMPLATE in raw.lengths,
        tokenizer=get.text("tokenizer.ggml.model"),
        file_type=None if file_type < 0 else file_type,
        split=_split(get),
        kind=kind,
        extra=raw.values,
        arrays=raw.arrays,
    )


def _layers(get: _Keys, arch: str, tensors: Iterable[Tensor]) -> int:
    n_layer = get.integer(f"{arch}.block_count", -1)
    named = n_layer == 0 and any(tensor.name.startswith("blk.") for tensor in tensors)
    if n_layer > _MAX_LAYERS or named:
        raise _BadError(damaged(f"it claims {n_layer:,} layers{', and has tensors of some' if named else ''}"))
    return max(0, n_layer)


class _Keys:
    """Typed access to metadata: a wrong type or an absurd size is damage, a missing key is the default."""

    def __init__(self, raw: RawHeader) -> None:
        self._raw = raw

    def integer(self, key: str, default: int) -> int:
        value: Scalar = self._raw.values.get(key, default)
        if key in self._raw.arrays:  # some are per layer: the largest is what a sum must allow for
            numbers = [int(item) for item in self._raw.arrays[key] if isinstance(item, int)]
            value = max(numbers, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value > _MAX_VALUE:
            raise _BadError(damaged(f"key {key[:64]!r} is {str(value)[:40]!r}"))
        if value < 0 and value != default:
            raise _BadError(damaged(f"key {key[:64]!r} is negative: {value}"))
        return value

    def text(self, key: str) -> str | None:
        value = self._raw.values.get(key)
        return value if isinstance(value, str) and value else None

    def per_layer(self, key: str, n_layer: int, default: int | tuple[int, ...]) -> tuple[int, ...]:
        values = self._raw.arrays.get(key)
        if values is None:
            if key not in self._raw.values and isinstance(default, tuple):
                return default
            return (self.integer(key, default if isinstance(default, int) else 0),) * n_layer
        if len(values) < n_layer or any(not 0 <= value <= _MAX_VALUE for value in values):
            raise _BadError(damaged(f"key {key[:64]!r} has {len(values)} entries for {n_layer} layers, or absurd ones"))
        return tuple(int(value) for value in values[:n_layer])


def _tensors(raw: RawHeader, alignment: int, data_bytes: int) -> Iterator[Tensor]:
    foreign = any(tensor.type not in TENSOR_TYPES for tensor in raw.tensors)
    starts = sorted({tensor.offset for tensor in raw.tensors}) if foreign else []
    seen: set[str] = set()
    for tensor in raw.tensors:
        if tensor.name in seen:
            raise _BadError(damaged(f"tensor {tensor.name!r} occurs twice"))
        seen.add(tensor.name)
        # gguf_init_from_file refuses such a file too: the data section is read with aligned blocks.
        if tensor.offset % alignment:
            raise _BadError(damaged(f"tensor {tensor.name!r} is not aligned to {alignment} bytes"))
        yield _tensor(tensor, starts, data_bytes)


def _tensor(tensor: RawTensor, starts: list[int], data_bytes: int) -> Tensor:
    known = TENSOR_TYPES.get(tensor.type)
    if known is None:
        if tensor.type in REMOVED_TYPES:
            sentence = f"uses tensor type {tensor.type}, which llama.cpp has given up"
            hint = "fetch a newer file of this model: edgellm model pull REF"
            raise _BadError(HeaderVerdict("removed_type", sentence, hint))
        # A type newer than this table: it ends where the next tensor begins.
        at = bisect_right(starts, tensor.offset)
        following = starts[at] if at < len(starts) else max(data_bytes, tensor.offset)
        return Tensor(tensor.name, f"TYPE{tensor.type}", tensor.dims, tensor.offset, following - tensor.offset)
    count = prod(tensor.dims)
    # The product of four 64-bit dimensions overflows llama.cpp's own size_t arithmetic.
    if count > 1 << 62 or (tensor.dims and tensor.dims[0] % known.block):
        raise _BadError(damaged(f"tensor {tensor.name!r} has shape {list(tensor.dims)}, impossible in {known.name}"))
    return Tensor(tensor.name, known.name, tensor.dims, tensor.offset, count // known.block * known.bytes)


def _check_complete(tensors: tuple[Tensor, ...], data_offset: int, size: int) -> None:
    """Compare offsets with the file's size. Tensor names are not checked: a mixture of experts has others."""
    beyond = [tensor for tensor in tensors if data_offset + tensor.offset + tensor.bytes > size]
    if beyond:
        first = min(beyond, key=lambda tensor: tensor.offset)
        last = max(beyond, key=lambda tensor: tensor.offset + tensor.bytes)
        raise _BadError(truncated(first.name, data_offset + last.offset + last.bytes, size))


def _split(get: _Keys) -> Split | None:
    count = get.integer("split.count", 0)
    no = get.integer("split.no", 0)
    if count > 1 and no >= count:
        raise _BadError(damaged(f"it claims to be shard {no + 1} of {count}"))
    return Split(no, count) if count > 1 else None


def _kind(raw: RawHeader, arch: str, has_tensors: bool) -> str:
    """Return general.type, or for older files the kind that architecture and keys imply."""
    declared = str(raw.values.get("general.type", "model"))
    if arch in _DRAFTERS or arch.endswith("-assistant"):
        return "drafter"
    if arch == "clip" or declared in ("mmproj", "clip-vision"):
        return "mmproj"
    if arch == "imatrix" or declared == "imatrix" or "imatrix.datasets" in raw.lengths:
        return "imatrix"
    if declared == "adapter" or arch == "controlvector" or "adapter.type" in raw.values:
        return "adapter"
    split = raw.values.get("split.count", 0)
    if not has_tensors and not (isinstance(split, int) and split > 1):
        return "vocab"
    return "model"


def quant_of(file_type: int | None, tensors: tuple[Tensor, ...]) -> str:
    """Return the declared mix if the tensors confirm it, else the type with the most weight bytes."""
    label = file_type_label(file_type)
    weights = weight_bytes(tensors)
    if label != UNKNOWN and confirms(label, weights):
        return label
    return weights.most_common(1)[0][0] if weights else UNKNOWN


def weight_bytes(tensors: Iterable[Tensor]) -> Counter[str]:
    """Return the bytes of the matrices by type, without embeddings and output: mixes keep those larger."""
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    inner = [tensor for tensor in matrices if tensor.name.startswith("blk.")] or matrices
    found: Counter[str] = Counter()
    for tensor in inner:
        found[tensor.type] += tensor.bytes
    return found
