"""`edgellm bench`: how this machine loads and serves a model."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from edge.cli.options import Engine, Json, Models, Profile, Set, StateDir, folders_of, given, print_lines, print_result
from edge.errors import UnavailableError, UsageError
from edge.linux.files import write_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge.bench.draft import DraftRow
    from edge.bench.load import EngineBench, LoadRow
    from edge.bench.serve import LoadLevel
    from edge.bench.sleep import SleepRow
    from edge.paths import Folders
    from edge.plan.choices import LoadChoice, MeasuredChoice, SleepChoice
    from edge.plan.plan import Plan

B = TypeVar("B", bound="EngineBench")
MODES = ("none", "mmap", "dio", "none+prefetch", "mmap+prefetch")

Clients = Annotated[
    str | None, typer.Option("--clients", metavar="1,2", help="numbers of parallel clients (default: 1, 2, … slots)")
]
Seconds = Annotated[
    float, typer.Option("--seconds", metavar="S", min=0, help="shortest time for each number of clients")
]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", min=1, help="length of each prompt, about")]
ModelId = Annotated[
    str | None, typer.Option("--model", "-m", metavar="ID", help="model to measure (default: the first)")
]


def register(root: typer.Typer) -> None:
    bench = typer.Typer(help="Measure how this machine loads and serves a model.", no_args_is_help=True)
    bench.command("load", epilog="Example: edgellm bench load -m Qwen3.5-4B --apply")(load)
    bench.command("draft", epilog="Example: edgellm bench draft -m Qwen3.5-4B --apply")(draft)
    bench.command("sleep", epilog="Example: edgellm bench sleep -m Qwen3.5-4B --apply")(sleep)
    bench.command("serve", epilog="Example: edgellm bench serve --html report.html")(serve)
    root.add_typer(bench, name="bench")


def load(
    modes: Annotated[str, typer.Option("--modes", metavar="A,B", help="load modes to measure")] = ",".join(MODES),
    cold: Annotated[bool, typer.Option("--cold", help="measure only with the file out of the page cache")] = False,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="starts per mode and cache state")] = 3,
    apply: Annotated[bool, typer.Option("--apply", help="keep the winner: load_mode = auto uses it")] = False,
    profile: Profile = None,
    model: Models = None,
    set: Set = None,
    engine: Engine = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Start the engine on the model in each load mode, with the file in the page cache and without."""
    from edge.bench.load import LoadBench, choice_of, may_change, winner

    folders = _folders_at_rest(state_dir)
    wanted = _words(modes)
    if not wanted or not {*wanted} <= {"auto", *MODES}:
        raise UsageError(f"--modes {modes}: unknown load mode", f"choose of auto, {', '.join(MODES)}")
    plan_for = _planner(folders, "load_mode", profile=profile, model=model, set=set, engine=engine)
    bench = _bench(LoadBench, plan_for, "auto", folders, quiet=as_json)
    rows = bench.measure(wanted, repeat=repeat, cold=True, warm=not cold)
    best = winner(rows, warm=may_change(*next(iter(bench.plans.values()))))
    choice = choice_of(best, *bench.plans[best.mode], rows) if best else None
    kept = _keep(folders, choice, apply=apply)
    lines = _load_lines(rows, best.mode if best else None, choice, applied=apply)
    print_result(as_json, _document(bench, {"rows": rows, "winner": choice}, applied=kept), lines)


def draft(
    ways: Annotated[str, typer.Option("--ways", metavar="A,B", help="ways of drafting to measure")] = "off,ngram,mtp",
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=8, help="tokens of each answer")] = 128,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="starts per way")] = 3,
    apply: Annotated[bool, typer.Option("--apply", help="keep the winner: speculation = auto uses it")] = False,
    profile: Profile = None,
    model: Models = None,
    set: Set = None,
    engine: Engine = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Measure tokens/s without drafts and with each drafting that engine and model offer, on two kinds of text."""
    from edge.bench.draft import WAYS, DraftBench, choice_of, winner

    folders = _folders_at_rest(state_dir)
    wanted = _words(ways)
    if not {*wanted} <= {*WAYS} or "off" not in wanted:
        raise UsageError(f"--ways {ways}: unknown, or without `off`", f"choose of {', '.join(WAYS)}")
    plan_for = _planner(folders, "speculation", profile=profile, model=model, set=set, engine=engine)
    bench = _bench(DraftBench, plan_for, "off", folders, quiet=as_json)
    rows = bench.measure(wanted, repeat=repeat, tokens=tokens)
    best = winner(rows)
    without = next(row for row in rows if row.way == "off")
    choice = choice_of(best, without, *bench.plans[best.way]) if best else None
    kept = _keep(folders, choice, apply=apply)
    lines = _draft_lines(rows, best, applied=apply)
    print_result(as_json, _document(bench, {"rows": rows, "winner": choice}, applied=kept), lines)


def sleep(
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="wakes of each kind")] = 5,
    apply: Annotated[bool, typer.Option("--apply", help="keep the winner: models with ttl_s sleep so")] = False,
    profile: Profile = None,
    model: Models = None,
    set: Set = None,
    engine: Engine = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Time the first token of a model whose engine was ended while idle, and of one whose engine slept by itself."""
    from edge.bench.sleep import SleepBench, choice_of

    folders = _folders_at_rest(state_dir)
    plan_for = _planner(folders, "saved_prompts", profile=profile, model=model, set=set, engine=engine)
    bench = _bench(SleepBench, plan_for, "off", folders, quiet=as_json)
    row = bench.measure(repeat=repeat)
    choice = choice_of(row, *bench.plans["stop"])
    kept = _keep(folders, choice, apply=apply)
    lines = _sleep_lines(row, choice, applied=apply)
    print_result(as_json, _document(bench, {"row": row, "winner": choice}, applied=kept), lines)


