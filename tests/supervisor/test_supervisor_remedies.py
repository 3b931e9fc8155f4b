"""Every cause of a failed start with every remedy: each is tried once, what helps is kept and named, the rest ends."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.engine.engine import Engine, Flag
from edge.plan.plan import ColdStart, EngineOptions, SavedPrompts
from edge.supervisor import variants
from edge.supervisor.diagnose import Death as Exit
from edge.supervisor.diagnose import diagnose
from edge.supervisor.events import EngineReady, Exited, Spawn, StartRequested, Tick, Warmed
from edge.supervisor.policy import EngineFault, Policy, SupervisorOptions
from edge.supervisor.process import ExitStatus
from edge.supervisor.remedies import Remedies
from edge.supervisor.state import SupervisorState, step
from edge.supervisor.status import Failure, State
from edge.units import GIB
from tests.fakes.llama_switches import Death
from tests.supervisor.rig import (
    FAST,
    FILE,
    PATTERNS,
    TABLE,
    fake_engine,
    gpu_settings,
    launch_plan,
    model_plan,
    remedied,
    rigged,
    settings,
)

NAMES = ("--flash-attn", "--load-mode", "--cache-ram", "--cache-type-v", "--ctx-size", "--no-repack")
CUDA = Engine("e", "llama-server", "/e", flags={name: Flag(name, 1) for name in NAMES}, cuda=True)
REMEDIES = Remedies(TABLE, CUDA, FILE, "chat")
# Every remedy can change it.
PLAN = launch_plan(
    ("x",), 0, gpu_settings(flash_attention="on", load_mode="dio", kv_type_v="q8_0", cache_ram_bytes=GIB)
)
CAUSES = [kind for kind in TABLE["causes"] if TABLE["causes"][kind]]
POLICY = Policy(jitter=0)
FAULTS = {
    "killed": EngineFault.KILLED,
    "out_of_memory": EngineFault.OOM,
    "killed_by_oom": EngineFault.OOM,
    "nvmap_refused": EngineFault.NVMAP,
}
PERMANENT = {row.kind for row in PATTERNS.signatures if row.permanent}


def fault_of(kind: str) -> EngineFault:
    return FAULTS.get(kind, EngineFault.PERMANENT if kind in PERMANENT else EngineFault.CRASH)


def play(kind: str, cure: set[str] | None) -> tuple[SupervisorState, list[tuple[str, ...]]]:
    """Start an engine that exits for `kind` unless all of `cure` is applied. Return its last state and all spawns."""
    machine, effects = step(SupervisorState(), StartRequested(), 0.0, POLICY)
    now, spawns = 0.0, []
    for _ in range(100):
        for effect in effects:
            if isinstance(effect, Spawn):
                spawns.append(effect.remedies)
        if machine.state in (State.READY, State.FAILED):
            return machine, spawns
        if machine.state is State.BACKOFF:
            now = machine.deadline or now
            machine, effects = step(machine, Tick(), now, POLICY)
        elif cure is not None and cure <= set(spawns[-1]):
            machine, _ = step(machine, EngineReady(), now, POLICY)
            machine, effects = step(machine, Warmed(), now, POLICY)
        else:
            offered = REMEDIES.for_kind(kind, REMEDIES.apply(PLAN, spawns[-1]))
            event = Exited(fault_of(kind), Failure(kind, "", ""), remedies=offered)
            machine, effects = step(machine, event, now, POLICY)
    raise AssertionError(f"{kind} restarts without end: {spawns}")


@pytest.mark.parametrize(("kind", "remedy"), [(kind, one) for kind in CAUSES for one in TABLE["causes"][kind]])
def test_each_remedy_of_each_cause_is_tried_once_and_kept_if_it_helps(kind: str, remedy: str) -> None:
    machine, spawns = play(kind, {remedy})
    assert machine.state is State.READY
    assert [one.id for one in machine.remedies] == [remedy]
    assert sum(remedy in tried for tried in spawns) == 1
    (named, *_) = REMEDIES.degradations(PLAN, machine.remedies)
    assert kind in named.because and named.wanted != named.got


@pytest.mark.parametrize("kind", [kind for kind in CAUSES if len(TABLE["causes"][kind]) > 1])
def test_what_helps_only_together_is_found(kind: str) -> None:
    machine, spawns = play(kind, set(TABLE["causes"][kind]))
    assert machine.state is State.READY
    assert len(spawns[-1]) == len(TABLE["causes"][kind])


@pytest.mark.parametrize("kind", TABLE["causes"])
def test_a_cause_that_nothing_cures_ends_after_every_remedy(kind: str) -> None:
    machine, spawns = play(kind, None)
    assert machine.state is State.FAILED and machine.failure is not None and machine.failure.kind == kind
    alone = [tried[0] for tried in spawns if len(tried) == 1]
    assert sorted(alone) == sorted(TABLE["causes"][kind]), "each once"
    assert len(spawns) <= 1 + len(alone) + 1 + POLICY.start_tries + len(POLICY.allocation_pauses_s)


def test_every_known_kind_has_its_remedies_or_says_that_there_are_none() -> None:
    """A kind that is not listed gets those of a crash: only kinds that crash may."""
    crashes = {"engine_bug", "cublas", "load_failed", "gpu_dead"}
    fatal = {row.kind for row in PATTERNS.signatures if not row.serves}
    assert fatal - set(TABLE["causes"]) <= crashes
    assert {one for listed in TABLE["causes"].values() for one in listed} == {row["id"] for row in TABLE["remedies"]}


def test_flash_attention_off_makes_a_quantized_v_cache_f16_in_no_more_memory() -> None:
    cured = REMEDIES.apply(PLAN, ["no-flash-attention"])
    chosen = cured.settings
    assert (chosen.flash_attention, chosen.kv_type_v) == ("off", "f16")
    assert chosen.n_ctx < PLAN.settings.n_ctx and chosen.n_ctx % 256 == 0
    assert "--flash-attn off" in " ".join(cured.argv)
    subjects = [item.subject for item in REMEDIES.degradations(PLAN, [("no-flash-attention", "signal_abrt")])]
    assert subjects == ["flash_attention", "n_ctx"]


def test_a_remedy_is_for_starts_with_a_cold_page_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without it would fail again; and load_mode may be what the remedy changes."""
    plan = replace(PLAN, cold=ColdStart("dio", ("cold",), 0.2))
    monkeypatch.setattr(variants, "resident_ratio", lambda _: 0.1)
    each = variants.PlanVariants(model_plan(("x",)), REMEDIES, None)
    assert each.argv_now(plan) == ("cold",)
    cured = REMEDIES.apply(plan, ["no-flash-attention"])
    assert cured.cold is None and each.argv_now(cured) == cured.argv
    monkeypatch.setattr(variants, "resident_ratio", lambda _: 0.9)
    assert each.argv_now(plan) == plan.argv
    over = threading.Event()
    monkeypatch.setattr(variants, "CACHE_LOOK_S", 0.1)
    monkeypatch.setattr(variants, "resident_ratio", lambda _: 0.1 if over.wait() else None)
    assert each.argv_now(plan) == plan.argv, "a disk that hangs does not hold the event loop"
    over.set()


