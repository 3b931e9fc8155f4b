"""Text of `edgellm model show`: one model on one screen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from edge.model.file import ModelFile
from edge.model.meta import ModelMeta
from edge.model.receipt import Receipt
from edge.plan.kv import cache_by_layer, memory_of
from edge.plan.plan import Settings
from edge.render.common import block, console, short
from edge.units import format_bytes

_BAR_CELLS = 28
# A colour for each size of type: float, 8, 6, 5, 4 bits.
_COLOURS = {"F": "bright_black", "B": "bright_black", "8": "blue", "6": "cyan", "5": "green", "4": "yellow"}


def details(model: ModelFile, note: Receipt | None) -> None:
    out = console()
    title = model.meta.name if model.meta.name and model.meta.name != model.name else ""
    out.print(Text.assemble((model.name, "bold"), "  ", (model.quant, "green"), "  ", (title, "dim")))
    table = Table(box=None, show_header=False, pad_edge=True, padding=(0, 2, 0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(model, note):
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    out.print(table)
    block(out, "notes", [("•", text) for text in model.notes])


def _facts(model: ModelFile, note: Receipt | None) -> Iterator[tuple[str, str | Text]]:
    meta = model.meta
    shards = f" in {len(model.shards)} files" if len(model.shards) > 1 else ""
    yield "file", f"{model.path}  ({format_bytes(model.bytes)}{shards})"
    yield from _origin(note)
    if model.mmproj:
        yield "projector", f"{model.mmproj}  ({format_bytes(model.mmproj_bytes)})"
    parameters = short(sum(math.prod(tensor.shape) for tensor in meta.tensors))
    experts = f", {meta.n_expert} experts" if meta.n_expert else ""
    yield "architecture", f"{meta.arch}, {parameters} parameters, {meta.n_layer} layers, {meta.n_embd} wide{experts}"
    yield "attention", _attention(meta)
    cost = kv_bytes_per_token(meta)
    if cost:
        at = min(meta.n_ctx_train or 8192, 8192)
        yield "KV cache", f"{format_bytes(cost)} a token in f16, {format_bytes(cost * at)} at {at:,} tokens"
    yield "context", f"trained on {meta.n_ctx_train:,} tokens" if meta.n_ctx_train else "unknown"
    template = "with a chat template" if meta.chat_template else "without a chat template"
    vocabulary = f"{meta.n_vocab:,} tokens" if meta.n_vocab else "of unknown size"
    yield "tokenizer", f"{meta.tokenizer or 'none'}, {vocabulary}, {template}"
    yield "weights", f"{format_bytes(meta.tensor_bytes)} in {len(meta.tensors)} tensors"
    yield from _mix(meta)
    licence = meta.extra.get("general.license")
    if licence:
        yield "licence", f"{licence} (by its header)"


def _origin(note: Receipt | None) -> Iterator[tuple[str, str]]:
    if note is None:
        yield "source", "not recorded: the file was copied by hand"
        return
    yield "source", note.source
    if note.files:
        yield "verified", f"{note.at or 'on arrival'}, SHA-256 {note.files[0].sha256}"
    for text in note.notes:
        yield "", text


def _attention(meta: ModelMeta) -> str:
    kinds = sorted(set(meta.n_head_kv), reverse=True)
    heads = " or ".join(str(kind) for kind in kinds) if kinds else "no"
    window = f", window of {meta.sliding_window:,} tokens" if meta.sliding_window else ""
    return f"{meta.n_head} heads, {heads} KV heads × {meta.key_length}{window}"


def _mix(meta: ModelMeta) -> Iterator[tuple[str, Text]]:
    """Yield one bar a tensor type, by bytes."""
    size: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for tensor in meta.tensors:
        size[tensor.type] += tensor.bytes
        count[tensor.type] += 1
    for name, size_bytes in size.most_common():
        share = size_bytes / max(1, meta.tensor_bytes)
        cells = round(share * _BAR_CELLS)
        letter = next((letter for letter in name if letter in _COLOURS), "")
        bar = ("█" * cells + "░" * (_BAR_CELLS - cells), _COLOURS.get(letter, "magenta"))
        many = f"{count[name]} tensor{'s' if count[name] != 1 else ''}"
        yield "", Text.assemble(f"{name:<8}", bar, f" {share:6.1%}  {many}")


def kv_bytes_per_token(meta: ModelMeta) -> int:
    """Return the f16 K and V bytes of one token, from the planner's arithmetic at two contexts."""
    memory = memory_of(meta)

    def at(n_ctx: int) -> int:
        return sum(cache_by_layer(memory, Settings(n_ctx, 1, 0, "f16", "f16", "on", "none", 1, 0)))

    return (at(65536) - at(32768)) // 32768
