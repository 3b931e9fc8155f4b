"""Layers on other boards in the log of a start, the ends of such an engine, and the plan without them."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.config.devices import RpcAddress, rpc_address
from edge.engine.engine import Engine
from edge.errors import EngineMissingError
from edge.supervisor.degraded import before_start, differences
from edge.supervisor.diagnose import Death, diagnose
from edge.supervisor.events import DeviceBack, Exited, Kill, Spawn, Terminate
from edge.supervisor.policy import EngineFault, Policy, SupervisorOptions
from edge.supervisor.process import ExitStatus
from edge.supervisor.rpc_server import RpcRequest, command, program_of
from edge.supervisor.start import Attempt
from edge.supervisor.state import SupervisorState, step
from edge.supervisor.status import GATES, Failure, State
from edge.supervisor.variants import PlanVariants
from tests.fakes import engine_log
from tests.supervisor.rig import META, PATTERNS, TABLE, gpu_settings, launch_plan, model_plan

ENDPOINT = "10.0.0.2:50052"
SETTINGS = gpu_settings("RPC0", "CUDA0", rpc=(ENDPOINT,), split_mode="layer", tensor_split=(20.0, 9.0))
PLAN = launch_plan(("x",), 0, SETTINGS)


def lines(*dropped: str) -> list[str]:
    """A start on CUDA0 and on the server's device, with llama.cpp's buffer names of RPC."""
    found = engine_log.whole(engine_log.Start(gpu={"RPC0": ENDPOINT, "CUDA0": "Orin"}))
    named = [re.sub(r"RPC0( (?:model|KV|RS|compute) buffer)", rf"RPC0[{ENDPOINT}]\1", line) for line in found]
    return [line for line in named if not any(re.search(pattern, line) for pattern in dropped)]


def started(log: list[str]) -> Attempt:
    attempt = Attempt(PLAN, PATTERNS, 100.0, META.tensor_bytes)
    attempt.driver_opens("/dev/nvmap opens")
    for line in log:
        attempt.stderr(engine_log.prefixed(line, 0.5), 101.0)
    attempt.answered(102.0, None)
    return attempt


def test_each_remote_device_has_its_own_gate() -> None:
    attempt = started(lines())
    gates = attempt.gates.as_status()
    assert [name for name in GATES[:5] if not gates[name].ready] == []
    assert set(gates["context"].devices) == {"RPC0", "CUDA0"} == set(gates["weights"].devices)
    assert ENDPOINT in str(gates["context"].devices["RPC0"].evidence)
    assert "RPC0" in attempt.facts.buffers.weights, "the address is no part of the device's name"
    assert differences(PLAN, attempt.facts, None) == ()


def test_a_remote_device_without_weights_keeps_its_gate_shut() -> None:
    attempt = started(lines(r"RPC0\[.*model buffer"))
    gates = attempt.gates.as_status()
    assert not gates["weights"].ready and not gates["weights"].devices["RPC0"].ready
    assert gates["weights"].devices["CUDA0"].ready
    found = differences(PLAN, attempt.facts, None)
    assert [(each.subject, each.got) for each in found] == [("devices", "CUDA0")]


ABORTS = {
    "remote_lost": "/s/ggml/src/ggml-rpc/ggml-rpc.cpp:569: Remote RPC server crashed or returned malformed response",
    "remote_missing": f"/s/ggml/src/ggml-rpc/ggml-rpc.cpp:547: Failed to connect to {ENDPOINT}",
}


@pytest.mark.parametrize("kind", ABORTS)
def test_a_start_that_ends_for_a_server_waits_for_it(kind: str) -> None:
    found = diagnose(Death(ExitStatus(None, signal.SIGABRT, 1.0), ["a line", ABORTS[kind]]), PATTERNS)
    assert (found.fault, found.failure.kind) == (EngineFault.DEVICE, kind)
    assert "edgellm rpc serve" in found.failure.hint


def test_a_server_that_is_lost_while_it_serves_is_named_and_restarted() -> None:
    log = ["slot 0", ABORTS["remote_lost"], *["#1 backtrace"] * 40]
    found = diagnose(Death(ExitStatus(None, signal.SIGABRT, 99.0), log, served=True), PATTERNS)
    assert (found.fault, found.failure.kind) == (EngineFault.CRASH, "remote_lost")


def test_text_of_a_client_is_no_evidence_of_a_lost_server() -> None:
    found = diagnose(Death(ExitStatus(None, signal.SIGSEGV, 99.0), [ABORTS["remote_lost"]], served=True), PATTERNS)
    assert found.failure.kind == "signal_segv"


def test_another_protocol_is_permanent() -> None:
    log = ["RPC server version mismatch: 3.6.1", f"ggml-rpc.cpp:550: RPC handshake failed for {ENDPOINT}"]
    found = diagnose(Death(ExitStatus(None, signal.SIGABRT, 1.0), log), PATTERNS)
    assert (found.fault, found.failure.kind) == (EngineFault.PERMANENT, "remote_version")


LOST = Failure("remote_missing", "x", "y")


async def test_the_plan_without_the_server_lies_above_the_ladder() -> None:
    model = model_plan(("x",), 2, SETTINGS)
    smaller = launch_plan(("y",), 0, replace(SETTINGS, rpc=(), devices=("CUDA0",)))
    variants = PlanVariants(model, None, lambda: smaller)
    assert variants.cpu_rung == 2
    planned = asyncio.Event()
    variants.plan_on_cpu(2, planned.set)
    await planned.wait()
    alone = variants.at(2)
    assert alone.settings.rpc == () and any(reason.value == "this board alone" for reason in alone.reasons)
    assert PlanVariants(model, None, None).cpu_rung is None, "absent = wait"
    (degraded,) = before_start(SupervisorOptions(), (), LOST)
    assert (degraded.subject, degraded.got) == ("rpc", "this board alone")


def test_without_it_after_the_last_try_and_back_when_it_answers() -> None:
    policy = Policy(cpu_rung=1, device_attempts=1, jitter=0)
    gone = Exited(EngineFault.DEVICE, LOST)
    m = SupervisorState(state=State.STARTING, alive=True)
    m, _ = step(m, gone, 1.0, policy)
    assert m.state is State.BACKOFF
    m = replace(m, state=State.STARTING, alive=True, deadline=None)
    m, effects = step(m, gone, 5.0, policy)
    assert effects == (Spawn(1),) and m.rung == 1
    m = replace(m, state=State.READY, ready_since=6.0)
    m, _ = step(m, DeviceBack(), 9.0, policy)
    assert m.state is State.DRAINING


def test_a_server_that_is_waited_for_is_tried_without_end() -> None:
    policy = Policy(device_attempts=1_000_000, jitter=0)
    m = SupervisorState(state=State.STARTING, alive=True)
    for _ in range(200):
        m, _ = step(m, Exited(EngineFault.DEVICE, LOST), 1.0, policy)
        assert m.state is State.BACKOFF and m.deadline is not None and m.deadline <= 1.0 + max(policy.backoff_s)
        m = replace(m, state=State.STARTING, alive=True, deadline=None)
    assert not {Kill, Terminate} & set(map(type, step(m, Exited(EngineFault.DEVICE, LOST), 1.0, policy)[1]))


# --- the other side ---------------------------------------------------------------------------------------------------


def test_the_command_line_of_the_server() -> None:
    request = RpcRequest(Path("/e/ggml-rpc-server"), rpc_address("10.0.0.2:50052", "eth1"), {})
    assert command(request) == ("/e/ggml-rpc-server", "--host", "10.0.0.2", "--port", "50052")
    full = replace(request, devices=("CUDA0", "CUDA1"), threads=4, cache_bytes=1 << 30)
    assert command(full)[5:] == ("--device", "CUDA0,CUDA1", "--threads", "4", "--cache")
    assert str(RpcAddress("127.0.0.1", 1)) == "127.0.0.1:1"


def test_an_engine_without_its_server_says_how_to_get_one() -> None:
    with pytest.raises(EngineMissingError, match="built without its rpc-server"):
        program_of(Engine("plain", "llama-server", "/nowhere/llama-server"))
    with pytest.raises(EngineMissingError, match="embedded engine has no rpc-server") as refused:
        program_of(Engine("embedded", "embedded", "/usr/bin/python3"))
    assert "--rpc" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("line", "device", "name"),
    [
        ("  CUDA0: Orin (7620 MiB, 6012 MiB free)", "CUDA0", "Orin"),
        ("  CPU: AMD EPYC-Milan (TM) Processor (24077 MiB, 24077 MiB free)", "CPU", "AMD EPYC-Milan (TM) Processor"),
    ],
)
def test_the_servers_device_list(line: str, device: str, name: str) -> None:
    match = re.match(TABLE["rpc"]["device"], line)
    assert match is not None and (match["device"], match["name"]) == (device, name)
    assert re.match(TABLE["rpc"]["device"], "  transport      : TCP") is None
