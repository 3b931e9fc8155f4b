"""Tables of models: list, catalogue, checks, results."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge.cli.output import block, console, context, draw, model_id, short
from edge.models import ollama
from edge.models.catalogue import CatalogueQuant, CatalogueRow
from edge.models.check import DeepReport
from edge.models.install import Removed
from edge.models.job import Pending
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile
from edge.models.quantize import QuantizeResult
from edge.models.receipt import Receipt
from edge.models.survey import SurveyLine
from edge.plan.kv_cache import cache_by_layer, memory_of
from edge.plan.plan import Settings
from edge.units import GIB, counted, format_bytes, printable


def listing(lines: Sequence[SurveyLine], pending: Sequence[Pending], folder: Path) -> None:
    """Print usable models, then unusable files with the reason, then unfinished transfers."""
    out = console()
    good = [line for line in lines if line.usable]
    if good:
        _models(out, good)
    else:
        out.print(f"no model is in {folder} yet; a small one to start with (98 MB):", markup=False)
        out.print("  edgellm model pull SmolLM2-135M-Instruct")
    block(out, "notes", [(line.id, note) for line in good for note in line.notes])
    bad = [(line.entry.path.name, line.verdict.sentence) for line in lines if line.verdict]
    block(out, "not usable as a model", bad)
    block(out, "not complete", [(one.source, f"{format_bytes(one.bytes)}, {_state(one)}") for one in pending])


def _models(out: Console, lines: Sequence[SurveyLine]) -> None:
    rows = []
    for line in lines:
        header = line.summary
        if header is None:
            continue
        extra = (f", {header.n_expert} experts" if header.n_expert else "") + (" + projector" if line.mmproj else "")
        shards = f" in {len(line.entry.shards)}" if len(line.entry.shards) > 1 else ""
        rows.append(
            (
                model_id(line.entry.name, header.quant),
                format_bytes(line.entry.bytes) + shards,
                short(header.parameters),
                context(header.n_ctx_train),
                header.arch + extra,
                Text(printable(line.entry.source or str(line.entry.path.parent)), "dim"),
            )
        )
    headers = ("model", "size", "params", "context", "architecture", "from")
    draw(out, headers, rows, right=("size", "params", "context"), drop=("from", "params", "architecture"))


def _state(one: Pending) -> str:
    if one.active:
        return f"{one.kind} in progress"
    after = {"pull": "the same pull resumes it", "rejected": "set aside: its hash was wrong"}
    return after.get(one.kind, "the next command removes it")


def catalogue(rows: Sequence[CatalogueRow]) -> None:
    """Print one line a model, by role. Sizes in GiB; ≈ where only a rounded figure is known; the age of its figures."""
    out, today = console(), date.today()
    for role in dict.fromkeys(row.role for row in rows):
        cells = [
            (
                Text(row.name, "bold"),
                "  ".join(map(_size, row.quants)),
                context(row.n_ctx_train),
                row.licence,
                _age(row.read_on, today),
            )
            for row in rows
            if row.role == role
        ]
        headers = (role, "quant and GiB", "context", "licence", "read")
        draw(out, headers, cells, right=("context",), drop=("licence", "read", "context"), padding=(0, 2, 0, 0))
        out.print()


def _age(day: str | None, today: date) -> str:
    """Return how long ago the figures of a row were read: "3 months"; the day itself where the clock is behind it."""
    if day is None:
        return "?"
    days = (today - date.fromisoformat(day)).days
    if days < 0:
        return day
    return f"{days} days" if days < 60 else f"{days // 30} months"


def _size(one: CatalogueQuant) -> str:
    return f"{one.quant} {'' if one.exact else '≈'}{one.bytes / GIB:.2g}"


def checked(
    models: Sequence[ModelFile],
    bad: Sequence[SurveyLine],
    reports: Sequence[DeepReport],
    refused: Mapping[str, str],
    *,
    judged: bool,
) -> None:
    """Print the result of `model check`. `reports` is empty without --deep.

    `refused`: the engine's reasons against chat templates, by the models' paths; `judged`: an engine was there.
    """
    out = console()
    for number, model in enumerate(models):
        report = reports[number] if reports else None
        mark, words = _verdict(report)
        fault = refused.get(model.path)
        mark = ("✗", "red") if fault else mark
        out.print(Text.assemble(mark, " ", model_id(model.name, model.quant), "  ", words))
        if fault:
            out.print(f"    the engine refuses its chat template: {printable(fault)}", markup=False)
            out.print("    give another with chat_template_file", style="dim", markup=False)
        elif model.meta.chat_template and not judged:
            out.print("    its chat template is not judged: no engine is ready here", style="dim", markup=False)
        for note in model.notes:
            out.print(f"    {printable(note)}", style="dim", markup=False)
        if report:
            _findings(out, report)
    for line in bad:
        if line.verdict:
            out.print(
                Text.assemble(("✗", "red"), " ", (printable(line.entry.path.name), "bold"), "  ", line.verdict.sentence)
            )
            out.print(f"    {line.verdict.hint}", style="dim", markup=False)


def _verdict(report: DeepReport | None) -> tuple[tuple[str, str], str]:
    if report is None:
        return ("✓", "green"), "header and sizes match"
    if not report.healthy:
        return ("✗", "red"), "is damaged: remove it and fetch it again"
    return ("✓", "green"), f"all {report.tensors} tensors are valid; {_compared(report)}"


def _compared(report: DeepReport) -> str:
    if all(file.expected for file in report.files):
        return "the hash is that of its source"
    if all(file.recorded for file in report.files):
        return "the hash is the one recorded on arrival; its source gives none to compare with"
    return "no hash is known to compare with"


def _findings(out: Console, report: DeepReport) -> None:
    for file in report.files:
        if not file.matches:
            out.print(
                f"    {Path(file.path).name}: SHA-256 {file.sha256} instead of {file.expected or file.recorded}",
                markup=False,
            )
    for difference in report.differences or ():
        out.print(f"    {printable(difference)}", markup=False)
    for tensor in report.bad[:10]:
        out.print(
            f"    {printable(tensor.name)} ({tensor.type}): {tensor.scales:,} scales are not finite", markup=False
        )


def fetchable(ref: str, size: int | None) -> str:
    return f"{printable(ref)} can be fetched: {format_bytes(size) if size else 'of unknown size'}"


def arrived(model: ModelFile) -> None:
    """Print a model that was added to the store, and the command that serves it."""
    out = console()
    out.print(
        Text.assemble(model_id(model.name, model.quant), f"  {format_bytes(model.bytes)}  {printable(model.path)}")
    )
    for note in model.notes:
        out.print(f"  {printable(note)}", style="dim", markup=False)
    out.print(
        f"  serve it: edgellm up -m {shlex.quote(printable(f'{model.name}:{model.quant}'))}", style="dim", markup=False
    )


def quantized(made: QuantizeResult, source: ModelFile) -> None:
    arrived(made.model)
    out = console()
    share = made.model.bytes / max(1, source.bytes)
    mix = ", ".join(f"{kind} {count}" for kind, count in sorted(made.mix.items(), key=lambda item: -item[1]))
    out.print(f"  {share:.0%} of {format_bytes(source.bytes)}; tensors by type: {mix}", markup=False)
    if made.fallbacks:
        out.print(f"  {made.fallbacks} tensors got another type", markup=False)


def removed(gone: Removed) -> None:
    console().print(f"removed {printable(gone.id)}: {format_bytes(gone.bytes)}", markup=False)


# Text of `edgellm model show`: one model on one screen.

# Type, bar, share and count make a line of 80 columns.
_BAR_CELLS = 28
# A colour for each size of type: float, 8, 6, 5, 4 bits.
_COLOURS = {"F": "bright_black", "B": "bright_black", "8": "blue", "6": "cyan", "5": "green", "4": "yellow"}


def details(model: ModelFile, note: Receipt | None) -> None:
    """Print one model: header, memory, tensor types. `note`: its source, None if not recorded."""
    out = console()
    title = model.meta.name if model.meta.name and model.meta.name != model.name else ""
    name = printable(model.name)
    out.print(Text.assemble((name, "bold"), "  ", (model.quant, "green"), "  ", (printable(title), "dim")))
    table = Table(box=None, show_header=False, pad_edge=True, padding=(0, 2, 0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(model, note):
        table.add_row(name, value if isinstance(value, Text) else Text(printable(value)))
    out.print(table)
    block(out, "notes", [("•", text) for text in model.notes])


def _facts(model: ModelFile, note: Receipt | None) -> Iterator[tuple[str, str | Text]]:
    meta = model.meta
    shards = f" in {len(model.shards)} files" if len(model.shards) > 1 else ""
    yield "file", f"{model.path}  ({format_bytes(model.bytes)}{shards})"
    yield from _origin(note, Path(model.path))
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


def _origin(note: Receipt | None, path: Path) -> Iterator[tuple[str, str]]:
    if note is None:
        blob = ollama.of_blob(path)
        yield "source", "Ollama's store, in place" if blob else "not recorded: the file was copied by hand"
        return
    yield "source", note.source
    if note.files:
        verified = all(file.expected for file in note.files)
        how = "verified" if verified else "recorded on arrival, nothing to compare with"
        yield "hash", f"{how}: SHA-256 {note.files[0].sha256}" + (f" ({note.at})" if note.at else "")
        if any(file.changed(path.parent / file.path) for file in note.files):
            yield "", "linked, moved or written to since it arrived; `edgellm model check --deep` compares the hash"
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
        many = counted(count[name], "tensor")
        yield "", Text.assemble(f"{name:<8}", bar, f" {share:6.1%}  {many}")


def kv_bytes_per_token(meta: ModelMeta) -> int:
    """Return the f16 K and V bytes of one token, from the planner's arithmetic at two contexts."""
    memory = memory_of(meta)

    def at(n_ctx: int) -> int:
        return sum(cache_by_layer(memory, Settings(n_ctx, 1, 0, "f16", "f16", "on", "none", 1, 0)))

    return (at(65536) - at(32768)) // 32768
