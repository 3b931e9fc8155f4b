"""Life is bytes and work: a slow engine that moves is left alone, and one that hangs three times has failed."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.linux.procfs import ProcessUsage
from edge.supervisor import liveness, warmup_run
from edge.supervisor.liveness import BUSY_LIMITS, StallDetector, busy_excuses, slots_work
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.start import Attempt
from edge.supervisor.status import State
from edge.supervisor.supervisor import SupervisorCallbacks
from tests.supervisor.rig import FAST, PATTERNS, launch_plan, rigged, settings
from tests.supervisor.test_supervisor_session import script

HASTY = SupervisorOptions(policy=replace(FAST, stall_s=1.0, wedge_s=1.0, term_s=0.3, idle_before_s=60.0))


async def test_dots_without_a_line_end_are_life(short_dir: Path) -> None:
    """llama.cpp prints one dot for each percent of the tensors, and the line end after the last."""
    async with rigged(short_dir, terms=HASTY, dots=15, steps=1) as rig:
        await rig.ready()
        assert len(rig.pids) == 1


@pytest.mark.parametrize(
    "text", [r"\r50%", r"\0", r"\377", r"\033[2K"], ids=["progress bar", "nul", "no utf-8", "escape"]
)
async def test_any_byte_without_a_line_end_is_life(short_dir: Path, text: str) -> None:
    # One process: the children of a shell's loop would be life by their own usage.
    writes = f"import os, time\nfor _ in range(20): os.write(2, b'{text}'); time.sleep(0.1)"
    body = f'\'{sys.executable}\' -S -c "{writes}"\nexec "$@"\n'
    async with rigged(short_dir, argv=script(short_dir, body), terms=HASTY) as rig:
        await rig.ready()
        assert len(rig.pids) == 1 and not rig.kinds


async def test_a_child_that_reads_slowly_and_says_nothing_is_alive(short_dir: Path) -> None:
    reads = "import time\nfile = open('/dev/zero', 'rb', 0)\nfor _ in range(20): file.read(1 << 20); time.sleep(0.1)"
    body = f'"{sys.executable}" -S -c "{reads}"\nexec "$@"\n'
    async with rigged(short_dir, argv=script(short_dir, body), terms=HASTY) as rig:
        await rig.ready()
        assert len(rig.pids) == 1 and not rig.kinds


@pytest.mark.parametrize(
    "body",
    ["sleep 100\n", "trap '' TERM INT HUP\nwhile :; do sleep 100; done\n", "kill -STOP $$\n"],
    ids=["asleep", "deaf", "stopped"],
)
async def test_what_stands_still_is_told_as_a_hang_in_every_form(short_dir: Path, body: str) -> None:
    async with rigged(short_dir, argv=script(short_dir, body), terms=HASTY) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert rig.kinds == ["stalled"]


async def test_a_load_that_hangs_three_times_is_failed_as_a_hang(short_dir: Path) -> None:
    async with rigged(short_dir, terms=HASTY, stall_at=0.5) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "stalled"
        assert len(rig.pids) == 3


async def test_an_answer_that_takes_no_cpu_time_is_left_alone_while_its_slot_counts(short_dir: Path) -> None:
    """All work is done by the GPU: 1.9 % of a core, and no byte before the answer is complete."""
    async with rigged(short_dir, terms=HASTY, slow_s=2.0, decodes=True) as rig:
        await rig.ready()
        assert (await rig.complete())[0] == 200
        assert len(rig.pids) == 1


async def test_a_slot_that_does_not_count_is_a_hang(short_dir: Path) -> None:
    async with rigged(short_dir, terms=HASTY, slow_s=30.0) as rig:
        await rig.ready()
        request = asyncio.create_task(rig.complete())
        await rig.until(lambda: len(rig.pids) == 2)
        assert rig.kinds == ["wedged"]
        await asyncio.gather(request, return_exceptions=True)


async def test_the_gpus_load_is_life_too(short_dir: Path) -> None:
    callbacks = SupervisorCallbacks(gpu_load=lambda: 0.97)
    async with rigged(short_dir, terms=HASTY, callbacks=callbacks, slow_s=2.0) as rig:
        await rig.ready()
        assert (await rig.complete())[0] == 200
        assert len(rig.pids) == 1


def test_a_gpu_that_is_busy_for_too_long_hangs_in_a_kernel() -> None:
    assert busy_excuses(0.97, 70.0, 60.0)
    assert not busy_excuses(0.97, 60.0 * BUSY_LIMITS, 60.0)
    assert not busy_excuses(0.01, 70.0, 60.0) and not busy_excuses(None, 70.0, 60.0)


@pytest.mark.parametrize("document", [None, {"error": "x"}, "x", 3])
def test_slots_of_another_shape_say_nothing(document: object) -> None:
    assert slots_work(document) is None


def test_slots_show_work_by_their_counters_only() -> None:
    idle = {"id": 0, "is_processing": False, "n_past": 3}
    slot = {"id": 0, "is_processing": True, "n_past": 3, "speed": 1.0}
    assert slots_work([idle]) == slots_work([]) == "[]"
    assert slots_work([slot]) == slots_work([slot | {"speed": 2.0}]) != slots_work([slot | {"n_past": 4}])


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 501])
async def test_a_completion_that_is_refused_fails_at_once(short_dir: Path, status: int) -> None:
    async with rigged(short_dir, terms=HASTY, refuse_warm_up=status) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "warm_up_failed"
        assert "does not support completions" in failure.evidence
        assert len(rig.pids) == 1


async def test_an_engine_that_is_unavailable_without_end_is_failed(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-31 without an end: /health answers 200, each completion 503, and each request leaves a line in the log."""
    monkeypatch.setattr(warmup_run, "UNAVAILABLE_MOST_S", 0.3)
    async with rigged(short_dir, refuse_warm_up=503, chatter=True) as rig:
        assert await rig.settle(State.READY, State.FAILED) is State.FAILED
        assert rig.kinds == ["warm_up_failed"] and len(rig.pids) == 3


