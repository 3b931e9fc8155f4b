"""`edgellm plan`: the launch plan of this machine or of another board, its memory and its reasons."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import to_builtins

from edge.board.board import Board
from edge.cli.options import (
    BoardId,
    Engine,
    Json,
    Memory,
    Models,
    Profile,
    RootDir,
    Set,
    StateDir,
    columns,
    folders_of,
    given,
    print_json,
    print_lines,
    terminal_width,
)
from edge.daemon.remembered_launch import next_start
from edge.errors import UsageError
from edge.models.open import ModelFile
from edge.plan.argv import redacted
from edge.plan.plan import DomainBudget, LaunchPlan, Measured, ModelPlan, Plan
from edge.units import counted, format_bytes

if TYPE_CHECKING:
    from edge.plan.prepare import HostView


def register(root: typer.Typer) -> None:
    example = "Example: edgellm plan -p orin --board orin-nano-8 -m Qwen3.5-4B:Q5_K_M --memory 5.2GiB"
    root.command(epilog=example)(plan)


def plan(
    profile: Profile = None,
    model: Models = None,
    set: Set = None,
    engine: Engine = None,
    board: BoardId = None,
    root_dir: RootDir = None,
    memory: Memory = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="all rungs, command line and environment")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="[-- ENGINE OPTIONS]", help="as in `edgellm up`")] = None,
) -> None:
    """Show what `up` would launch and what it costs in memory: each value with its reason and origin."""
    from edge.config import load
    from edge.plan.prepare import prepare

    folders = folders_of(state_dir)
    config = load(folders, given(profile=profile, model=model, set=set, engine=engine, args=args), os.environ)
    prepared = prepare(config, folders, _view(board, root_dir, memory), allow_missing=True)
    here = not (board or root_dir) and memory is None
    remembered = next_start(folders) if here else None
    if as_json:
        print_json(plan_document(prepared.plan) | ({"remembered_launch": remembered} if here else {}), indent=1)
        return
    print_lines([*plan_lines(prepared.plan, verbose=verbose, width=terminal_width()), *_next_start(remembered)])


def _next_start(remembered: Mapping[str, Any] | None) -> list[str]:
    if remembered is None:
        return []
    command, because = shlex.join(["edgellm", *remembered["argv"]]), remembered["plans_first_because"]
    how = f"plans before it spawns: {because}" if because else "spawns its remembered launch, then plans"
    return ["", f"the next start of `{command}` {how}"]


def _view(board_id: str | None, root: Path | None, memory: str | None) -> HostView:
    from edge.board.named import board_by_id
    from edge.plan.prepare import HostView
    from edge.units import parse_size

    if board_id and root:
        raise UsageError("--board and --root exclude each other", "name a board, or give the tree of one")
    return HostView(
        root or Path("/"),
        board=board_by_id(board_id) if board_id else None,
        available_bytes=None if memory is None else parse_size(memory),
    )


# Text of `edgellm plan`: settings with their reasons, memory by domain, other rungs.

# Fields of DomainBudget in the order of their allocation. A part is shown where one domain has it, a sum always.
_PARTS = ("weights", "kv", "compute", "context", "prompt_cache", "page_cache", "claim")
_SUMS = ("required", "reserve", "available", "headroom")


def plan_lines(plan: Plan, *, verbose: bool = False, width: int | None = None) -> list[str]:
    """Return the plan; `verbose` adds command line and environment, `width` is the terminal's."""
    lines = [_board(plan.board), f"engine {plan.engine.id}{_version(plan)}"]
    names = {gpu.uuid: f"GPU{gpu.index if gpu.index is not None else i}" for i, gpu in enumerate(plan.board.gpus)}
    for model in plan.models.values():
        lines += ["", *_model(model, verbose, names, width and width - 2)]
    if plan.notes:
        lines += ["", *(f"note: {note}" for note in plan.notes)]
    return lines


def _board(board: Board) -> str:
    parts = [board.module, f"{format_bytes(board.memory_bytes)} {'unified' if board.unified_memory else 'host'} memory"]
    parts += [f"{gpu.name} {format_bytes(gpu.memory_bytes)}" for gpu in board.gpus if gpu.uuid and gpu.memory_bytes]
    parts += [f"L4T {board.l4t}"] if board.l4t else []
    parts += [f"JetPack {board.jetpack}"] if board.jetpack else []
    parts += [f"CUDA {board.cuda}"] if board.cuda else []
    parts += [f"power mode {board.power_mode.name}"] if board.power_mode else []
    return " · ".join(parts)


def _version(plan: Plan) -> str:
    parts = [part for part in (plan.engine.version, plan.engine.commit) if part]
    return f" ({', '.join(parts)})" if parts else ""


def _model(model: ModelPlan, verbose: bool, names: Mapping[str | None, str], width: int | None) -> list[str]:
    ladder = model.ladder
    chosen = ladder.plans[ladder.chosen]
    lines = [
        f"{model.id}: rung {ladder.chosen} of 0–{len(ladder.plans) - 1}" + ("" if ladder.chosen else ", as requested")
    ]
    reasons: list[tuple[str, ...]] = [(r.subject, r.value, r.because, f"[{r.origin}]") for r in chosen.reasons]
    if width is not None:
        reasons = [(*row[:2], " ".join(row[2:])) for row in reasons]
    lines += [f"  {line}" for line in columns(reasons, width=width)]
    lines += ["", *(f"  {line}" for line in _memory(chosen, names))]
    if model.measured:
        lines += ["", f"  {_measured(model.measured)}"]
    others = [rung for rung in ladder.plans if rung is not chosen]
    if others:
        lines += ["", "  other rungs:", *(f"  {line}" for line in _rungs(others, names, width))]
    lines += [f"  warning: {warning}" for warning in model.warnings]
    if verbose:
        lines += ["", *(f"  {line}" for line in (*command_lines(chosen), *environment_lines(chosen)))]
    return lines