def serve(
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write one page with plots")] = None,
    clients: Clients = None,
    seconds: Seconds = 10.0,
    prompt_tokens: PromptTokens = 200,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="tokens of each answer")] = 64,
    model: ModelId = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Measure the running edgellm: first token, tokens/s at 1 … slots clients, energy, drift."""
    from edge.bench.serve import SILENCE_S, ServeBench, document, llama_bench, llama_bench_command, page
    from edge.cli.chat import key_of, named_faults
    from edge.cli.client import Client, find

    client = Client(find(os.environ, state_dir))
    status = client.status()
    name = model or next(iter(status["models"]), "")
    url = next((each for each in status["urls"] if each.startswith("http")), None)
    if name not in status["models"] or url is None:
        raise UnavailableError(f"no model {name} is served over HTTP", "see `edgellm status`")
    slots = int(status["models"][name].get("slots") or 1)
    # Beyond the slots requests queue: more clients measure the queue.
    levels = _levels(clients) if clients else sorted({1, *range(2, slots + 1)})
    bench = ServeBench(
        url, name, key_of(os.environ), lambda: _watts(client), prompt_tokens=prompt_tokens, max_tokens=max_tokens
    )

    async def measured() -> list[LoadLevel]:
        return [await bench.level(count, seconds) for count in levels]

    about = {"engine": status["engine"], "version": status["version"], "max_tokens": max_tokens}
    with named_faults(url, SILENCE_S):
        results = document(name, about, asyncio.run(measured()))
    pid = int(status["models"][name].get("pid") or 0)
    command = llama_bench_command(_cmdline(pid), prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    results["llama_bench"] = llama_bench(command, pid) if command else None
    if html is not None:
        write_report(html, page(results))
    if as_json:
        typer.echo(json.dumps(results))
        return
    print_lines(_serve_lines(results))
    if html is not None:
        typer.echo(f"wrote {html}")


def _levels(listed: str) -> list[int]:
    words = _words(listed)
    if not words or any(not word.isdecimal() or not 0 < len(word) < 5 or int(word) == 0 for word in words):
        raise UsageError(f"--clients {listed}: not numbers of clients", "write it like 1,2,8")
    return [int(word) for word in words]


def _words(listed: str) -> list[str]:
    return [word.strip() for word in listed.split(",") if word.strip()]


def _bench(kind: type[B], plan_for: Callable[[str], Plan], first: str, folders: Folders, *, quiet: bool) -> B:
    """Make a bench of the first model, as planned with `first`. Each step is a line on stderr unless `quiet`."""
    model_id = next(iter(plan_for(first).models))
    step = (lambda _: None) if quiet else lambda text: typer.echo(text, err=True)
    return kind(plan_for, model_id, folders.instance_run / "bench.sock", step)


def _folders_at_rest(state_dir: Path | None) -> Folders:
    """Return the folders of an instance, its run folder made. Raises UnavailableError while it serves."""
    from edge.daemon.lock import held

    folders = folders_of(state_dir)
    # A second copy of the model would be measured under memory pressure, or not fit at all.
    if held(folders.lock):
        raise UnavailableError("an edgellm is running, whose model holds memory", "stop it first: edgellm stop")
    folders.instance_run.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folders


def _planner(folders: Folders, key: str, *, set: list[str] | None, **flags: object) -> Callable[[str], Plan]:
    """Return a function that plans with `key` set to its argument, after the values of `--set`."""
    from edge.config import load as load_config
    from edge.plan.prepare import prepare

    def plan_for(value: str) -> Plan:
        asked = given(set=[*(set or []), f"{key}={value}"], **flags)
        return prepare(load_config(folders, asked, os.environ), folders).plan

    return plan_for


def _keep(folders: Folders, choice: MeasuredChoice | None, *, apply: bool) -> bool:
    """Keep the choice of a measurement, if --apply is given and there is one; return whether it was kept."""
    from edge.plan.choices import choices_path, write_choice

    if not apply or choice is None:
        return False
    write_choice(choices_path(folders, type(choice)), choice)
    return True


def _document(bench: EngineBench, found: dict[str, Any], *, applied: bool) -> dict[str, Any]:
    from msgspec import to_builtins

    return {"schema": 1, "model": bench.model_id, **to_builtins(found), "applied": applied}


def _cmdline(pid: int) -> list[str]:
    """Return the command line of a process; empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _watts(client: Any) -> float | None:
    power = client.telemetry().get("power") or {}
    value = power.get("total_w")
    return float(value) if isinstance(value, int | float) else None


