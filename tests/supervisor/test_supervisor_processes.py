"""One supervisor and a real process: starts, stops, and every fault between."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from edge.linux.procfs import read_usage
from edge.supervisor import process, watch
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.status import State
from edge.supervisor.supervisor import SupervisorCallbacks
from tests.fakes.llama_switches import Death
from tests.supervisor.rig import FAST, rigged, settings

STRICT = SupervisorOptions(policy=FAST, strict=True)


async def test_up_with_six_gates_and_down(short_dir: Path) -> None:
    async with rigged(short_dir) as rig:
        await rig.ready()
        status = rig.supervisor.status()
        assert rig.states[:4] == ["STARTING", "LOADING", "WARMING", "READY"]
        assert [name for name, gate in status.gates.items() if gate.ready] == list(status.gates)
        assert status.gates["context"].evidence == "CPU: Some Processor"
        assert status.gates["kv_cache"].evidence == "56.00 MiB, 2048 cells"
        assert (status.degraded, status.failure, status.restarts) == ((), None, 0)
        rig.supervisor.stop()
        await rig.settle(State.STOPPED)
        assert rig.states[4:] == ["DRAINING", "STOPPING", "STOPPED"]


@pytest.mark.parametrize("era", ["new", "2025", "2023"])
async def test_gates_open_by_the_lines_of_every_era(short_dir: Path, era: str) -> None:
    async with rigged(short_dir, log_era=era) as rig:
        await rig.ready()
        gates = rig.supervisor.status().gates
        assert all(gate.ready for gate in gates.values())
        kv = gates["kv_cache"].evidence
        assert kv is not None and kv.startswith(("56.00 MiB", "allocated"))


async def test_a_silent_engine_is_probed_and_the_gates_say_so(short_dir: Path) -> None:
    async with rigged(short_dir, log_era="silent", protocol=False) as rig:
        await rig.ready()
        gates = rig.supervisor.status().gates
        assert all(gate.ready for gate in gates.values())
        assert gates["kv_cache"].evidence == "the engine reports ready (no log line shows it)"


async def test_the_first_request_is_one_token(short_dir: Path) -> None:
    """Waiting requests go on after one token; the rest of the warm-up comes while idle."""
    async with rigged(short_dir) as rig:
        await rig.ready()
        (first,) = rig.requests()
        assert (first["path"], first["body"]["n_predict"]) == ("/completion", 1)


@pytest.mark.parametrize(
    ("role", "evidence"), [("chat", "a completion came back"), ("embedding", "an embedding came back")]
)
async def test_the_evidence_of_the_last_gate_names_what_the_model_answered(
    short_dir: Path, role: str, evidence: str
) -> None:
    """Case 12: "a completion came back" was written of embedding models, which make none."""
    async with rigged(short_dir, chosen=settings(role=role)) as rig:
        await rig.ready()
        assert rig.supervisor.status().gates["warm"].evidence == evidence


async def test_a_template_that_does_not_parse_is_no_reason_not_to_serve(short_dir: Path) -> None:
    terms = SupervisorOptions(policy=replace(FAST, idle_before_s=0.05))
    async with rigged(short_dir, terms=terms, refuse_chat=True) as rig:
        await rig.ready()
        await rig.until(lambda: "/v1/chat/completions" in [request["path"] for request in rig.requests()])
        assert rig.states[-1] == "READY"


async def test_completions_that_answer_503_are_asked_again(short_dir: Path) -> None:
    async with rigged(short_dir, completions_when=str(short_dir / "never")) as rig:
        await rig.until(lambda: len(rig.requests()) >= 3)
        assert rig.supervisor.machine.state is State.WARMING, "503 is asked again, not taken for a failure (FC-31)"


async def test_the_answer_of_a_request_that_waited_makes_it_ready(short_dir: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("edge.supervisor.watch.HEAD_START_S", 30.0)
    async with rigged(short_dir) as rig:
        model = rig.supervisor
        held = asyncio.ensure_future(model.ensure_ready(first=True))
        plain = asyncio.ensure_future(model.ensure_ready())
        assert (await held).state is State.WARMING
        endpoint = model.endpoint(first=True)
        assert endpoint is not None and endpoint.first and model.endpoint() is None and not plain.done()
        with model.traffic.request() as progress:
            progress.answered(endpoint.generation - 1)  # an earlier engine's says nothing of this one
            assert model.watch is not None and not model.watch.answered.is_set()
            progress.answered(endpoint.generation)
            await rig.ready()
        assert (await plain).state is State.READY and model.endpoint() == replace(endpoint, first=False)
        assert model.status().gates["warm"].evidence == "a waiting request was answered"
        assert rig.requests() == [], "no completion of its own was needed"


async def test_a_request_that_is_let_in_and_gets_no_token_holds_nothing_up(short_dir: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("edge.supervisor.watch.HEAD_START_S", 0.01)
    async with rigged(short_dir) as rig:
        held = asyncio.ensure_future(rig.supervisor.ensure_ready(first=True))
        await held
        await rig.ready()
        assert rig.supervisor.status().gates["warm"].evidence == "a completion came back"


async def test_a_start_after_a_failed_one_completes_its_own_prompt_first(short_dir: Path) -> None:
    """The request may be the cause of the failure: the engine must come up without it."""
    death = {"at": "request", "lines": [], "code": None, "signal": 6, "request": 1, "chunk": 0}
    async with rigged(short_dir, first_starts=1, first={"death": death}) as rig:
        held = asyncio.ensure_future(rig.supervisor.ensure_ready(first=True))
        await rig.ready()
        assert (await held).state in (State.WARMING, State.READY)
        assert not any(machine.admits for machine in rig.machines if machine.crashes)


async def test_fc31_models_answers_and_health_is_green_before_completions_are(short_dir: Path) -> None:
    when = short_dir / "when"
    async with rigged(short_dir, models_at_once=True, completions_when=str(when)) as rig:
        await rig.until(lambda: len(rig.requests()) >= 2)
        seen = rig.supervisor.watch
        assert seen is not None and seen.engine_ready_s is not None and seen.first_token_s is None
        assert rig.states[-1] == "WARMING" and "READY" not in rig.states
        when.touch()
        await rig.ready()
        assert seen.first_token_s is not None and seen.first_token_s > seen.engine_ready_s


async def test_fc35_an_exit_without_a_word_tells_code_and_time(short_dir: Path) -> None:
    async with rigged(short_dir, death=Death("line", ["main: one line"], code=1), first_starts=0) as rig:
        await rig.until(lambda: len(rig.pids) >= 2)
        failure = rig.supervisor.machine.failure
        assert failure is not None and failure.kind == "exited"
        assert failure.evidence.splitlines()[0].startswith("exit code 1 after ")
        assert failure.evidence.splitlines()[-1] == "main: one line"


async def test_fc35_exit_0_before_readiness_is_a_failure(short_dir: Path) -> None:
    async with rigged(short_dir, log_era="silent", death=Death("loading", code=0)) as rig:
        await rig.until(lambda: len(rig.pids) >= 2)
        failure = rig.supervisor.machine.failure
        assert failure is not None and failure.kind == "exited"
        assert "exit code 0" in failure.evidence and "it printed nothing" in failure.evidence


async def test_fc26_ready_late_is_ready_and_a_slow_load_that_moves_is_not_ended(short_dir: Path) -> None:
    """The stall limit is far shorter than the load."""
    hasty = SupervisorOptions(policy=replace(FAST, stall_s=1.5))
    async with rigged(short_dir, terms=hasty, load_s=2.5, steps=50) as rig:
        await rig.ready()
        assert rig.supervisor.restarts == 0


async def test_fc26_a_load_that_stands_still_is_ended_and_the_next_may_succeed(short_dir: Path) -> None:
    hasty = SupervisorOptions(policy=replace(FAST, stall_s=1.0))
    async with rigged(short_dir, terms=hasty, first_starts=1, first={"stall_at": 0.5}) as rig:
        await rig.ready()
        assert (rig.supervisor.restarts, rig.kinds) == (1, ["stalled"])


async def test_503_for_ever_is_a_stall_although_we_keep_asking(short_dir: Path) -> None:
    """The supervisor's polls cost the engine CPU time and make it print lines; that is no progress."""
    hasty = SupervisorOptions(policy=replace(FAST, stall_s=4.0))
    async with rigged(short_dir, terms=hasty, chatter=True, first_starts=1, first={"health_never": True}) as rig:
        await rig.ready()
        assert (rig.supervisor.restarts, rig.kinds) == (1, ["stalled"])


