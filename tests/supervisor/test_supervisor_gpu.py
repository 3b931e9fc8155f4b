"""A GPU that is late, hidden, half used or one of several, with real processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.errors import DoesNotFitError
from edge.plan.plan import Ladder, LaunchPlan
from edge.supervisor import variants, watch
from edge.supervisor.events import DeviceBack
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.status import State
from edge.supervisor.supervisor import SupervisorCallbacks
from tests.fakes.llama_switches import Death, argv
from tests.supervisor.rig import FAST, PATIENCE_S, gpu_settings, launch_plan, model_plan, rigged, settings

ORIN = {"CUDA0": "Orin"}
NOT_YET = {
    "gpu": {},
    "stray": [
        "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected",
        "warning: no usable GPU found, --gpu-layers option will be ignored",
    ],
}
TERMS = SupervisorOptions(policy=FAST, capability="8.7")


async def test_six_gates_on_a_gpu(short_dir: Path) -> None:
    callbacks = SupervisorCallbacks(driver=lambda: "/dev/nvhost-ctrl-gpu opens")
    async with rigged(short_dir, chosen=gpu_settings(), terms=TERMS, callbacks=callbacks, gpu=ORIN) as rig:
        await rig.ready()
        status = rig.supervisor.status()
        assert status.degraded == () and all(gate.ready for gate in status.gates.values())
        evidence = {name: gate.evidence for name, gate in status.gates.items()}
        assert evidence["driver"] == "/dev/nvhost-ctrl-gpu opens"
        assert evidence["context"] == "CUDA0: Orin"
        assert evidence["backend"] == "29/29 layers on the GPU, code for sm_87"


async def test_a_device_node_whose_open_hangs_stops_no_loop_and_no_start(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate says what hangs; the engine's own line opens it later."""
    monkeypatch.setattr(watch, "DRIVER_S", 0.05)
    over, says = threading.Event(), short_dir / "says"

    def hangs() -> str:
        over.wait(60)
        return "too late"

    callbacks = SupervisorCallbacks(driver=hangs)
    try:
        late = {"gpu": ORIN, "silent_until": str(says)}
        async with rigged(short_dir, chosen=gpu_settings(), terms=TERMS, callbacks=callbacks, **late) as rig:
            await rig.until(lambda: "device nodes hangs" in str(rig.supervisor.status().gates))
            says.touch()
            await rig.ready()
            assert rig.supervisor.status().gates["driver"].evidence == "CUDA0 answers"
    finally:
        over.set()


async def test_an_engine_without_code_for_this_gpu_says_jit(short_dir: Path) -> None:
    thor = SupervisorOptions(policy=FAST, capability="11.0")
    async with rigged(short_dir, chosen=gpu_settings(), terms=thor, gpu={"CUDA0": "NVIDIA Thor"}) as rig:
        await rig.ready()
        assert "JIT from PTX of sm_87" in str(rig.supervisor.status().gates["backend"].evidence)


async def test_two_gpus_have_gates_of_their_own(short_dir: Path) -> None:
    both = {"CUDA0": "One", "CUDA1": "Two"}
    async with rigged(short_dir, chosen=gpu_settings("CUDA0", "CUDA1"), gpu=both) as rig:
        await rig.ready()
        gates = rig.supervisor.status().gates
        assert list(gates["context"].devices) == ["CUDA0", "CUDA1"]
        assert gates["weights"].devices["CUDA1"].evidence == "450.00 MiB"
        assert gates["kv_cache"].devices["CUDA1"].evidence == "28.00 MiB"


async def test_one_of_two_gpus_missing_is_a_closed_gate_and_degraded(short_dir: Path) -> None:
    async with rigged(short_dir, chosen=gpu_settings("CUDA0", "CUDA1"), gpu={"CUDA0": "One"}) as rig:
        await rig.ready()
        status = rig.supervisor.status()
        context = status.gates["context"]
        assert (context.ready, context.devices["CUDA0"].ready, context.devices["CUDA1"].ready) == (False, True, False)
        assert [item.subject for item in status.degraded] == ["devices"]


