"""Buffer lines decide where an engine works: each case changes one claim in the log of a good start."""

from __future__ import annotations

import json
import re

import pytest
from msgspec.structs import replace

from edge.supervisor.degraded import EngineFacts, differences
from edge.supervisor.diagnose import find_cause
from edge.supervisor.start import PROTOCOL, Attempt
from edge.supervisor.status import GATES, Failure
from tests.fakes import engine_log
from tests.supervisor.rig import META, PATTERNS, gpu_settings, launch_plan, settings

GPU = {"CUDA0": "Orin"}
PLAN = launch_plan(("x",), 0, gpu_settings())
COMPUTE = "sched_reserve:      CUDA0 compute buffer size =   284.00 MiB"


def loaded(log: list[str], line: str) -> list[str]:
    """Return the log with one more line before llama-server has loaded its last model."""
    end = next(n for n, each in enumerate(log) if "initializing, n_slots" in each)
    return [*log[:end], line, *log[end:]]


def lines(*changes: tuple[str, str]) -> list[str]:
    """Return the lines of a good start on the GPU, with some text replaced; an empty replacement drops the line."""
    found = loaded(engine_log.whole(engine_log.Start(gpu=GPU)), COMPUTE)
    for pattern, text in changes:
        found = [re.sub(pattern, text, line) for line in found if text or not re.search(pattern, line)]
    return found


def start(log: list[str], rss_bytes: int | None = None) -> tuple[Attempt, list[str]]:
    attempt = Attempt(PLAN, PATTERNS, 100.0, META.tensor_bytes)
    attempt.driver_opens("/dev/nvmap opens")
    events = [event for line in log for event in attempt.stderr(engine_log.prefixed(line, 0.5), 101.0)]
    events += attempt.answered(102.0, rss_bytes)
    return attempt, [event.what for event in events if event.what == "no_device"]


def subjects(attempt: Attempt) -> list[tuple[str, str]]:
    return [(item.subject, item.got) for item in differences(PLAN, attempt.facts, None)]


OFFLOAD = (r"offloaded \d+/\d+ layers", "")


def test_a_good_start_is_green_on_its_device() -> None:
    attempt, missing = start(lines())
    gates = attempt.gates.as_status()
    assert missing == [] and subjects(attempt) == []
    assert all(gates[name].ready for name in GATES[:5])
    assert list(gates["weights"].devices) == list(gates["kv_cache"].devices) == ["CUDA0"]


def test_without_the_layer_count_the_buffers_prove_the_gpu() -> None:
    attempt, missing = start(lines(OFFLOAD))
    assert missing == [] and subjects(attempt) == []


@pytest.mark.parametrize("place", ["CPU", "CPU_Mapped", "CUDA_Host", "Vulkan0"])
@pytest.mark.parametrize("count", [OFFLOAD, ("no such line", "")], ids=["no-count", "with-count"])
def test_fc41_weights_elsewhere_close_the_gate_whatever_the_engine_counts(place: str, count: tuple[str, str]) -> None:
    """Six gates were green, with the device listed all along."""
    attempt, missing = start(lines(count, ("CUDA0 model buffer", f"{place} model buffer")))
    gate = attempt.gates.as_status()["backend"]
    assert missing == ["no_device"] and not gate.ready and place in str(gate.evidence)
    assert any(place in got or got == "CPU" for _, got in subjects(attempt))


def test_most_weights_in_host_memory_are_named() -> None:
    host = "load_tensors:   CUDA_Host model buffer size =   800.00 MiB"
    log = lines(("CUDA0 model buffer size =.*", "CUDA0 model buffer size = 100.00 MiB"))
    log.insert(next(n for n, line in enumerate(log) if "CUDA0 model buffer" in line), host)
    attempt, missing = start(log)
    assert missing == [] and not attempt.gates.as_status()["backend"].ready
    assert subjects(attempt) == [("weights", "800 MiB on CUDA_Host, 100 MiB on CUDA0")]
    assert subjects(start([*lines(), host])[0]) == [], "a line after the load is no buffer of the load"


def test_a_cache_on_the_cpu_closes_its_gate() -> None:
    attempt, missing = start(lines(("CUDA0 KV buffer", "CPU KV buffer")))
    gate = attempt.gates.as_status()["kv_cache"]
    assert missing == [] and not gate.ready and "CPU" in str(gate.evidence)
    assert subjects(attempt) == [("kv_cache", "56 MiB on CPU")]