async def test_fc37_a_wedged_engine_that_ignores_sigterm_is_replaced(short_dir: Path) -> None:
    """/health stays green, the completion never comes, no CPU time: only SIGKILL helps."""
    hasty = SupervisorOptions(policy=replace(FAST, wedge_s=1.0, term_s=0.3))
    async with rigged(
        short_dir, terms=hasty, first_starts=1, first={"wedge_after": 1, "ignore_term": True}, wedge_after=None
    ) as rig:
        await rig.ready()
        first = rig.pids[0]
        with pytest.raises(aiohttp.ClientError):
            await rig.complete()  # ended with the engine: an error, no dead socket
        await rig.ready()
        assert rig.kinds == ["wedged"] and rig.pids[-1] != first
        assert rig.supervisor.machine.wedges == 1
        assert (await rig.complete())[0] == 200


async def test_an_idle_engine_is_not_wedged_and_a_busy_one_neither(short_dir: Path) -> None:
    hasty = SupervisorOptions(policy=replace(FAST, wedge_s=1.5))
    async with rigged(short_dir, terms=hasty) as rig:
        await rig.ready()
        await asyncio.sleep(1.8)  # no request is open: no progress is expected
        with rig.supervisor.traffic.request() as progress:  # tokens come, slowly
            for _ in range(18):
                await asyncio.sleep(0.1)
                progress.moved()
        assert (rig.supervisor.restarts, rig.states[-1]) == (0, "READY")


