"""`edgellm model`: list, show, check, fetch, import, quantize and remove models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.cli.complete import fetched_models, known_models
from edge.cli.options import Engine, Json, StateDir, confirm_in_use, folders_of
from edge.errors import BadModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge.models.open import ModelFile
    from edge.models.quant import QuantPreference
    from edge.models.store import Store
    from edge.paths import Folders


Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF", help="NAME[:QUANT], a path, or a source that was pulled", autocompletion=known_models
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="a name of the catalogue, or hf://, modelscope://, https://, pypi://, file://",
        autocompletion=fetched_models,
    ),
]
Deep = Annotated[bool, typer.Option("--deep", help="read every byte: hashes, and scales that are not finite")]
Template = Annotated[
    Path | None,
    typer.Option("--template", metavar="FILE", help="judge this chat template instead of the model's own"),
]


def register(root: typer.Typer) -> None:
    group = typer.Typer(help="List, show, check, fetch, quantize and remove models.", no_args_is_help=True)
    group.command("list", epilog="Example: edgellm model list --catalogue")(list_models)
    group.command(epilog="Example: edgellm model show SmolLM2-135M-Instruct")(show)
    group.command(epilog="Example: edgellm model check --deep Qwen3.5-4B:Q5_K_M")(check)
    group.command(epilog="Example: edgellm model pull hf://unsloth/Qwen3.5-4B-GGUF --quant Q5_K_M")(pull)
    group.command("import", epilog="Example: edgellm model import ~/Downloads/model-Q5_K_M.gguf")(import_)
    group.command(epilog="Example: edgellm model quantize Qwen3.5-4B:Q8_0 --to Q5_K_M")(quantize)
    group.command(epilog="Example: edgellm model remove Qwen3.5-4B:Q8_0")(remove)
    root.add_typer(group, name="model")


def list_models(
    state_dir: StateDir = None,
    catalogue: Annotated[bool, typer.Option("--catalogue", help="list what can be pulled by name instead")] = False,
    as_json: Json = False,
) -> None:
    """List every model with the figures of its header; unusable files come last, with the reason."""
    from msgspec import to_builtins

    from edge.cli import model_json
    from edge.cli import model_output as drawing
    from edge.models.catalogue import load
    from edge.models.job import jobs
    from edge.models.survey import survey

    if catalogue:
        rows = load()
        if as_json:
            typer.echo(model_json.dump(catalogue=[model_json.catalogue_row(row) for row in rows]))
        else:
            drawing.catalogue(rows)
        return
    folders = folders_of(state_dir)
    lines, pending = survey(_store(state_dir), folders.cache), jobs(folders.models)
    if as_json:
        documents = [model_json.line(line) for line in lines]
        typer.echo(model_json.dump(models=documents, pending=to_builtins(pending)))
    else:
        drawing.listing(lines, pending, folders.models)


def show(ref: Ref, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Show one model: architecture, memory, quantization, tokenizer and source."""
    from edge.cli import model_json
    from edge.cli.model_output import details
    from edge.models import receipt

    model = _store(state_dir).resolve(ref)
    path = Path(model.path)
    note = receipt.as_trusted(receipt.read_of(path), path.parent, _own_stores(state_dir))
    if as_json:
        typer.echo(model_json.dump(model=model_json.model(model, note)))
    else:
        details(model, note)


