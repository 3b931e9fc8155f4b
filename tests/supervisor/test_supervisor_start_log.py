"""A chat template is text of the model's file, and llama-server prints it: no line of it is a fact or a cause."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.plan.calibration import measure
from edge.supervisor.degraded import EngineFacts, differences
from edge.supervisor.diagnose import Death, Diagnosis, diagnose
from edge.supervisor.placement import Buffers
from edge.supervisor.policy import EngineFault
from edge.supervisor.process import ExitStatus
from edge.supervisor.process_io import TURN_BYTES, read_lines
from edge.supervisor.start import Attempt, LogEvent
from tests.fakes import engine_log
from tests.supervisor.rig import META, PATIENCE_S, PATTERNS, launch_plan, settings
from tests.supervisor.test_supervisor_engine_patterns import LINES
from tests.supervisor.test_supervisor_placement import REAL

PLAN = launch_plan(("x",), 0, settings(n_ctx=4096, n_gpu_layers=41, devices=("CUDA0",)))
# b9430 on an H200, from the last model on. The example of the template stands between EXAMPLE and AFTER.
LOADED = "0.07.024.640 I srv    load_model: initializing, n_slots = 1, n_ctx_slot = 4096, kv_unified = 'false'"
BEFORE = [*REAL.splitlines()[:-1], LOADED]
EXAMPLE = "0.07.030.051 I srv          init: init: chat template, example_format: '<|im_start|>system"
AFTER = [
    "'",
    "0.07.032.212 I srv          init: init: chat template, thinking = 0",
    "0.07.032.235 I srv          init: preserve_reasoning kwarg: not supported by template",
    "0.07.032.313 I srv  llama_server: model loaded",
    "0.07.032.323 I srv  llama_server: listening on http://127.0.0.1:18080",
]
# Lines that a fact, a gate or a mark is read from, with other values than those of the real log.
FACTS = [
    "cmn  common_param:   - CUDA1   : NVIDIA H200 (143155 MiB, 142629 MiB free)",
    "cmn  common_param:   - CPU     : AMD EPYC (24105 MiB, 24105 MiB free)",
    "cmn  common_param: system_info: n_threads = 16 (n_threads_batch = 16) / 16 | CUDA : ARCHS = 500 | NO_VMM = 1",
    "srv    load_model: loading model 'other.gguf'",
    "llama_model_loader: loaded meta data with 22 key-value pairs and 363 tensors from other.gguf",
    "llama_prepare_model_devices: using device CUDA1 (NVIDIA H200) (0000:00:06.0) - 142629 MiB free",
    "  Device 1: NVIDIA H200, compute capability 9.0, VMM: yes",
    "load_tensors: loading model tensors, this can take a while... (load_mode = mmap)",
    "load_tensors: offloaded 0/41 layers to GPU",
    "load_tensors:          CPU model buffer size =  8427.75 MiB",
    "llama_context: constructing llama_context",
    "llama_context: n_ctx                 = 7",
    "llama_kv_cache:        CPU KV buffer size =  9999.00 MiB",
    "llama_kv_cache: size = 9999.00 MiB (     7 cells,  40 layers,  1/1 seqs), K (q4_0): 1.00 MiB, V (q4_0): 1.00 MiB",
    "sched_reserve:        CPU compute buffer size =  9999.00 MiB",
    "sched_reserve: reserve took 26.65 ms, sched copies = 1",
    "clip_ctx: CLIP using CPU backend",
    "srv    load_model: initializing, n_slots = 9, n_ctx_slot = 7, kv_unified = 'false'",
    "srv          init: init: chat template, thinking = 0",
    "srv  llama_server: model loaded",
    "srv  llama_server: listening on http://127.0.0.1:18080",
]
CAUSES = [line for lines in LINES.values() for line in lines]
# The end of the engine's own example, its start, an hour in the future, and text without a prefix.
PREFIXES = ["0.07.031.000 I ", "0.00.000.001 I ", "59.59.999.999 E ", ""]


def start(text: list[str], *, until: str = "answered") -> tuple[Attempt, list[LogEvent]]:
    """Return a start by the real log whose template prints `text`; `until` example, end or answered."""
    attempt = Attempt(PLAN, PATTERNS, 100.0, 8535 << 20)
    attempt.driver_opens("/dev/nvidiactl opens")
    lines = [*BEFORE, EXAMPLE, *text, *(AFTER if until != "example" else [])]
    events = [event for n, line in enumerate(lines) for event in attempt.stderr(line, 108.0 + n / 1000)]
    if until == "answered":
        events += attempt.answered(110.0, 8535 << 20)
    return attempt, events


@given(st.lists(st.tuples(st.sampled_from(PREFIXES), st.sampled_from([*FACTS, *CAUSES])), max_size=30))
def test_a_template_states_no_fact_opens_no_gate_and_moves_no_time(text: list[tuple[str, str]]) -> None:
    honest, wanted = start(["You are a helpful assistant"] * len(text))
    attempt, events = start([prefix + line for prefix, line in text])
    assert attempt.facts == honest.facts
    assert attempt.gates == honest.gates
    assert differences(PLAN, attempt.facts, None) == differences(PLAN, honest.facts, None) == ()
    later = ("loaded", "listening")
    assert {name: at for name, at in attempt.marks.items() if name not in later} == {
        name: at for name, at in honest.marks.items() if name not in later
    }
    assert min(attempt.marks[name] for name in later) >= attempt.marks["slots"]
    assert [event for event in events if event.missing is not None] == []
    assert wanted, "the engine reports that it is loaded"


def test_the_template_is_known_in_each_spelling_of_the_engines() -> None:
    """Builds of 2025 and 2026 name another function, or none, before it."""
    example = "chat template, example_format: '<|im_start|>system"
    assert all(PATTERNS.template_begins(f"{where}: {example}") for where in ("srv  init", "srv  init: init", "init"))
    ends = ("srv  llama_server: listening on http://x", "srv  main: server is listening on http://x")
    assert all(PATTERNS.template_ends(text) for text in (*ends, "main: server is listening on http://x"))
    assert not PATTERNS.template_begins(f"You see init: {example}")


@pytest.mark.parametrize("line", FACTS)
def test_a_template_changes_no_calibration(line: str) -> None:
    """The memory of the next plan is corrected by the buffers that the last start logged."""
    attempt, _ = start([f"0.07.031.000 I {line}"])
    measured = measure("x", attempt.log.loading)
    assert measured == measure("x", start([])[0].log.loading)
    assert measured.weights_bytes > 0 and measured.kv_bytes == 3200 << 20


def test_the_name_of_a_projector_is_no_buffer() -> None:
    name = "0.07.000.000 I clip_model_loader: model name:   CUDA0 model buffer size = 900.00 MiB"
    assert measure("x", [*BEFORE, name]) == measure("x", BEFORE)


# --- causes ----------------------------------------------------------------------------------------------------------

MEMORY = "NvMapMemAllocInternalTagged: 1074810371 error 12"
ENDS = [line.split(" I ", 1)[1] for line in AFTER[1:]]


def death(attempt: Attempt, code: int | None, number: int | None = None) -> Diagnosis:
    exit = ExitStatus(code, number, 7.0)
    return diagnose(Death(exit, list(attempt.tail), causes=attempt.log.causes), PATTERNS)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_template_that_ends_the_engine_is_no_lack_of_memory(cause: str) -> None:
    """Eight of these would take all rungs, and some would end the retries, of a model whose file crashes the engine."""
    forged = [cause, *(f"0.07.031.000 I {end}" for end in ENDS), cause, f"0.07.031.001 E {cause}"]
    attempt, _ = start(forged, until="example")
    found = death(attempt, None, signal.SIGSEGV)
    if "failed to initialize chat template" in cause:
        assert (found.fault, found.failure.kind) == (EngineFault.PERMANENT, "bad_model"), "that is what it looks like"
    else:
        assert (found.fault, found.failure.kind) == (EngineFault.CRASH, "signal_segv")


def test_a_template_that_fails_is_named_whatever_its_error_quotes() -> None:
    attempt, _ = start([f"0.07.031.000 I {ENDS[0]}", MEMORY], until="example")
    attempt.stderr("0.07.031.100 E srv          init: init: chat template parsing error: Unable to generate", 109.0)
    attempt.stderr("Error: Jinja Exception: no", 109.0)
    attempt.stderr(f"0.07.031.100 E {MEMORY}", 109.0)
    found = death(attempt, 1)
    assert (found.fault, found.failure.kind) == (EngineFault.PERMANENT, "bad_model")


@pytest.mark.parametrize("forged", [[], [MEMORY], [f"0.07.031.000 I {ENDS[-1]}", MEMORY]], ids=["none", "text", "end"])
def test_a_fault_of_the_first_completion_is_a_cause(forged: list[str]) -> None:
    """It comes after the template, and before any request of a client."""
    attempt, _ = start(forged)
    assert death(attempt, None, signal.SIGABRT).fault is EngineFault.CRASH
    attempt.stderr("0.07.100.000 E CUDA error: out of memory", 111.0)
    found = death(attempt, None, signal.SIGABRT)
    assert (found.fault, found.failure.kind) == (EngineFault.OOM, "out_of_memory")


def test_a_fault_between_the_load_and_the_template_is_a_cause() -> None:
    """The slots are made there, with a first decode of the drafter."""
    attempt = Attempt(PLAN, PATTERNS, 100.0, META.tensor_bytes)
    for line in [*BEFORE, "0.07.025.000 E CUDA error: out of memory"]:
        attempt.stderr(line, 108.0)
    assert death(attempt, None, signal.SIGABRT).fault is EngineFault.OOM


# --- the models beside the model -------------------------------------------------------------------------------------

DRAFTER = [
    "load_tensors: loading model tensors, this can take a while... (load_mode = mmap)",
    "load_tensors: offloaded 5/5 layers to GPU",
    "load_tensors:        CUDA0 model buffer size =   100.00 MiB",
    "llama_context: constructing llama_context",
    "llama_context: n_ctx                 = 2048",
    "llama_kv_cache:      CUDA0 KV buffer size =    10.00 MiB",
    "llama_kv_cache: size =   10.00 MiB (  2048 cells,   4 layers,  1/1 seqs), K (q8_0): 5.00 MiB, V (q8_0): 5.00 MiB",
    "clip_ctx: CLIP using CUDA0 backend",
]


def test_a_drafter_and_a_projector_add_memory_and_change_no_fact_of_the_model() -> None:
    """They are loaded after the model, by the same functions (server_context_impl::load_model)."""
    attempt = Attempt(PLAN, PATTERNS, 100.0, META.tensor_bytes)
    for line in [*BEFORE[:-1], *(f"0.06.950.000 I {line}" for line in DRAFTER), LOADED]:
        attempt.stderr(line, 108.0)
    facts = attempt.facts
    assert (facts.offloaded, facts.n_ctx, facts.kv_types, facts.load_mode) == ((41, 41), 4096, ("f16", "f16"), "none")
    assert facts.kv_mib == 3210 and facts.buffers.kv == {"CUDA0": 3210} and facts.projector_on == "CUDA0"
    assert facts.buffers.weights == {"CUDA0": 8427.75, "CUDA_Host": 107.42}
    assert differences(PLAN, facts, None) == ()


@pytest.mark.parametrize("place", ["CPU", "CUDA1"])
def test_a_drafter_on_its_own_device_is_no_misplaced_cache(place: str) -> None:
    """Where no GPU of the model has room for it the plan puts it elsewhere, with more cache than a tenth."""
    plan = replace(PLAN, settings=replace(PLAN.settings, draft_device="none" if place == "CPU" else place))
    lines = [line.replace("CUDA0", place).replace("10.00 MiB", "900.00 MiB") for line in DRAFTER[:-1]]
    lines += [f"sched_reserve:      {place} compute buffer size =   300.00 MiB"]
    attempt = Attempt(plan, PATTERNS, 100.0, META.tensor_bytes)
    for line in [*BEFORE[:-1], *(f"0.06.950.000 I {line}" for line in lines), LOADED]:
        attempt.stderr(line, 108.0)
    attempt.answered(108.0)
    assert differences(plan, attempt.facts, None) == ()
    assert attempt.gates.refusals == {} and attempt.facts.buffers.kv == {"CUDA0": 3200}
    same = Attempt(PLAN, PATTERNS, 100.0, META.tensor_bytes)
    for line in [*BEFORE[:-1], *(f"0.06.950.000 I {line}" for line in lines), LOADED]:
        same.stderr(line, 108.0)
    assert differences(PLAN, same.facts, None) != (), "a plan that has no drafter there asks for the reason"


@pytest.mark.parametrize("cause", CAUSES)
def test_the_description_of_a_projector_is_no_missing_device(cause: str) -> None:
    """clip.cpp prints it as it is, line breaks included."""
    attempt = Attempt(PLAN, PATTERNS, 100.0, META.tensor_bytes)
    text = ["0.06.950.000 I clip_model_loader: description:  Reads images", cause, f"0.06.950.000 E {cause}"]
    events = [event for line in [*BEFORE[:-1], *text, LOADED] for event in attempt.stderr(line, 108.0)]
    assert [event for event in events if event.missing is not None] == []


# --- figures and lines that are none ---------------------------------------------------------------------------------

SIZED = (
    "load_tensors:        CUDA0 model buffer size =   {} MiB",
    "llama_kv_cache:        CPU KV buffer size =   {} MiB",
    "llama_kv_cache: size =   {} MiB (  2048 cells,  28 layers, 1/1 seqs), K (f16): 1.0 MiB, V (f16): 1.0 MiB",
    "sched_reserve:      CUDA0 compute buffer size = {} MiB",
    "llama_new_context_with_model: KV self size  =   {} MiB, K (f16): 1 MiB",
    "llama_memory_recurrent: size = {} MiB",
)


@pytest.mark.parametrize("line", SIZED)
@pytest.mark.parametrize("figure", ["1,234.50", "1.2.3", ".", ",", "..."])
def test_a_figure_that_is_none_states_nothing(line: str, figure: str) -> None:
    """A locale that groups digits ended the reading of the log, and with it the engine at its full pipe."""
    attempt = Attempt(launch_plan(("x",), 0, settings()), PATTERNS, 100.0, META.tensor_bytes)
    text = engine_log.prefixed(line.format(figure), 0.1)
    attempt.stderr(text, 100.1)
    assert (attempt.facts.kv_mib, attempt.facts.buffers) == (None, Buffers())
    assert measure("x", [text]) == measure("x", [])


async def test_a_line_that_cannot_be_taken_ends_no_reading() -> None:
    taken: list[str] = []
    faults: list[object] = []

    def take(line: str) -> None:
        if line == "bad":
            raise ValueError(line)
        taken.append(line)

    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    ours, theirs = os.pipe()
    lines = ["first", "x" * 3 * TURN_BYTES, "bad", "y" * 3 * TURN_BYTES, "bad", "last"]
    os.write(theirs, "".join(f"{line}\n" for line in lines).encode())
    os.close(theirs)
    transport, pipe = await read_lines(os.fdopen(ours, "rb", 0), take)
    await asyncio.wait_for(pipe.ended.wait(), PATIENCE_S)
    transport.close()
    assert taken == [line for line in lines if line != "bad"] and len(faults) == 2


@pytest.mark.parametrize("props", [5, "x", [1], True])
def test_a_document_of_props_that_is_none_is_no_answer(props: Any) -> None:
    plan = launch_plan(("x",), 0, settings())
    assert differences(plan, EngineFacts(kv_mib=56.0), props) == ()