async def test_fc74_cuda_that_fails_at_the_first_start_is_tried_again(short_dir: Path) -> None:
    async with rigged(short_dir, chosen=gpu_settings(), terms=TERMS, gpu=ORIN, first_starts=2, first=NOT_YET) as rig:
        await rig.ready()
        status = rig.supervisor.status()
        assert (len(rig.pids), status.degraded, status.rung) == (3, (), 0)
        assert rig.kinds == ["no_gpu"], "the log line named it before the model was read"


async def test_fc41_a_gpu_that_stays_away_is_refused_after_three_more_starts(short_dir: Path) -> None:
    async with rigged(short_dir, chosen=gpu_settings(), **NOT_YET) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "no_gpu"
        assert len(rig.pids) == 4 and "READY" not in rig.states


async def test_fc41_zero_layers_on_the_gpu_are_seen_without_any_complaint(short_dir: Path) -> None:
    """A binary without a GPU backend, as under systemd when a library is not found: it prints nothing about it."""
    async with rigged(short_dir, chosen=gpu_settings(), offloaded=0, layers=33) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        status = rig.supervisor.status()
        assert status.failure is not None and status.failure.kind == "cpu_only"
        assert status.gates["backend"].evidence == "0/33 layers on the GPU" and not status.gates["backend"].ready


async def test_a_device_that_the_engine_does_not_know_is_a_device_fault(short_dir: Path) -> None:
    """What the real one answers to --device CUDA0 without a GPU: it exits 1."""
    lines = ['error while handling argument "--device": invalid device: CUDA0']
    death = Death("line", lines, code=1)
    async with rigged(
        short_dir, chosen=gpu_settings(), gpu=ORIN, first_starts=1, first={"death": death.__dict__}
    ) as rig:
        await rig.ready()
        assert rig.kinds == ["no_gpu"] and len(rig.pids) == 2


async def test_a_driver_that_is_too_old_fails_at_once(short_dir: Path) -> None:
    line = "E ggml_cuda_init: failed to initialize CUDA: CUDA driver version is insufficient for CUDA runtime version"
    async with rigged(short_dir, chosen=gpu_settings(), stray=[line]) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert len(rig.pids) == 1


async def test_fc74_fallback_cpu_serves_degraded_and_comes_back(short_dir: Path) -> None:
    command = argv(short_dir / "fake", **{**NOT_YET, "first_starts": 0})
    callbacks = SupervisorCallbacks(cpu=lambda: launch_plan(command, 0, settings(n_ctx=1024)))
    async with rigged(short_dir, argv=command, chosen=gpu_settings(), callbacks=callbacks) as rig:
        await rig.ready()
        status = rig.supervisor.status()
        assert rig.supervisor.on_cpu_instead and rig.supervisor.model_info["n_ctx"] == 1024
        subjects = {item.subject: item for item in status.degraded}
        assert subjects["device"].got == "CPU" and subjects["device"].because.startswith("no_gpu")
        rig.change(gpu=ORIN, stray=[])
        rig.supervisor.post(DeviceBack())
        await rig.until(lambda: rig.supervisor.machine.rung == 0 and rig.states[-1] == "READY")
        assert rig.supervisor.status().degraded == ()


async def test_a_plan_for_the_cpu_that_blocks_stops_no_loop(short_dir: Path) -> None:
    """The driver is likeliest to hang once the GPU is gone: a blocked loop would never release the planning."""
    command = argv(short_dir / "fake", **{**NOT_YET, "first_starts": 0})
    asked, released = threading.Event(), threading.Event()

    def slow() -> LaunchPlan:
        asked.set()
        assert released.wait(PATIENCE_S), "the event loop stood still"
        return launch_plan(command, 0, settings(n_ctx=1024))

    callbacks = SupervisorCallbacks(cpu=slow)
    async with rigged(short_dir, argv=command, chosen=gpu_settings(), callbacks=callbacks) as rig:
        await rig.until(asked.is_set)
        status = rig.supervisor.status()
        assert (status.state, status.pid) == (State.STARTING, None) and rig.supervisor.plan.rung == 0
        released.set()
        await rig.ready()
        assert rig.supervisor.on_cpu_instead and rig.supervisor.model_info["n_ctx"] == 1024