SAVED = SavedPrompts("/p", "of this plan", GIB)


def test_options_of_the_operator_survive_every_remedy() -> None:
    """An adapter, a template and `args` are no part of the settings: the engine ran without them, and served."""
    options = EngineOptions(("--lora", "/l/a.gguf", "--keep", "4"), {"lora_adapters": [["/l/a.gguf", 1.0]]})
    plan = replace(PLAN, options=options, saved_prompts=SAVED)
    for row in TABLE["remedies"]:
        cured = REMEDIES.apply(plan, [row["id"]])
        assert " --lora /l/a.gguf --keep 4" in " ".join(cured.argv), row["id"]
        assert cured.settings != plan.settings or cured.env != plan.env or "--no-repack" in cured.argv
        embedded = Remedies(TABLE, replace(CUDA, kind="embedded", cuda=False), FILE, "chat").apply(plan, [row["id"]])
        assert '"lora_adapters":[["/l/a.gguf",1.0]]' in " ".join(embedded.argv), row["id"]


def test_prompts_of_another_cache_layout_have_another_key() -> None:
    keys = {}
    for id in ("no-flash-attention", "f16-v-cache", "no-prompt-cache", "no-cuda-graphs"):
        saved = REMEDIES.apply(replace(PLAN, saved_prompts=SAVED), [id]).saved_prompts
        assert saved is not None and saved.folder == SAVED.folder
        keys[id] = saved.key
    assert keys["no-prompt-cache"] == keys["no-cuda-graphs"] == SAVED.key
    assert len({SAVED.key, keys["no-flash-attention"], keys["f16-v-cache"]}) == 3


def test_settings_that_conflict_are_made_consistent_in_any_combination() -> None:
    ids = [row["id"] for row in TABLE["remedies"]]
    for first in ids:
        for second in ids:
            chosen = REMEDIES.apply(PLAN, [first, second]).settings
            assert chosen.flash_attention != "off" or chosen.kv_type_v == "f16", (first, second)
            assert chosen.n_ctx <= PLAN.settings.n_ctx


