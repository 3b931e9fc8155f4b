"""Pure judgements: differences from the plan, liveness, expected speed, safe mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge.board.board import Board, Cpu
from edge.linux.procfs import ProcessUsage
from edge.plan.plan import DomainBudget, Reason
from edge.supervisor import warmup
from edge.supervisor.degraded import EngineFacts, before_start, differences, grown
from edge.supervisor.engine_connection import DOCUMENT_BYTES
from edge.supervisor.liveness import StallDetector
from edge.supervisor.placement import Buffers
from edge.supervisor.policy import ExpectedSpeed, SupervisorOptions
from edge.supervisor.status import Degraded, Failure
from edge.supervisor.warmup import bytes_per_token, expected_speed
from edge.supervisor.warmup_run import EngineClient, too_slow
from edge.units import GIB
from tests.fakes.upstream.engine import FakeEngine, Line, Received
from tests.supervisor.rig import META, gpu_settings, launch_plan, settings

PLAN = launch_plan(("x",), 0, settings(n_ctx=4096, n_parallel=2))
GPU = launch_plan(("x",), 0, gpu_settings("CUDA0", "CUDA1"))
PROPS = {"total_slots": 2, "default_generation_settings": {"n_ctx": 2048}}
ON_GPU = EngineFacts(offloaded=(29, 29), devices=("CUDA0", "CUDA1"), kv_mib=56.0)


# --- truth -----------------------------------------------------------------------------------------------------------


def test_what_is_as_planned_has_no_differences() -> None:
    assert differences(PLAN, EngineFacts(kv_mib=56.0), PROPS) == ()
    assert differences(GPU, ON_GPU, None) == ()


@pytest.mark.parametrize(
    ("facts", "props", "expected"),
    [
        (EngineFacts(), {"total_slots": 4}, ("n_parallel", "2", "4")),
        (
            EngineFacts(),
            {"total_slots": 2, "default_generation_settings": {"n_ctx": 512}},
            ("n_ctx", "2048 a slot", "512 a slot"),
        ),
        (EngineFacts(kv_mib=28.0), PROPS, ("kv_cache", "56 MiB", "28 MiB")),
        (EngineFacts(load_mode="mmap"), PROPS, ("load_mode", "none", "mmap")),
    ],
)
def test_fc23_a_smaller_one_is_named(facts: EngineFacts, props: dict[str, Any], expected: tuple[str, str, str]) -> None:
    (found,) = differences(launch_plan(("x",), 0, replace(PLAN.settings, load_mode="none")), facts, props)
    assert (found.subject, found.wanted, found.got) == expected and found.because


def test_props_of_another_shape_are_no_difference() -> None:
    assert differences(PLAN, EngineFacts(), {"total_slots": "two", "default_generation_settings": {}}) == ()


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (replace(ON_GPU, offloaded=(20, 29)), [("n_gpu_layers", "29", "20/29")]),
        (replace(ON_GPU, offloaded=(0, 29), cpu_because="no_gpu"), [("n_gpu_layers", "29", "0/29")]),
        (EngineFacts(cpu_because="cuda_init"), [("device", "GPU", "CPU")]),
        (replace(ON_GPU, devices=("CUDA0",)), [("devices", "CUDA0, CUDA1", "CUDA0")]),
        (EngineFacts(devices=("CUDA0", "CUDA1")), [("device", "GPU", "unknown")]),
        (EngineFacts(), [("device", "GPU", "unknown")]),
        (EngineFacts(buffers=Buffers(weights={"CUDA0": 450.0, "CUDA1": 450.0})), []),
    ],
)
def test_fc41_layers_and_devices(facts: EngineFacts, expected: list[tuple[str, str, str]]) -> None:
    assert [(item.subject, item.wanted, item.got) for item in differences(GPU, facts, None)] == expected


def test_a_lower_rung_is_told_with_its_reason() -> None:
    lower = replace(PLAN, rung=2, reasons=(Reason("rung", "2", "the GPU is not there"),))
    (found,) = differences(lower, EngineFacts(), PROPS)
    assert (found.subject, found.got, found.because) == ("rung", "2", "the GPU is not there")


def test_differences_that_are_known_before_the_start() -> None:
    missing = Failure("no_gpu", "", "look at the driver")
    cured = Degraded("flash_attention", "auto", "off", "it failed to start otherwise")
    assert [item.subject for item in before_start(SupervisorOptions(), (cured,), missing)] == [
        "device",
        "flash_attention",
    ]
    assert before_start(SupervisorOptions(), (), None) == ()


# --- movement --------------------------------------------------------------------------------------------------------


def vitals(cpu_s: float = 0.0, called: int = 0, disk: int = 0, anon: int = 0, swap: int = 0) -> ProcessUsage:
    return ProcessUsage(cpu_s, called, disk, anon, swap, anon)


def quiet_after(looks: list[tuple[float, ProcessUsage | None, int]]) -> float:
    stillness = StallDetector(0.0)
    return [stillness.look(at, seen, lines) for at, seen, lines in looks][-1]


@pytest.mark.parametrize(
    ("looks", "quiet_s"),
    [
        ([(1, vitals(), 0), (30, vitals(), 0), (61, vitals(), 0)], 60.0),
        ([(1, vitals(), 0), (60, vitals(), 1)], 0.0),
        ([(1, vitals(), 0), (60, vitals(called=4096), 0)], 0.0),
        ([(1, vitals(), 0), (60, vitals(disk=4096), 0)], 0.0),
        ([(1, vitals(), 0), (2, vitals(0.5), 0)], 0.0),
        ([(1, vitals(), 0), (31, vitals(0.3), 0), (61, vitals(0.6), 0)], 60.0),
        ([(1, None, 0), (61, None, 0)], 61.0),
    ],
    ids=["nothing", "a line", "read(2)", "a page fault", "CPU time", "only our own polls", "gone from /proc"],
)
def test_what_counts_as_movement(looks: list[tuple[float, ProcessUsage | None, int]], quiet_s: float) -> None:
    assert quiet_after(looks) == quiet_s


@pytest.mark.parametrize("every_s", [0.1, 1.0, 10.0])
def test_it_does_not_matter_how_often_one_looks(every_s: float) -> None:
    """Polls that cost half a percent of a core never look like work."""
    stillness, now = StallDetector(0.0), 0.0
    while now < 60.0:
        now += every_s
        quiet_s = stillness.look(now, vitals(round(now * 0.005, 2)), 0)
    assert quiet_s >= 60.0 - every_s


def test_who_waits_for_nothing_is_excused() -> None:
    stillness = StallDetector(0.0)
    assert stillness.look(3600.0, vitals(), 0, excused=True) == 0.0
    assert stillness.look(3601.0, vitals(), 0) == 1.0


# --- memory and speed ------------------------------------------------------------------------------------------------


def test_fc20_memory_that_grows_past_the_plan_is_degraded() -> None:
    plan = replace(PLAN, budget={"host": DomainBudget(8 * GIB, 0, weights_bytes=GIB)})
    assert grown(plan, vitals(anon=GIB)) == ()
    assert [item.subject for item in grown(plan, vitals(anon=2 * GIB))] == ["memory"]
    assert [item.subject for item in grown(plan, vitals(anon=GIB // 2, swap=GIB // 2))] == ["swap"]
    assert grown(plan, None) == ()


def board(bandwidth: float | None) -> Board:
    return Board("b", "b", "Orin", "8.7", 8 * GIB, True, Cpu("c", 6, 6), bandwidth_bytes_s=bandwidth)


def test_the_speed_floor_comes_from_the_memory_and_later_from_the_last_good_start() -> None:
    by_table = expected_speed(board(90e9), META, GPU, None)
    assert by_table is not None and by_table.tokens_s == pytest.approx(90e9 / META.tensor_bytes)
    assert expected_speed(board(90e9), META, PLAN, None) is None, "the figure is the GPU's"
    assert expected_speed(board(None), META, GPU, None) is None
    by_history = expected_speed(board(90e9), META, GPU, 12.0)
    assert by_history is not None and by_history.tokens_s == 12.0 and "last good start" in by_history.source


def test_a_mixture_of_experts_reads_its_share() -> None:
    moe = replace(META, n_expert=64, extra={"llama.expert_used_count": 8})
    assert bytes_per_token(moe) == META.tensor_bytes * (8 / 64 + 0.25)
    assert bytes_per_token(META) == META.tensor_bytes


def test_a_quarter_of_the_pace_is_slow() -> None:
    expected = ExpectedSpeed(100.0, "what it should")
    assert too_slow(25.0, expected) == () == too_slow(1.0, None)
    (found,) = too_slow(24.9, expected)
    assert (found.subject, found.wanted, found.got) == ("speed", "at least 25.0 tokens/s", "24.9 tokens/s")


# --- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "template", "paths"),
    [
        ("chat", True, ["/completion", "/v1/chat/completions"]),
        ("chat", False, ["/completion"]),
        ("embedding", True, ["/v1/embeddings"]),
        ("rerank", True, ["/v1/rerank"]),
    ],
)
def test_the_first_request_of_each_role(role: str, template: bool, paths: list[str]) -> None:
    assert [request.path for request in warmup.first(role, template)] == paths


def test_the_idle_set_fills_a_batch_every_slot_and_the_system_prompt_last() -> None:
    chosen = settings(n_ctx=4096, n_parallel=4, n_ubatch=512)
    asked = list(warmup.idle(chosen, (1, 128, 9000), "You are kind."))
    assert [(request.name, request.copies) for request in asked] == [
        ("speed", 1),
        ("a prompt of 128 tokens", 1),
        ("a prompt of 513 tokens", 1),
        ("all slots", 4),
        ("the system prompt", 1),
    ]
    assert not list(warmup.idle(settings(role="embedding"), (), ""))
    assert [request.name for request in warmup.idle(settings(n_ctx=256), (), "")] == ["speed"], "a prompt must fit"


@pytest.mark.parametrize(
    ("path", "code", "answer", "real"),
    [
        ("/completion", 200, {"content": "x"}, True),
        ("/completion", 200, {"content": "", "tokens_predicted": 1}, True),
        ("/completion", 200, {"content": ""}, False),
        ("/completion", 503, {"content": "x"}, False),
        ("/completion", 200, None, False),
        ("/v1/chat/completions", 200, {"usage": {"completion_tokens": 1}}, True),
        ("/v1/chat/completions", 200, {"choices": []}, False),
        ("/v1/embeddings", 200, {"data": [1]}, True),
        ("/v1/rerank", 200, {"results": []}, False),
        ("/completion", 200, {"content": "", "tokens_predicted": None}, False),
        ("/completion", 200, {"content": "x", "tokens_predicted": "many"}, True),
        ("/v1/chat/completions", 200, {"usage": None}, False),
        ("/v1/chat/completions", 200, {"usage": [1]}, False),
    ],
)
def test_a_200_is_not_enough(path: str, code: int, answer: Any, real: bool) -> None:
    assert warmup.answered(warmup.WarmupRequest(path, {}), code, answer) == real


@pytest.mark.parametrize("value", [None, "5", True, [], 0, -1, 1e6, 10**400])
def test_a_speed_that_is_none_is_no_measure(value: Any) -> None:
    """10**400 ended the engine as a bug, and llama-server's million for no token was the baseline of later starts."""
    assert warmup.timing({"timings": {"predicted_per_second": value}}, "predicted_per_second") is None
    assert warmup.timing({"timings": value}, "predicted_per_second") is None
    assert warmup.timing({"timings": {"predicted_per_second": 41.5}}, "predicted_per_second") == 41.5


async def test_a_document_of_any_size_is_read_as_far_as_it_is_one(short_dir: Path) -> None:
    """/props holds the chat template of a model's file: one of 100 MiB took 350 MiB of this process."""
    size = 0

    async def script(line: Line, request: Received) -> None:
        await line.json({"chat_template": "t" * size})

    engine = FakeEngine(short_dir / "e.sock", script)
    await engine.start()
    client = EngineClient(short_dir / "e.sock")
    assert await client.get("/props") == {"chat_template": ""}
    size = DOCUMENT_BYTES
    assert await client.get("/props") is None
    await engine.stop()