async def test_a_stop_waits_for_no_plan_that_hangs(short_dir: Path) -> None:
    asked, released = threading.Event(), threading.Event()

    def hangs() -> LaunchPlan:
        asked.set()
        released.wait(60)
        raise DoesNotFitError("too late")

    callbacks = SupervisorCallbacks(cpu=hangs)
    try:
        async with rigged(short_dir, chosen=gpu_settings(), callbacks=callbacks, **NOT_YET) as rig:
            await rig.until(asked.is_set)
            rig.supervisor.stop()
            assert await rig.settle(State.STOPPED, State.FAILED) is State.STOPPED
    finally:
        released.set()


async def test_a_plan_that_hangs_or_breaks_ends_in_a_failure_by_name(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "CPU_PLAN_S", 0.05)
    released, tries = threading.Event(), []

    def plan() -> LaunchPlan:
        tries.append(1)
        if len(tries) == 1:
            released.wait(60)
        raise ZeroDivisionError

    callbacks = SupervisorCallbacks(cpu=plan)
    try:
        async with rigged(short_dir, chosen=gpu_settings(), callbacks=callbacks, **NOT_YET) as rig:
            assert await rig.settle(State.FAILED, State.READY) is State.FAILED
            failure = rig.supervisor.status().failure
            assert failure is not None and failure.kind == "timed_out" and "plan for the CPU" in failure.evidence
            rig.supervisor.start()
            await rig.until(lambda: rig.kinds[-1] == "bug")
            assert await rig.settle(State.FAILED, State.READY) is State.FAILED
    finally:
        released.set()


async def test_a_cpu_rung_reached_for_want_of_memory_is_no_missing_gpu(short_dir: Path) -> None:
    """It would go back to the GPU, run out of memory again, and so on."""
    no_memory = {"death": Death("loading", ["CUDA error: out of memory"], code=1).__dict__}
    command = argv(short_dir / "fake", gpu=ORIN, first_starts=1, first=no_memory)
    rungs = (launch_plan(command, 0, gpu_settings()), launch_plan(command, 1, settings(n_ctx=1024)))
    model = replace(model_plan(command, 1, None, 0), ladder=Ladder(rungs, 0))
    async with rigged(short_dir, argv=command, model=model) as rig:
        await rig.ready()
        assert rig.supervisor.machine.rung == 1 and not rig.supervisor.on_cpu_instead
        assert [item.subject for item in rig.supervisor.status().degraded][:1] == ["rung"]


async def test_fc23_a_part_of_the_layers_is_degraded_and_serves(short_dir: Path) -> None:
    async with rigged(short_dir, chosen=gpu_settings(), gpu=ORIN, offloaded=20) as rig:
        await rig.ready()
        status = rig.supervisor.status()
        assert [(item.subject, item.got) for item in status.degraded] == [("n_gpu_layers", "20/29")]
        assert not status.gates["backend"].ready


async def test_fc41_strict_refuses_a_part_of_the_layers(short_dir: Path) -> None:
    strict = replace(TERMS, strict=True)
    async with rigged(short_dir, chosen=gpu_settings(), terms=strict, gpu=ORIN, offloaded=20) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert "READY" not in rig.states


async def test_a_silent_build_serves_with_the_gpu_unknown(short_dir: Path) -> None:
    """It prints nothing: little host memory is no proof of the GPU, since pages of a mapped file can be dropped."""
    async with rigged(short_dir, chosen=gpu_settings(), log_era="silent") as rig:
        await rig.ready()
        status = rig.supervisor.status()
        assert [(item.subject, item.got) for item in status.degraded] == [("device", "unknown")]
        assert status.gates["backend"].evidence == "no line and no probe shows the GPU in use"


async def test_old_builds_open_the_gpu_gates_too(short_dir: Path) -> None:
    for number, era in enumerate(("2025", "2023")):
        folder = short_dir / str(number)
        async with rigged(folder, chosen=gpu_settings(), terms=TERMS, gpu=ORIN, log_era=era) as rig:
            await rig.ready()
            gates = rig.supervisor.status().gates
            assert all(gate.ready for gate in gates.values()), era
            assert str(gates["backend"].evidence).startswith("29/29 layers on the GPU")