def test_remedies_that_change_nothing_are_not_offered() -> None:
    cpu = launch_plan(("x",), 0, settings(flash_attention="off", load_mode="mmap"))
    assert REMEDIES.for_kind("other", cpu) == ("no-repack",)
    embedded = Remedies(TABLE, replace(CUDA, kind="embedded", cuda=False), FILE, "chat")
    assert embedded.for_kind("other", cpu) == ()
    assert REMEDIES.for_kind("signal_segv", PLAN) == (
        "no-flash-attention",
        "no-cuda-graphs",
        "no-direct-io",
        "no-repack",
    )


def test_both_forms_of_a_flash_attention_crash_lead_to_the_same_remedy() -> None:
    """With the engine's own line it was FAILED at once, although the hint names the cure."""
    silent = diagnose(Exit(ExitStatus(None, signal.SIGABRT, 1.0)), PATTERNS)
    line = "/llama.cpp/ggml/src/ggml-cuda/fattn.cu:274: fatal error"
    told = diagnose(Exit(ExitStatus(None, signal.SIGABRT, 1.0), [line]), PATTERNS)
    for found in (silent, told):
        assert REMEDIES.for_kind(found.failure.kind, PLAN)[0] == "no-flash-attention"


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [["fattn.cu:274: fatal error"], []])
async def test_an_engine_that_crashes_with_flash_attention_serves_without(short_dir: Path, lines: list[str]) -> None:
    chosen = settings(flash_attention="on")
    death = Death("loading", lines, signal=signal.SIGABRT, unless="--flash-attn off")
    engine = fake_engine(short_dir / "fake", death=death)
    argv, callbacks = remedied(engine, chosen)
    async with rigged(short_dir, argv=argv, chosen=chosen, callbacks=callbacks) as rig:
        await rig.ready()
        assert [item.subject for item in rig.supervisor.status().degraded] == ["flash_attention"]
        assert rig.supervisor.plan.settings.flash_attention == "off"


@pytest.mark.parametrize(
    ("changes", "death", "subject"),
    [
        (
            {"flash_attention": "off", "kv_type_v": "q4_0"},
            Death(lines=["quantized V cache requires Flash Attention"], code=1, unless="--cache-type-v f16"),
            "kv_type_v",
        ),
        ({"load_mode": "dio"}, Death(signal=signal.SIGKILL, unless="--load-mode mmap"), "load_mode"),
        ({"load_mode": "none"}, Death(signal=signal.SIGKILL, unless="--load-mode mmap"), "load_mode"),
        ({"load_mode": "dio"}, Death(signal=signal.SIGBUS, unless="--load-mode none"), "load_mode"),
        (
            {"load_mode": "dio"},
            Death(lines=["read error: Invalid argument"], code=1, unless="--load-mode none"),
            "load_mode",
        ),
        ({"flash_attention": "on"}, Death(signal=signal.SIGFPE, unless="--flash-attn off"), "flash_attention"),
        ({"flash_attention": "on"}, Death(code=1, unless="--flash-attn off"), "flash_attention"),
        (
            {"flash_attention": "auto"},
            Death(
                lines=["ggml-cuda/fattn.cu:110: GGML_ASSERT(V->ne[0] == 64) failed"],
                signal=signal.SIGABRT,
                unless="--flash-attn off",
            ),
            "flash_attention",
        ),
        (
            {"flash_attention": "on"},
            Death("request", signal=signal.SIGSEGV, unless="--flash-attn off"),
            "flash_attention",
        ),
        (
            {"cache_ram_bytes": 512 << 20},
            Death(lines=["what():  std::bad_alloc"], signal=signal.SIGABRT, unless="--cache-ram 0"),
            "prompt cache",
        ),
    ],
)
async def test_whatever_one_setting_cures_serves_without_it(
    short_dir: Path, changes: dict[str, object], death: Death, subject: str
) -> None:
    chosen = settings(**changes)
    argv, callbacks = remedied(fake_engine(short_dir / "fake", death=death), chosen)
    terms = SupervisorOptions(policy=FAST)
    async with rigged(short_dir, argv=argv, chosen=chosen, callbacks=callbacks, terms=terms) as rig:
        await rig.ready()
        subjects = [item.subject for item in rig.supervisor.status().degraded]
        assert subject in subjects


async def test_what_nothing_cures_is_failed_in_the_engines_own_words(short_dir: Path) -> None:
    death = Death("loading", ["GGML_ASSERT(something) failed"], signal=signal.SIGABRT)
    async with rigged(short_dir, death=death) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "engine_bug" and "GGML_ASSERT" in failure.evidence
        assert len(rig.pids) == Policy().start_tries