# --- a start that computes without end -------------------------------------------------------------------------------

LOADED = "srv    load_model: initializing, n_slots = 1, n_ctx_slot = 2048"
TEMPLATES = {
    "loops": "while True: pass",
    "grows": "import time; kept = []\nfor _ in range(400): kept.append(b'x' * (4 << 20)); time.sleep(0.05)\n"
    "while True: pass",
}


@pytest.mark.parametrize("code", TEMPLATES.values(), ids=TEMPLATES)
async def test_a_chat_template_without_an_end_is_a_failure_with_a_name(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """CPU time was life: two nested loops kept a model LOADING without limit, a text that doubles took all memory."""
    monkeypatch.setattr(liveness, "TEMPLATE_BYTES", 64 << 20)
    monkeypatch.setattr(liveness, "TEMPLATE_S", 1.0 if "kept" not in code else 60.0)
    (short_dir / "template.py").write_text(f"import sys; print({LOADED!r}, file=sys.stderr, flush=True)\n{code}\n")
    terms = SupervisorOptions(policy=replace(FAST, stall_s=60.0))
    argv = (sys.executable, "-S", "-E", str(short_dir / "template.py"))
    async with rigged(short_dir, argv=argv, terms=terms) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert rig.kinds == ["template_endless"] and rig.supervisor.restarts == 2
        failure = rig.supervisor.status().failure
        assert failure is not None and "probably its chat template" in failure.evidence
        assert rig.supervisor.status().rung == 0


def usage(cpu_s: float, read: int = 0, anon: int = 0) -> ProcessUsage:
    return ProcessUsage(cpu_s, read, 0, anon, 0, anon)


def test_what_only_computes_has_an_end_and_what_reads_has_none() -> None:
    computes, reads, drips = StallDetector(0.0), StallDetector(0.0), StallDetector(0.0)
    for now in range(1, 3700):
        for each, read in ((computes, 0), (reads, now << 20), (drips, now)):
            assert each.look(now, usage(now, read), 0) == 0.0
        assert reads.endless(now, usage(now, now << 20), loaded=False) is None
    for each in (computes, drips):
        failure = each.endless(3700.0, usage(3700), loaded=False)
        assert failure is not None and failure.kind == "stalled"


def test_the_context_of_a_drafter_is_no_template() -> None:
    """Builds of 2025 allocate it behind the line that ends the load: a KV cache of some GiB on a CPU."""
    for drafts in (False, True):
        stalls = StallDetector(0.0)
        stalls.look(1.0, usage(1), 0)
        assert stalls.endless(1.0, usage(1), loaded=True, drafts=drafts) is None
        failure = stalls.endless(2.0, usage(2, anon=2 * liveness.TEMPLATE_BYTES), loaded=True, drafts=drafts)
        assert (failure is None) is drafts
    commands = (("--model-draft", "/d.gguf"), ("-md", "d"), ("--spec-type", "mtp"), ('{"speculative.types":"x"}',))
    plain = ((), ("--pooling", "rank"), ('{"pooling_type":"unspecified"}',))
    for drafts, named in [(True, each) for each in commands] + [(False, each) for each in plain]:
        assert Attempt(launch_plan(("x", *named), 0, settings()), PATTERNS, 0.0, 1).drafts is drafts


# --- a supervisor that stood still ------------------------------------------------------------------------------------


def test_the_time_that_this_process_stood_still_is_no_silence_of_the_engine() -> None:
    stalls = StallDetector(0.0, apart_s=3.0)
    assert stalls.look(1.0, usage(0), 0) == 0.0
    assert stalls.look(2.0, usage(0), 0) == 1.0
    assert stalls.look(602.0, usage(0), 0) == 1.0
    assert stalls.look(603.0, usage(0), 0) == 2.0
    assert stalls.endless(603.0, usage(0), loaded=True) is None


async def test_a_supervisor_that_was_stopped_ends_no_engine(short_dir: Path) -> None:
    """SIGSTOP, Ctrl-Z, a paused container: the answer was there, and the engine was killed as one that hangs."""
    async with rigged(short_dir, terms=HASTY, slow_s=0.3) as rig:
        await rig.ready()
        before = len(rig.requests())
        request = asyncio.create_task(rig.complete())
        await rig.until(lambda: len(rig.requests()) > before)
        time.sleep(4)  # noqa: ASYNC251  (nothing of this process runs, as after SIGSTOP)
        assert (await request)[0] == 200
        await asyncio.sleep(3 * HASTY.policy.look_s)
        assert not rig.kinds and len(rig.pids) == 1