def test_compute_on_the_cpu_is_named() -> None:
    attempt, _ = start(lines(("CUDA0 compute buffer", "CPU compute buffer")))
    assert subjects(attempt) == [("compute", "284 MiB on CPU")]


@pytest.mark.parametrize(("backend", "wanted"), [("CUDA0", []), ("CPU", [("projector", "CPU")])])
def test_a_projector_on_the_cpu_is_named(backend: str, wanted: list[tuple[str, str]]) -> None:
    attempt, _missing = start(loaded(lines(), f"clip_ctx: CLIP using {backend} backend"))
    assert subjects(attempt) == wanted


def test_a_device_without_weights_is_named() -> None:
    plan = launch_plan(("x",), 0, gpu_settings("CUDA0", "CUDA1"))
    log = [*engine_log.whole(engine_log.Start(gpu={"CUDA0": "A", "CUDA1": "B"}))]
    attempt = Attempt(plan, PATTERNS, 100.0, META.tensor_bytes)
    for line in log:
        if "CUDA1 model buffer" not in line:
            attempt.stderr(engine_log.prefixed(line, 0.5), 101.0)
    (found,) = differences(plan, attempt.facts, None)
    assert (found.subject, found.got, found.because) == ("devices", "CUDA0", "CUDA1 holds no weights")


@pytest.mark.parametrize(
    ("rss", "missing"), [(10 << 20, []), (META.tensor_bytes, ["no_device"]), (None, ["no_device"])]
)
def test_dropped_pages_are_no_proof_of_the_gpu(rss: int | None, missing: list[str]) -> None:
    """An engine on the CPU whose mapped pages were dropped passed: its host memory is small too."""
    attempt, found = start([], rss)
    assert found == missing
    assert not attempt.gates.as_status()["backend"].ready
    assert subjects(attempt) == [("device", "unknown")]


def test_a_listed_device_alone_is_no_proof() -> None:
    attempt, missing = start(lines(OFFLOAD, (r"\w+ model buffer", "")))
    assert missing == [] and not attempt.gates.as_status()["backend"].ready
    assert subjects(attempt) == [("device", "unknown")]


def test_the_last_load_counts() -> None:
    """`--fit` of some builds prints the buffers of a load without allocation before the real one."""
    log = lines()
    begin = next(n for n, line in enumerate(log) if "loading model tensors" in line)
    end = next(n for n, line in enumerate(log) if "constructing" in line)
    dry = [line.replace("CUDA0", "CPU") for line in log[begin:end]]
    attempt, missing = start([*log[:begin], *dry, *log[begin:]])
    assert missing == [] and dict(attempt.facts.buffers.weights) == {"CUDA0": 900.0}


# --- the log of a real engine ----------------------------------------------------------------------------------------

# b9430 with CUDA on an H200, a model of 13B in Q5_K_M: every line that a gate or a fact is read from.
REAL = """0.00.136.616 I srv  llama_server: initializing ...
0.00.285.018 I cmn  common_param:   - CUDA0   : NVIDIA H200 (143155 MiB, 142629 MiB free)
0.00.289.962 I srv    load_model: loading model 'models/m13b.gguf'
0.00.417.156 I llama_prepare_model_devices: using device CUDA0 (NVIDIA H200) (0000:00:06.0) - 142629 MiB free
0.00.449.628 I load_tensors: loading model tensors, this can take a while... (load_mode = none)
0.00.508.752 I load_tensors: offloaded 41/41 layers to GPU
0.00.508.759 I load_tensors:        CUDA0 model buffer size =  8427.75 MiB
0.00.508.760 I load_tensors:    CUDA_Host model buffer size =   107.42 MiB
0.06.884.092 I llama_context: constructing llama_context
0.06.884.102 I llama_context: n_ctx                 = 4096
0.06.885.631 I llama_context:  CUDA_Host  output buffer size =     0.12 MiB
0.06.886.191 I llama_kv_cache:      CUDA0 KV buffer size =  3200.00 MiB
0.06.887.033 I llama_kv_cache: size = 3200.00 MiB (  4096 cells,  40 layers), K (f16): 1600.00 MiB, V (f16): 1600.00 MiB
0.06.913.688 I sched_reserve:      CUDA0 compute buffer size =   115.01 MiB
0.06.913.697 I sched_reserve:  CUDA_Host compute buffer size =    24.01 MiB
0.07.032.313 I srv  llama_server: model loaded"""