async def test_fc40_an_abort_in_mid_answer_is_recovered_from(short_dir: Path) -> None:
    death = Death("request", ["CUDA error: an illegal memory access was encountered"], None, signal.SIGABRT, 3, 3)
    async with rigged(short_dir, first_starts=1, first={"death": death.__dict__}) as rig:
        await rig.ready()
        with pytest.raises(aiohttp.ClientError):
            for _ in range(5):  # the idle set may have been the first of them
                await rig.complete(stream=True, n_predict=8)
        await rig.until(lambda: rig.supervisor.restarts == 1)
        await rig.ready()
        assert rig.kinds == ["gpu_fault"]


async def test_kill_9_while_serving_keeps_the_rung(short_dir: Path) -> None:
    async with rigged(short_dir, rungs=2) as rig:
        for number in range(3):
            await rig.ready()
            os.kill(rig.pids[-1], signal.SIGKILL)
            await rig.until(lambda expected=number + 1: rig.supervisor.restarts == expected)
        await rig.ready()
        assert rig.supervisor.status().rung == 0 and rig.kinds == ["killed"]


async def test_a_rung_lost_without_evidence_comes_back_after_its_time(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kills from an unknown process suggest want of memory: a smaller rung, and later the planned one again."""
    monkeypatch.setattr(watch, "IDLE_LOOK_S", 0.05)
    terms = SupervisorOptions(policy=replace(FAST, rung_back_s=0.0))
    killed = {"death": Death("loading", signal=signal.SIGKILL).__dict__}
    async with rigged(short_dir, rungs=2, terms=terms, first_starts=2, first=killed) as rig:
        await rig.ready()
        await rig.until(lambda: [rig.supervisor.machine.rung, *rig.states[-1:]] == [0, "READY"])
        spawned = [machine.rung for machine in rig.machines if machine.state is State.STARTING]
        assert spawned == [0, 0, 1, 0] and len(rig.pids) == 4
        assert [machine.rung for machine in rig.machines if machine.state is State.DRAINING] == [1], "it served"
        assert rig.supervisor.status().degraded == ()


async def test_a_lost_rung_comes_back_only_where_the_memory_for_it_is_granted(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other models its memory may be another one's by then: the owner of the budget is asked each time."""
    monkeypatch.setattr(watch, "IDLE_LOOK_S", 0.05)
    terms = SupervisorOptions(policy=replace(FAST, rung_back_s=0.0))
    killed = {"death": Death("loading", signal=signal.SIGKILL).__dict__}
    asked: list[int] = []
    callbacks = SupervisorCallbacks(memory_back=lambda each: asked.append(each.machine.rung))
    async with rigged(short_dir, rungs=2, terms=terms, callbacks=callbacks, first_starts=2, first=killed) as rig:
        await rig.ready()
        await rig.until(lambda: len(asked) > 1)
        assert set(asked) == {1} and rig.states[-1] == "READY" and len(rig.pids) == 3
        rig.supervisor.memory_back()
        await rig.until(lambda: [rig.supervisor.machine.rung, *rig.states[-1:]] == [0, "READY"])


async def test_a_request_that_comes_while_prompts_are_saved_is_not_cut_off(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the engine's endpoint before the model was chosen to sleep, and opens only now."""
    async with rigged(short_dir) as rig:
        await rig.ready()
        seen = rig.supervisor.watch
        assert seen is not None
        saving, go_on = asyncio.Event(), asyncio.Event()

        async def save() -> None:
            saving.set()
            await go_on.wait()

        monkeypatch.setattr(seen._prompts, "save", save)
        seen.warming.busy = False
        rig.supervisor.sleep()
        await asyncio.wait_for(saving.wait(), 30)
        with rig.supervisor.traffic.request():
            go_on.set()
            await rig.until(lambda: not seen.warming.ended)
            assert rig.supervisor.machine.state is State.DRAINING and rig.supervisor.machine.alive
        assert await rig.settle(State.SLEEPING) is State.SLEEPING


async def test_fc16_an_nvmap_refusal_is_its_own_kind_and_takes_the_next_rung(short_dir: Path) -> None:
    lines = [
        "NvMapMemAllocInternalTagged: 1074810371 error 12",
        "allocating 1203.00 MiB on device 0: cudaMalloc failed: out of memory",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
    ]
    death = Death("loading", lines, code=1)
    async with rigged(short_dir, rungs=3, first_starts=2, first={"death": death.__dict__}) as rig:
        await rig.ready()
        status = rig.supervisor.status()
        assert (status.rung, rig.kinds) == (2, ["nvmap_refused"])
        assert [item.subject for item in status.degraded] == ["rung"]


async def test_fc16_nvmap_refusals_are_bounded(short_dir: Path) -> None:
    death = Death("loading", ["NvMapMemHandleAlloc: error 0"], code=1)
    async with rigged(short_dir, death=death, terms=SupervisorOptions(policy=FAST, l4t="36.4.3")) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "nvmap_refused"
        assert failure.hint.endswith("(this board runs L4T 36.4.3)")
        assert len(rig.pids) == 4, "once, and after each of three pauses"


async def test_fc25_memory_that_comes_free_during_a_pause_is_used(short_dir: Path) -> None:
    lines = ["llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache"]
    death = Death("loading", lines, code=1)
    async with rigged(short_dir, first_starts=2, first={"death": death.__dict__}) as rig:
        await rig.ready()
        assert rig.kinds == ["out_of_memory"] and rig.states.count("BACKOFF") == 2


async def test_fc25_at_most_three_growing_pauses_then_failed_with_advice(short_dir: Path) -> None:
    death = Death("loading", ["std::bad_alloc"], code=1)
    async with rigged(short_dir, death=death) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        deadlines = [m for m in rig.machines if m.state is State.BACKOFF]
        assert [m.allocation_failures for m in deadlines] == [1, 2, 3]
        rig.change(death=None)
        rig.supervisor.start()
        await rig.ready()  # the failed state can be left (FC-26)


async def test_fc28_an_unknown_flag_fails_at_once_and_stays_so(short_dir: Path) -> None:
    death = Death("line", ["error: invalid argument: --no-mmap"], code=1)
    async with rigged(short_dir, death=death) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert len(rig.pids) == 1
        assert rig.supervisor.status().failure is not None


async def test_a_binary_that_is_not_there_fails_at_once(short_dir: Path) -> None:
    async with rigged(short_dir, argv=("/nowhere/llama-server", "--host", "{socket}")) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "spawn_failed"


async def test_a_machine_that_is_short_of_processes_for_a_moment_fails_no_model(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fork(2) with EAGAIN (TasksMax, ulimit -u) after a crash: the model was FAILED, and stayed so."""
    refusals = [errno.EAGAIN, errno.ENOMEM, errno.EMFILE]

    def popen(*arguments: Any, **more: Any) -> Any:
        if refusals:
            raise OSError(refusals[0], os.strerror(refusals.pop(0)))
        return real(*arguments, **more)

    async with rigged(short_dir) as rig:
        await rig.ready()
        real = process.subprocess.Popen
        monkeypatch.setattr(process.subprocess, "Popen", popen)
        os.kill(rig.pids[-1], signal.SIGKILL)
        await rig.settle(State.BACKOFF)
        await rig.ready()
        assert refusals == [] and "FAILED" not in rig.states


async def test_a_death_in_the_first_decode_is_no_readiness(short_dir: Path) -> None:
    """A-02, B-22, B-38: everything loads, the first completion kills it."""
    death = Death("request", ["CUDA error: no kernel image is available for execution on the device"], code=1)
    async with rigged(short_dir, death=death) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert "READY" not in rig.states
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "wrong_architecture"


async def test_stop_while_it_loads_and_143_is_no_crash(short_dir: Path) -> None:
    async with rigged(short_dir, load_s=30.0) as rig:
        await rig.settle(State.LOADING)
        rig.supervisor.stop()
        await rig.settle(State.STOPPED)
        assert rig.supervisor.machine.crashes == 0 and not rig.kinds


async def test_stop_waits_for_an_open_request_and_starts_no_new_one(short_dir: Path) -> None:
    async with rigged(short_dir) as rig:
        await rig.ready()
        with rig.supervisor.traffic.request():
            rig.supervisor.stop()
            await rig.settle(State.DRAINING)
            assert rig.supervisor.endpoint() is None
            assert rig.child_lives
        await rig.settle(State.STOPPED)


async def test_asleep_until_somebody_asks(short_dir: Path) -> None:
    async with rigged(short_dir) as rig:
        await rig.ready()
        rig.supervisor.sleep()
        await rig.settle(State.SLEEPING)
        assert read_usage(rig.pids[-1]) is None, "the memory is given back"
        status = await asyncio.wait_for(rig.supervisor.ensure_ready(), 30)
        assert status.state is State.READY and len(rig.pids) == 2


async def test_who_waits_is_answered_when_it_fails(short_dir: Path) -> None:
    async with rigged(short_dir, load_s=0.5, death=Death("ready", ["invalid magic characters"], code=1)) as rig:
        waiters = [asyncio.create_task(rig.supervisor.ensure_ready()) for _ in range(5)]
        statuses = await asyncio.wait_for(asyncio.gather(*waiters), 30)
        assert {status.state for status in statuses} == {State.FAILED}
        assert {status.failure.kind for status in statuses if status.failure} == {"bad_model"}


async def test_exit_to_spawn_takes_no_time_of_ours(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure is measured by tests/bench; here only that nothing waits for a poll: the next is an hour away."""
    monkeypatch.setattr(watch, "IDLE_LOOK_S", 3600.0)
    async with rigged(short_dir, terms=SupervisorOptions(policy=replace(FAST, look_s=3600.0))) as rig:
        await rig.ready()
        os.kill(rig.pids[-1], signal.SIGKILL)
        await rig.until(lambda: rig.supervisor.restarts == 1)


@pytest.mark.parametrize(("switches", "subject"), [({"props_n_ctx": 512}, "n_ctx"), ({"props_slots": 4}, "n_parallel")])
async def test_fc23_what_the_engine_shrank_is_degraded(short_dir: Path, switches: dict[str, int], subject: str) -> None:
    async with rigged(short_dir, **switches) as rig:
        await rig.ready()
        assert [item.subject for item in rig.supervisor.status().degraded] == [subject]


async def test_strict_refuses_to_serve_what_is_degraded(short_dir: Path) -> None:
    async with rigged(short_dir, terms=STRICT, chosen=settings(n_ctx=4096), props_n_ctx=2048) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.status().failure
        assert failure is not None and failure.kind == "degraded" and "n_ctx" in failure.evidence
        assert "READY" not in rig.states


async def test_it_sleeps_after_its_idle_time_and_not_before(short_dir: Path) -> None:
    async with rigged(short_dir, terms=SupervisorOptions(policy=FAST, ttl_s=0.5)) as rig:
        await rig.ready()
        with rig.supervisor.traffic.request():
            await asyncio.sleep(1.0)
            assert rig.states[-1] == "READY", "a request is open"
        await rig.settle(State.SLEEPING)
        assert "DRAINING" in rig.states and len(rig.pids) == 1


async def test_a_client_may_keep_it_awake_and_let_it_sleep(short_dir: Path) -> None:
    """Ollama's keep_alive stands above ttl_s until the next one."""
    async with rigged(short_dir, terms=SupervisorOptions(policy=FAST, ttl_s=0.3)) as rig:
        await rig.ready()
        rig.supervisor.traffic.keep_alive_s = -1
        await asyncio.sleep(1.0)  # three times ttl_s
        assert rig.states[-1] == "READY"
        with rig.supervisor.traffic.request():
            rig.supervisor.traffic.keep_alive_s = 0
            await asyncio.sleep(0.3)
            assert rig.states[-1] == "READY", "a request is open"
        await rig.settle(State.SLEEPING)


async def test_a_model_that_is_not_preloaded_sleeps_until_somebody_asks(short_dir: Path) -> None:
    async with rigged(short_dir, terms=SupervisorOptions(policy=FAST, preload=False), start=False) as rig:
        rig.supervisor.begin()
        await asyncio.sleep(0.2)
        assert (rig.supervisor.status().state, rig.pids) == (State.SLEEPING, [])
        assert (await asyncio.wait_for(rig.supervisor.ensure_ready(), 30)).state is State.READY
