"""Tables of models: list, catalogue, checks, results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edge.model.catalogue import CatalogueQuant, CatalogueRow
from edge.model.deep import DeepReport
from edge.model.file import ModelFile
from edge.model.partial import Pending
from edge.model.quantize import Quantized
from edge.model.remove import Removed
from edge.model.survey import Line
from edge.render.common import block, console, context, model_id, short
from edge.units import GIB, format_bytes


def listing(lines: Sequence[Line], pending: Sequence[Pending], folder: Path) -> None:
    """Print usable models, then unusable files with the reason, then unfinished transfers."""
    out = console()
    good = [line for line in lines if line.usable]
    if good:
        out.print(_models(good))
    else:
        out.print(f"no model is in {folder} yet; a small one to start with (98 MB):", markup=False)
        out.print("  edgellm model pull SmolLM2-135M-Instruct")
    block(out, "notes", [(line.id, note) for line in good for note in line.notes])
    bad = [(line.entry.path.name, line.verdict.sentence) for line in lines if line.verdict]
    block(out, "not usable as a model", bad)
    block(out, "not complete", [(one.source, f"{format_bytes(one.bytes)}, {_state(one)}") for one in pending])


def _models(lines: Sequence[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("model", no_wrap=True)
    for name in ("size", "params", "context"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("architecture", no_wrap=True)
    table.add_column("from", overflow="ellipsis", no_wrap=True, style="dim")
    for line in lines:
        header = line.summary
        if header is None:
            continue
        extra = (f", {header.n_expert} experts" if header.n_expert else "") + (" + projector" if line.mmproj else "")
        shards = f" in {len(line.entry.shards)}" if len(line.entry.shards) > 1 else ""
        table.add_row(
            model_id(line.entry.name, header.quant),
            format_bytes(line.entry.bytes) + shards,
            short(header.parameters),
            context(header.n_ctx_train),
            header.arch + extra,
            line.entry.source or str(line.entry.path.parent),
        )
    return table


def _state(one: Pending) -> str:
    if one.active:
        return f"{one.kind} in progress"
    after = {"pull": "the same pull resumes it", "rejected": "set aside: its hash was wrong"}
    return after.get(one.kind, "the next command removes it")


def catalogue(rows: Sequence[CatalogueRow]) -> None:
    """Print one line a model, by role. Sizes in GiB; ≈ where only a rounded figure is known."""
    out = console()
    for role in dict.fromkeys(row.role for row in rows):
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column(role, no_wrap=True, style="bold")
        table.add_column("quant and GiB", overflow="fold", min_width=26)
        table.add_column("context", justify="right", no_wrap=True)
        table.add_column("licence", overflow="ellipsis", no_wrap=True, min_width=12)
        for row in rows:
            if row.role == role:
                table.add_row(row.name, "  ".join(map(_size, row.quants)), context(row.n_ctx_train), row.licence)
        out.print(table, "")


def _size(one: CatalogueQuant) -> str:
    return f"{one.quant} {'' if one.exact else '≈'}{one.bytes / GIB:.2g}"


def checked(models: Sequence[ModelFile], bad: Sequence[Line], reports: Sequence[DeepReport]) -> None:
    """Print the result of `model check`. `reports` is empty without --deep."""
    out = console()
    for number, model in enumerate(models):
        report = reports[number] if reports else None
        mark, words = _verdict(report)
        out.print(Text.assemble(mark, " ", model_id(model.name, model.quant), "  ", words))
        for note in model.notes:
            out.print(f"    {note}", style="dim", markup=False)
        if report:
            _findings(out, report)
    for line in bad:
        if line.verdict:
            out.print(Text.assemble(("✗", "red"), " ", (line.entry.path.name, "bold"), "  ", line.verdict.sentence))
            out.print(f"    {line.verdict.hint}", style="dim", markup=False)


def _verdict(report: DeepReport | None) -> tuple[tuple[str, str], str]:
    if report is None:
        return ("✓", "green"), "header and sizes match"
    if not report.healthy:
        return ("✗", "red"), "is damaged: remove it and fetch it again"
    known = "the hash is that of its source" if report.files[0].expected else "no hash is known to compare with"
    return ("✓", "green"), f"all {report.tensors} tensors are valid; {known}"


def _findings(out: Console, report: DeepReport) -> None:
    for file in report.files:
        if not file.matches:
            out.print(f"    {Path(file.path).name}: SHA-256 {file.sha256} instead of {file.expected}", markup=False)
    for tensor in report.bad[:10]:
        out.print(f"    {tensor.name} ({tensor.type}): {tensor.scales:,} scales are not finite", markup=False)


def arrived(model: ModelFile) -> None:
    """Print a model that was added to the store, and the command that serves it."""
    out = console()
    out.print(Text.assemble(model_id(model.name, model.quant), f"  {format_bytes(model.bytes)}  {model.path}"))
    for note in model.notes:
        out.print(f"  {note}", style="dim", markup=False)
    out.print(f"  serve it: edgellm up -m {model.name}:{model.quant}", style="dim", markup=False)


def quantized(made: Quantized, source: ModelFile) -> None:
    arrived(made.model)
    out = console()
    share = made.model.bytes / max(1, source.bytes)
    mix = ", ".join(f"{kind} {count}" for kind, count in sorted(made.mix.items(), key=lambda item: -item[1]))
    out.print(f"  {share:.0%} of {format_bytes(source.bytes)}; tensors by type: {mix}", markup=False)
    if made.fallbacks:
        out.print(f"  {made.fallbacks} tensors got another type", markup=False)


def removed(gone: Removed) -> None:
    console().print(f"removed {gone.id}: {format_bytes(gone.bytes)}", markup=False)