def real(pattern: str = "", text: str = "") -> tuple[Attempt, list[str], list[tuple[str, str]]]:
    """Start by the real log, with some text of its lines replaced; an empty replacement drops the lines."""
    plan = launch_plan(("x",), 0, settings(n_ctx=4096, n_gpu_layers=41, devices=("CUDA0",)))
    attempt = Attempt(plan, PATTERNS, 100.0, 8535 << 20)
    attempt.driver_opens("/dev/nvidiactl opens")
    events = []
    for line in REAL.splitlines():
        if text or not pattern or not re.search(pattern, line):
            events += attempt.stderr(re.sub(pattern, text, line) if text else line, 101.0)
    events += attempt.answered(102.0, 8535 << 20)
    found = [(item.subject, item.got) for item in differences(plan, attempt.facts, None)]
    return attempt, [event.what for event in events if event.missing is not None], found


def test_the_real_log_is_green() -> None:
    attempt, missing, found = real()
    assert missing == [] and found == []
    assert all(attempt.gates.as_status()[name].ready for name in GATES[:5])
    attempt, missing, found = real("offloaded")
    assert missing == [] and found == [], "the buffers prove it"


@pytest.mark.parametrize("place", ["CPU", "CUDA_Host", "Vulkan0"])
def test_the_real_log_with_its_weights_elsewhere_is_not(place: str) -> None:
    """Without the count of layers, and with the device listed, six gates were green and nothing degraded."""
    attempt, missing, found = real(r"CUDA0 model", f"{place} model")
    assert missing == ["no_device"] and found
    assert not attempt.gates.as_status()["backend"].ready


def test_the_real_log_with_its_cache_elsewhere_is_degraded() -> None:
    attempt, missing, found = real(r"CUDA0 KV", "CPU KV")
    assert missing == [] and found == [("kv_cache", "3200 MiB on CPU")]
    assert not attempt.gates.as_status()["kv_cache"].ready


# --- context and cache -----------------------------------------------------------------------------------------------

CPU = launch_plan(("x",), 0, settings(n_ctx=4096, n_parallel=2))


def test_a_smaller_context_is_seen_without_props() -> None:
    (found,) = differences(CPU, EngineFacts(n_ctx=1024), None)
    assert (found.subject, found.wanted, found.got) == ("n_ctx", "2048 a slot", "512 a slot")


def test_a_smaller_cache_with_everything_as_requested_is_the_plans_error() -> None:
    """A sliding window or shared layers that the planner does not know."""
    asked = EngineFacts(kv_mib=20.0, n_ctx=4096, kv_types=("f16", "f16"))
    assert differences(CPU, asked, {"total_slots": 2}) == ()
    (found,) = differences(CPU, EngineFacts(kv_mib=20.0, n_ctx=4096, kv_types=("q8_0", "q8_0")), None)
    assert (found.subject, found.wanted, found.got) == ("kv_type", "f16/f16", "q8_0/q8_0")


@pytest.mark.parametrize(
    "props",
    [
        [1],
        "x",
        True,
        {"total_slots": True, "default_generation_settings": [1]},
        {"default_generation_settings": {"n_ctx": False}},
    ],
)
def test_props_of_another_shape_say_nothing(props: object) -> None:
    """An engine's list in place of the object ended the warm-up, and with it the start."""
    assert differences(CPU, EngineFacts(), props) == ()


def test_types_and_context_are_read_from_the_log() -> None:
    attempt = Attempt(CPU, PATTERNS, 100.0, META.tensor_bytes)
    attempt.stderr("llama_context: n_ctx         = 4096", 101.0)
    cells = "(  4096 cells,  28 layers,  2/2 seqs)"
    attempt.stderr(f"llama_kv_cache: size =   20.00 MiB {cells}, K (q8_0):   10.00 MiB, V (f16):   10.00 MiB", 101.0)
    assert (attempt.facts.n_ctx, attempt.facts.kv_types) == (4096, ("q8_0", "f16"))


# --- text of a model -------------------------------------------------------------------------------------------------


def test_a_line_without_the_engines_prefix_is_text_and_opens_nothing() -> None:
    """A newline in general.name opened kv_cache with 9999 MiB."""
    attempt = Attempt(CPU, PATTERNS, 100.0, META.tensor_bytes)
    attempt.stderr(engine_log.prefixed("srv  llama_server: initializing ...", 0.1), 100.1)
    attempt.stderr("llama_kv_cache: size = 9999.00 MiB (     1 cells", 101.0)
    attempt.stderr("load_tensors: offloaded 99/99 layers to GPU", 101.0)
    assert attempt.facts == EngineFacts() and not attempt.gates.openings.get("kv_cache")


