"""Lines and protocol of one start, in every era, become gates, facts and marks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.supervisor.gates import Gates
from edge.supervisor.start import PROTOCOL, Attempt
from edge.supervisor.status import GATES
from edge.units import MIB
from tests.fakes import engine_log
from tests.fakes.engine_log import Start
from tests.supervisor.rig import PATTERNS, gpu_settings, launch_plan
from tests.supervisor.rig import settings as cpu_settings

ORIN = {"CUDA0": "Orin"}
WEIGHTS = 900 * MIB


def attempt(*devices: str, capability: str | None = "8.7", driver: str | None = None) -> Attempt:
    chosen = gpu_settings(*devices) if devices else cpu_settings()
    seen = Attempt(launch_plan(("x",), 0, chosen), PATTERNS, 100.0, WEIGHTS, capability=capability)
    if driver is not None:
        seen.driver_opens(driver)
    return seen


def feed(seen: Attempt, start: Start, *, begin_s: float = 100.0, step_s: float = 0.01) -> list[str]:
    said = []
    for number, line in enumerate(engine_log.whole(start)):
        at = number * step_s
        text = engine_log.prefixed(line, at) if start.era == "new" else line
        said += [sighting.what for sighting in seen.stderr(text, begin_s + at)]
    return said


@pytest.mark.parametrize("era", ["new", "2025", "2023"])
@pytest.mark.parametrize("devices", [(), ("CUDA0",), ("CUDA0", "CUDA1")], ids=["cpu", "gpu", "two"])
def test_every_gate_of_every_era_opens_by_its_own_line(era: str, devices: tuple[str, ...]) -> None:
    seen = attempt(*devices)
    said = feed(seen, Start(era=era, gpu={name: f"GPU {name}" for name in devices}))
    gates = seen.gates.as_status()
    closed = [name for name in GATES[:5] if not gates[name].ready]
    assert closed == []
    assert "loading" in said and ("ready" in said or era == "2023")
    assert "no_device" not in said
    assert not any("no log line shows it" in str(gates[name].evidence) for name in GATES[:5])


def test_the_chain_tells_how_long_each_gate_took() -> None:
    seen = attempt("CUDA0", driver="/dev/nvhost-ctrl-gpu opens")
    feed(seen, Start(gpu=ORIN))
    gates = seen.gates.as_status()
    assert gates["driver"].took_s == 0.0
    assert sum(gate.took_s or 0.0 for gate in gates.values()) == pytest.approx(gates["kv_cache"].since_s - 100.0)  # type: ignore[operator]
    assert (gates["warm"].ready, gates["warm"].blocked_by) == (False, None)


def test_a_closed_gate_names_the_first_that_blocks_it() -> None:
    gates = attempt("CUDA0").gates.as_status()
    assert [gates[name].blocked_by for name in GATES] == [None, *["driver"] * 5]


@pytest.mark.parametrize(
    ("archs", "capability", "evidence"),
    [
        ("870", "8.7", "29/29 layers on the GPU, code for sm_87"),
        ("800,860", "8.7", "29/29 layers on the GPU, JIT from PTX of sm_86"),
        ("750,800,860,890,900", "8.9", "29/29 layers on the GPU, code for sm_89"),
        ("860", "8.9", "29/29 layers on the GPU, code for sm_89"),
        ("1200", "8.7", "29/29 layers on the GPU, no code for sm_87"),
        ("870", None, "29/29 layers on the GPU"),
    ],
)
def test_the_backend_gate_tells_machine_code_from_jit(archs: str, capability: str | None, evidence: str) -> None:
    seen = attempt("CUDA0", capability=capability)
    feed(seen, Start(gpu=ORIN, archs=archs))
    assert seen.gates.as_status()["backend"].evidence == evidence


def test_fc41_a_silent_cpu_fallback_is_told_at_the_offload_line() -> None:
    seen = attempt("CUDA0")
    assert "no_device" in feed(seen, Start(offloaded=0, layers=33))
    assert not seen.gates.as_status()["backend"].ready


def test_a_complaint_about_mlock_is_no_missing_gpu() -> None:
    """FC-82: a note, and the engine goes on."""
    seen = attempt("CUDA0")
    line = "warning: failed to mlock 104857600-byte buffer (after previously locking 0 bytes): Cannot allocate memory"
    assert [sighting.what for sighting in seen.stderr(line, 100.1)] == []


def test_a_note_about_the_gpu_means_nothing_where_none_is_wanted() -> None:
    seen = attempt()
    assert not list(seen.stderr("warning: no usable GPU found, --gpu-layers option will be ignored", 100.1))


def test_the_progress_protocol_never_goes_back() -> None:
    seen = attempt()
    for value in (0.1, 0.5, 0.3, 7.0, "x", None, -(10**400), 10**400):
        seen.stdout(PROTOCOL + json.dumps({"state": "loading", "payload": {"value": value}}), 101.0)
    assert seen.progress == 1.0
    assert [s.what for s in seen.stdout(PROTOCOL + '{"state": "ready"}', 102.0)] == ["ready"]


def test_bytes_read_are_the_progress_of_engines_that_tell_none() -> None:
    seen = attempt()
    seen.bytes_read(WEIGHTS // 4)
    assert seen.progress == 0.25
    seen.bytes_read(WEIGHTS * 5)
    assert seen.progress == 0.99, "only the engine knows when it is done"
    reported = attempt()
    reported.stdout(PROTOCOL + json.dumps({"state": "loading", "payload": {"value": 0.5}}), 101.0)
    reported.bytes_read(WEIGHTS // 10)
    assert reported.progress == 0.5


@pytest.mark.parametrize("payload", ["[1]", '"x"', "7", "null", "{}"])
def test_a_payload_of_another_shape_is_no_progress(payload: str) -> None:
    seen = attempt()
    line = PROTOCOL + '{"state": "loading", "payload": ' + payload + "}"
    assert [sighting.what for sighting in seen.stdout(line, 101.0)] == ["loading"] and seen.progress is None


@pytest.mark.parametrize(
    "text",
    [
        PROTOCOL + "{broken",
        PROTOCOL + "[]",
        PROTOCOL + '{"payload": 1}',
        PROTOCOL + '{"state": "loading", "payload": {"value": 1e400}}',
        "hello",
    ],
)
def test_what_is_no_protocol_is_a_log_line(text: str) -> None:
    seen = attempt()
    assert not list(seen.stdout(text, 101.0))
    assert list(seen.tail) == [text]


def test_brackets_without_end_are_a_log_line() -> None:
    seen = attempt()
    assert not list(seen.stdout(PROTOCOL + "[" * 60_000, 101.0))
    assert len(seen.tail) == 1 and seen.tail[0].startswith(PROTOCOL + "[[[")


def test_lines_that_our_own_polls_cause_are_no_sign_of_life() -> None:
    seen = attempt()
    before = seen.lines
    seen.stderr("srv  log_server_r: request: GET /health 127.0.0.1 503", 101.0)
    seen.stderr("srv  log_server_r: done request: GET /health 127.0.0.1 200", 101.0)
    assert seen.lines == before and len(seen.tail) == 2
    seen.stderr("llama_model_loader: - kv   0: general.architecture", 101.0)
    assert seen.lines == before + 1


def test_lines_read_late_are_dated_by_the_engine() -> None:
    """This process imports for 0.2 s while the child already prints: no gate may look slow for that."""
    seen = attempt()
    lines = [engine_log.prefixed(line, n * 0.01) for n, line in enumerate(engine_log.whole(Start()))]
    for line in lines[:10]:
        seen.stderr(line, 100.5)  # all at once
    for number, line in enumerate(lines[10:], 10):
        seen.stderr(line, 100.0 + max(0.5, number * 0.01))
    assert seen.gates.as_status()["context"].since_s == pytest.approx(100.0 + 0.04, abs=0.35)
    assert all(100.0 <= at <= 101.0 for at in seen.marks.values())


def test_kv_caches_add_up_and_a_decimal_comma_is_a_point() -> None:
    seen = attempt()
    seen.stderr("llama_kv_cache: size =   48.00 MiB (  2048 cells,  24 layers,  1/1 seqs)", 101.0)
    seen.stderr("llama_kv_cache: size =    8.00 MiB (   512 cells,   4 layers,  1/1 seqs)", 101.0)
    assert seen.facts.kv_mib == 56.0
    old = attempt()
    old.stderr("llama_new_context_with_model: KV self size  =   11,00 MiB, K (f16): 5,50 MiB", 101.0)
    assert old.facts.kv_mib == 11.0


def test_a_silent_build_does_not_prove_the_gpu() -> None:
    unknown, on_cpu = attempt("CUDA0"), attempt("CUDA0")
    assert not unknown.answered(103.0, rss_bytes=WEIGHTS // 10)
    assert not unknown.gates.as_status()["backend"].ready
    assert [event.what for event in on_cpu.answered(103.0, rss_bytes=WEIGHTS)] == ["no_device"]
    gates = on_cpu.gates.as_status()
    assert [name for name in GATES if not gates[name].ready] == ["context", "backend", "warm"]
    assert gates["context"].evidence == "no line and no probe shows the GPU in use"


def test_after_it_served_lines_are_kept_and_mean_nothing() -> None:
    seen = attempt("CUDA0")
    seen.warmed(104.0, "a completion came back")
    assert not list(seen.stderr("ggml_cuda_init: failed to initialize CUDA: unknown error", 105.0))
    assert seen.served and seen.gates.as_status()["warm"].ready


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=200) | st.sampled_from(engine_log.whole(Start(gpu=ORIN))), max_size=60))
def test_any_text_is_survived(lines: list[str]) -> None:
    seen = attempt("CUDA0")
    for number, line in enumerate(lines):
        seen.stderr(line, 100.0 + number)
        seen.stdout(line, 100.0 + number)
    gates = seen.gates.as_status()
    assert list(gates) == list(GATES)
    assert all((gate.took_s or 0.0) >= 0.0 for gate in gates.values())
    assert replace(seen.facts) == seen.facts


def test_nothing_of_a_dead_engine_is_ready() -> None:
    """The last start's evidence stays readable; only the driver's gate may be open."""
    gates = Gates(1.0, ("CUDA0",))
    for number, name in enumerate(GATES):
        gates = gates.open(name, 1.0 + number, f"saw {name}", "CUDA0" if name == "context" else None)
    assert all(gate.ready for gate in gates.as_status().values())
    dead = gates.as_status(alive=False)
    assert [name for name, gate in dead.items() if gate.ready] == ["driver"]
    assert {name: gate.evidence for name, gate in dead.items()} == {name: f"saw {name}" for name in GATES}
    assert [gate.blocked_by for gate in dead.values()] == [None, None, *["context"] * 4]


def test_an_engine_sleeps_by_itself_until_it_is_ready_again() -> None:
    """A wake loads the model: until that has ended its memory is not there yet."""
    seen = attempt()
    states = []
    for state in ("loading", "ready", "sleeping", "loading", "ready", "sleeping"):
        seen.stdout(PROTOCOL + json.dumps({"state": state, "payload": {}}), 101.0)
        states.append(seen.asleep)
    assert states == [False, False, True, True, False, True]