def check(
    ref: Annotated[str | None, typer.Argument(metavar="[REF]", help="one model (default: all)")] = None,
    state_dir: StateDir = None,
    deep: Deep = False,
    template: Template = None,
    engine: Engine = None,
    as_json: Json = False,
) -> None:
    """Check models without loading them. Exit code 65 when one is not healthy, or its chat template is refused.

    The engine itself judges the template, where one is installed.
    """
    from edge.cli import model_json
    from edge.cli import model_output as drawing
    from edge.cli.output import progress
    from edge.models.check import check_deep
    from edge.models.survey import survey
    from edge.models.verdict import HEALTHY_KINDS

    store = _store(state_dir)
    lines = survey(store, folders_of(state_dir).cache) if ref is None else []
    refs = [ref] if ref is not None else [str(line.entry.path) for line in lines if line.usable]
    models = [store.resolve(one) for one in refs]
    bad = [line for line in lines if line.verdict and line.verdict.kind not in HEALTHY_KINDS]
    judged_by, refused = _template_faults(models, template, folders_of(state_dir), engine)
    reports = []
    for model in models if deep else []:
        with progress(quiet=as_json) as report:
            reports.append(check_deep(model, report, stores=_own_stores(state_dir)))
    if as_json:
        documents = [model_json.checked(model, refused.get(model.path)) for model in models]
        deep_reports = [model_json.deep(one) for one in reports]
        bad_lines = [model_json.line(line) for line in bad]
        typer.echo(model_json.dump(models=documents, bad=bad_lines, deep=deep_reports, templates_judged_by=judged_by))
    else:
        drawing.checked(models, bad, reports, refused, judged=judged_by is not None)
    if bad or refused or not all(one.healthy for one in reports):
        raise typer.Exit(BadModelError.exit_code)


def _template_faults(
    models: Sequence[ModelFile], instead: Path | None, folders: Folders, wanted: str | None
) -> tuple[str | None, dict[str, str]]:
    """Return the engine that judged the chat templates, None without a verdict, and its refusals by a model's path.

    Raises UsageError if the file in place of the templates cannot be read, EngineMissingError for an unknown `wanted`.
    """
    from edge.builder.template_check import template_fault
    from edge.engine.choose import choose
    from edge.errors import EngineBrokenError, EngineMissingError
    from edge.models.header import CHAT_TEMPLATE, read_templates

    try:
        given = None if instead is None else {CHAT_TEMPLATE: instead.read_text(encoding="utf-8")}
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--template: {instead}: {error}", "give a file with a Jinja template") from None
    verdicts: dict[tuple[str, ...], str | None] = {}
    refused: dict[str, str] = {}
    try:
        engine = choose(folders, wanted, needs_gpu=False)
        for model in models:
            templates = given or read_templates(Path(model.path))
            key = tuple(templates.values())  # quantizations of one model have the same
            if templates and key not in verdicts:
                verdicts[key] = template_fault(engine, templates)
            fault = verdicts.get(key)
            if fault is not None:
                refused[model.path] = fault
    except (EngineBrokenError, EngineMissingError):
        if wanted:
            raise
        return None, refused
    return engine.id, refused


def pull(
    ref: Source,
    state_dir: StateDir = None,
    quant: Annotated[str | None, typer.Option("--quant", metavar="QUANT", help="default: the best that fits")] = None,
    projector: Annotated[bool, typer.Option("--projector", help="with the repository's vision projector")] = False,
    check_only: Annotated[bool, typer.Option("--check", help="only check source, token and disk")] = False,
    as_json: Json = False,
) -> None:
    """Fetch and verify a model, or resume an interrupted fetch. A model that is present is not fetched again."""
    from msgspec.structs import replace

    from edge.cli import model_json
    from edge.cli import model_output as drawing
    from edge.cli.output import progress
    from edge.models.pull import pull as fetch
    from edge.models.transfer import PullOptions

    # A named quantization is taken as it is: the board is not asked.
    room_bytes, preference = (None, None) if quant else _room(state_dir)
    options = PullOptions(quant, room_bytes, preference, projector)
    models_dir = folders_of(state_dir).models
    if check_only:
        from edge.models.pull import check as can_fetch

        size = can_fetch(ref, models_dir, options)
        typer.echo(model_json.dump(ref=ref, bytes=size) if as_json else drawing.fetchable(ref, size))
        return
    with progress(quiet=as_json) as report:
        model = fetch(ref, models_dir, replace(options, progress=report))
    if as_json:
        typer.echo(model_json.dump(model=model_json.model(model)))
    else:
        drawing.arrived(model)