def command_lines(rung: LaunchPlan) -> list[str]:
    """Return the command line, one option a line."""
    words: list[str] = []
    for word in rung.argv:
        if word.startswith("-") or not words or not words[-1].startswith("-") or " " in words[-1]:
            words.append(word)
        else:
            words[-1] += f" {word}"
    return ["command:", *(f"  {word}" for word in words)]


def environment_lines(rung: LaunchPlan) -> list[str]:
    """Return the environment, secrets redacted."""
    return ["environment:", *(f"  {name}={value}" for name, value in redacted(rung.env).items())]


def _memory(rung: LaunchPlan, names: Mapping[str | None, str]) -> list[str]:
    rows = [["memory", *(names.get(name, name) for name in rung.budget)]]
    for part in (*_PARTS, *_SUMS):
        sizes = [getattr(domain, f"{part}_bytes") for domain in rung.budget.values()]
        if any(sizes) or part in _SUMS:
            rows.append([part.replace("_", " "), *(format_bytes(size) for size in sizes)])
    return columns(rows, right=frozenset(range(1, len(rows[0]))))


def _measured(last: Measured) -> str:
    parts = {"weights": last.weights_bytes, "KV": last.kv_bytes, "compute": last.compute_bytes}
    parts |= {"resident": last.rss_bytes or 0, "GPU": last.gpu_bytes or 0}
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return f"last measured ({last.what}): {sizes}"


def _rungs(rungs: Sequence[LaunchPlan], names: Mapping[str | None, str], width: int | None) -> list[str]:
    rows = [_rung(rung, names) for rung in rungs]
    return columns([(*row[:1], ", ".join(filter(None, row[1:]))) for row in rows] if width else rows, width=width)


def _rung(rung: LaunchPlan, names: Mapping[str | None, str]) -> tuple[str, ...]:
    chosen = rung.settings
    kv = chosen.kv_type_k if chosen.kv_type_k == chosen.kv_type_v else f"{chosen.kv_type_k}/{chosen.kv_type_v}"
    parts = [f"{chosen.n_ctx} tokens", f"KV {kv}", counted(chosen.n_parallel, "slot")]
    needs = ", ".join(f"{format_bytes(d.required_bytes)} {names.get(name, name)}" for name, d in rung.budget.items())
    model = f"{rung.model.name} {rung.model.quant}" if rung.model else ""
    layers = f"{chosen.n_gpu_layers} layers on the GPU" if chosen.split_mode and chosen.n_gpu_layers else ""
    cache = "" if chosen.cache_ram_bytes or chosen.role != "chat" else "no prompt cache"
    extra = ", ".join(part for part in (model, layers, cache) if part)
    return (f"{rung.rung}", *parts, needs, "fits" if rung.fits else "does not fit", extra)


# The JSON document of `edgellm plan --json`.

SCHEMA = 1  # of the document: raised when a field goes or changes its meaning


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the JSON-serialisable document; secrets of the environment are hidden."""
    engine = plan.engine
    return {
        "schema": SCHEMA,
        "board": to_builtins(plan.board, enc_hook=str),
        "engine": {
            "id": engine.id,
            "kind": engine.kind,
            "version": engine.version,
            "commit": engine.commit,
            "era": engine.era,
        },
        "models": {model_id: _model_document(model) for model_id, model in plan.models.items()},
        "notes": list(plan.notes),
    }


def _model_document(plan: ModelPlan) -> dict[str, Any]:
    return {
        "aliases": list(plan.aliases),
        "model": None if plan.other else _file_document(plan.model),
        **({"other_engine": to_builtins(plan.other)} if plan.other else {}),
        "ladder": [_rung_document(rung) for rung in plan.ladder.plans],
        "chosen": plan.ladder.chosen,
        "warnings": list(plan.warnings),
        "measured": to_builtins(plan.measured, enc_hook=str) if plan.measured else None,
    }


def _file_document(file: ModelFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "path": file.path,
        "quant": file.quant,
        "bytes": file.bytes,
        "mmproj_bytes": file.mmproj_bytes,
        "adapter_bytes": file.adapter_bytes,
        "drafter_bytes": file.drafter_bytes,
        "fingerprint": file.fingerprint,
    }


def _rung_document(rung: LaunchPlan) -> dict[str, Any]:
    return {
        "rung": rung.rung,
        "fits": rung.fits,
        **({"model": _file_document(rung.model)} if rung.model else {}),
        "settings": to_builtins(rung.settings, enc_hook=str),
        "memory": {name: _domain_document(domain) for name, domain in rung.budget.items()},
        "argv": list(rung.argv),
        **({"cold": to_builtins(rung.cold)} if rung.cold else {}),
        "env": redacted(rung.env),
        "reasons": [to_builtins(reason, enc_hook=str) for reason in rung.reasons],
    }


def _domain_document(domain: DomainBudget) -> dict[str, int]:
    return {
        **to_builtins(domain, enc_hook=str),
        "required_bytes": domain.required_bytes,
        "headroom_bytes": domain.headroom_bytes,
    }