def _load_lines(rows: Sequence[LoadRow], best: str | None, choice: LoadChoice | None, *, applied: bool) -> list[str]:
    import statistics

    def shown(values: list[float]) -> str:
        return f"{statistics.median(values):8.2f} s" if values else f"{'':>10}"

    lines = [f"{'mode':6} {'cold':>10} {'warm':>10}"]
    for row in rows:
        what = row.note or ("soonest ready" if row.mode == best else "")
        if choice is not None and row.mode == choice.cold_mode:
            what = f"sooner while less than {choice.cold_below:.0%} of the file is in the page cache"
        lines.append(f"{row.mode:6} {shown(row.cold_s)} {shown(row.warm_s)}  {what}".rstrip())
    if best is not None:
        lines.append(f"{best} is used for load_mode = auto from now on" if applied else "keep it with --apply")
    return lines


def _sleep_lines(row: SleepRow, choice: SleepChoice | None, *, applied: bool) -> list[str]:
    from edge.units import format_bytes

    if choice is None:
        return [row.note or "nothing was measured"]
    lines = [
        f"ended and started again  {choice.stop_s:8.2f} s to the first token, nothing stays in memory",
        f"the engine's own sleep   {choice.engine_s:8.2f} s, {format_bytes(choice.left_bytes)} stay in memory",
    ]
    what = "the engine sleeps by itself" if choice.mode == "engine" else "the engine ends"
    kept = "from now on" if applied else "if kept with --apply"
    return [*lines, f"after ttl_s idle seconds {what} {kept}; it always ends where prompts are saved"]


def _draft_lines(rows: Sequence[DraftRow], best: DraftRow | None, *, applied: bool) -> list[str]:
    import statistics

    def speed(values: list[float] | None) -> str:
        return f"{statistics.median(values):9.1f}" if values else f"{'':>9}"

    lines = [f"{'drafts':7} {'edit t/s':>9} {'write t/s':>9} {'accepted':>9}"]
    for row in rows:
        accepted = f"{row.accepted / row.drafted:.0%} of {row.drafted}" if row.drafted else ""
        what = row.note or ("fastest" if row is best else "")
        speeds = f"{speed(row.by_prompt.get('edit'))} {speed(row.by_prompt.get('write'))}"
        lines.append(f"{row.way:7} {speeds} {accepted:>9}  {what}".rstrip())
    if best is not None:
        lines.append(f"speculation = auto uses {best.way} from now on" if applied else "keep it with --apply")
    return lines


def _serve_lines(results: dict[str, Any]) -> list[str]:
    head = f"{'clients':>7} {'first token':>12} {'token gap':>10} {'tokens/s':>9} {'each':>7}"
    lines = [f"{head} {'prompt/s':>9} {'tokens/J':>9}"]
    for level in results["levels"]:
        first, gap = level["ttft_s"], level["gap_s"]
        lines.append(
            f"{level['clients']:7} {first['p50'] if first else 0:10.3f} s {(gap['p50'] if gap else 0) * 1e3:7.1f} ms "
            f"{level['tokens_s']:9.1f} {level['tokens_s_each'] or 0:7.1f} {level['prompt_tokens_s'] or 0:9.1f} "
            f"{level['tokens_per_joule'] or '':>9}"
        )
    beside = results["llama_bench"]
    if beside and "note" in beside:
        lines.append(beside["note"])
    elif beside:
        lines.append(
            f"llama-bench, no server and no client: {beside.get('prompt_tokens_s', 0):.1f} prompt/s, "
            f"{beside.get('tokens_s', 0):.1f} tokens/s"
        )
    return lines