def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="a .gguf file, any shard of a set, or a folder")],
    state_dir: StateDir = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="name in the store; else the file's")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a model file of this machine and copy it into the store."""
    from edge.cli import model_json
    from edge.cli import model_output as drawing
    from edge.cli.output import progress
    from edge.models.install import import_model

    with progress(quiet=as_json) as report:
        model = import_model(path, folders_of(state_dir).models, name=name, progress=report)
    if as_json:
        typer.echo(model_json.dump(model=model_json.model(model)))
    else:
        drawing.arrived(model)


def quantize(
    ref: Ref,
    to: Annotated[str, typer.Option("--to", metavar="QUANT", help="for example Q5_K_M")],
    state_dir: StateDir = None,
    engine: Engine = None,
    force: Annotated[bool, typer.Option("--force", help="also from a lossy quantization")] = False,
    as_json: Json = False,
) -> None:
    """Make a smaller quantization with the engine's llama-quantize. A failed run leaves no file."""
    from edge.cli import model_json
    from edge.cli import model_output as drawing
    from edge.cli.output import progress, warn
    from edge.engine.choose import choose
    from edge.models.quantize import quantize as make
    from edge.models.quantize import tool_of, will_fall_back

    folders = folders_of(state_dir)
    model = _store(state_dir).resolve(ref)
    chosen = choose(folders, engine, needs_gpu=False)
    larger = will_fall_back(model.meta, to.upper())
    if larger:
        total = len(model.meta.tensors)
        warn(f"about {larger} of {total} tensors have rows that {to} does not divide: they get a larger type")
    with progress(quiet=as_json) as report:
        made = make(
            model,
            to,
            folders.models,
            tool_of(chosen),
            force=force,
            library_path=chosen.library_path,
            progress=report,
        )
    if as_json:
        documents = model_json.model(made.model)
        typer.echo(model_json.dump(model=documents, mix=made.mix, fallbacks=made.fallbacks))
    else:
        drawing.quantized(made, model)


def remove(
    ref: Ref,
    force: Annotated[bool, typer.Option("--force", help="also a model that is being served")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Remove a model from the store's own folder. Files of other folders are not touched."""
    from edge.cli import model_json
    from edge.cli import model_output as drawing
    from edge.cli.client import serving
    from edge.models.install import removable, remove_entry

    store = _store(state_dir)
    entry = removable(store, ref)
    # A mapped file that is gone stays readable for its engine, but the next start would not find it.
    server = None if force else serving(folders_of(state_dir), entry.shards or (entry.path,))
    confirm_in_use(f"{entry.id} is served by", server, "remove")
    gone = remove_entry(store, entry)
    if as_json:
        typer.echo(model_json.dump(removed=gone.id, paths=list(gone.paths), bytes=gone.bytes))
    else:
        drawing.removed(gone)


def _own_stores(state_dir: Path | None) -> tuple[Path, ...]:
    from edge.paths import system_folders

    return folders_of(state_dir).models, system_folders().models


def _store(state_dir: Path | None) -> Store:
    """Return the store that `plan` and `up` read too."""
    from edge.config import load
    from edge.models.store import standard

    folders = folders_of(state_dir)
    return standard(folders, load(folders, {}, os.environ).store.dirs, os.environ)


def _room(state_dir: Path | None) -> tuple[int, QuantPreference]:
    """Return the memory that weights may take on this board now, and the quantization its profile asks for."""
    from edge.board.memory import room_bytes, snapshot
    from edge.board.probe import probe
    from edge.config import load, resolve_profile
    from edge.models.quant import QuantPreference

    folders = folders_of(state_dir)
    board = probe(Path("/"))
    memory = snapshot(Path("/"), board)
    preset = resolve_profile(load(folders, {}, os.environ), board, folders).preset
    free = room_bytes(memory.total_bytes, memory.available_bytes, preset.reserve)
    return free, QuantPreference(preset.quant, preset.prefer)