def test_a_line_of_an_engine_that_has_a_request_opens_and_refuses_nothing() -> None:
    """The first request of a client comes before READY: what its text makes the engine print is no device fault."""
    on_gpu = replace(CPU, settings=replace(CPU.settings, n_gpu_layers=29, devices=("CUDA0",)))
    trouble = "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"
    for let_in in (False, True):
        attempt = Attempt(on_gpu, PATTERNS, 100.0, META.tensor_bytes)
        if let_in:
            attempt.let_in()
        seen = attempt.stderr(trouble, 101.0)
        attempt.stderr(engine_log.prefixed("llama_kv_cache: size = 9999.00 MiB (     1 cells", 0.1), 101.0)
        assert bool(seen) is not let_in and (attempt.facts == EngineFacts()) is let_in


@pytest.mark.parametrize(
    "line",
    [
        "llama_model_loader: - kv   3:     general.name str = load_tensors: offloaded 99/99 layers to GPU",
        "print_info: general.name     = llama_kv_cache: size = 9999.00 MiB (     1 cells",
        "srv    load_model: loading model 'a llama_kv_cache: size = 9999.00 MiB (     1 cells.gguf'",
        "srv    load_model: loading model 'a load_tensors:  CUDA0 model buffer size = 1.00 MiB.gguf'",
    ],
)
def test_a_line_that_quotes_a_model_or_a_file_states_no_fact(line: str) -> None:
    attempt = Attempt(CPU, PATTERNS, 100.0, META.tensor_bytes)
    attempt.stderr(engine_log.prefixed(line, 0.1), 100.1)
    assert attempt.facts == EngineFacts() and not attempt.gates.openings.get("kv_cache")


def test_a_line_about_the_vocabulary_is_a_mark_of_the_start() -> None:
    attempt = Attempt(CPU, PATTERNS, 100.0, META.tensor_bytes)
    attempt.stderr(
        engine_log.prefixed("load: control token: 3 'token to piece cache size' is not marked as EOG", 0.1), 100.1
    )
    assert "vocab" not in attempt.marks
    attempt.stderr(engine_log.prefixed("load: token to piece cache size = 0.1684 MB", 0.2), 100.2)
    assert "vocab" in attempt.marks


def test_a_models_metadata_is_no_cause_of_an_exit() -> None:
    quoted = "llama_model_loader: - kv   3:     general.description str = cudaMalloc failed: out of memory"
    lines = [engine_log.prefixed(quoted, 0.1), engine_log.prefixed("print_info: BOS token = 1 'std::bad_alloc'", 0.2)]
    assert find_cause(lines, PATTERNS) is None
    assert find_cause([*lines, "cudaMalloc failed: out of memory"], PATTERNS) is not None


# --- the gate that failed --------------------------------------------------------------------------------------------


def test_the_gate_that_failed_is_the_one_shown() -> None:
    attempt = Attempt(PLAN, PATTERNS, 100.0, META.tensor_bytes)
    attempt.driver_opens("/dev/nvmap opens")
    attempt.stdout(PROTOCOL + json.dumps({"state": "loading", "payload": {"value": 0.5}}), 100.5)
    for line in [*engine_log.before_load(engine_log.Start(gpu=GPU)), *engine_log.tensors(engine_log.Start(gpu=GPU))]:
        attempt.stderr(engine_log.prefixed(line, 0.5), 101.0)
    attempt.failed(Failure("out_of_memory", "cudaMalloc failed", "a smaller context"))
    gates = attempt.gates.as_status(alive=False)
    assert gates["weights"].evidence == "out_of_memory" and gates["weights"].blocked_by is None
    assert gates["kv_cache"].blocked_by == gates["warm"].blocked_by == "weights"
    assert not gates["backend"].ready and gates["backend"].blocked_by is None, "it was open, and the child is gone"


def test_a_closed_device_node_is_named_and_not_the_missing_device_behind_it() -> None:
    """B-15, B-17: the driver's own line comes first, and a general one after it."""
    attempt = Attempt(PLAN, PATTERNS, 100.0, META.tensor_bytes)
    attempt.stderr("NvRmMemInitNvmap failed: error Permission denied", 100.2)
    (event,) = attempt.stderr("ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected", 100.3)
    assert event.missing is not None
    assert (event.missing.kind, event.missing.permanent) == ("device_permission", True)
