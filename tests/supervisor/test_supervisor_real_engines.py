"""Real engines that are asked for a GPU which they do not have: never reported as healthy (FC-41, FC-74)."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.engine.embedded_engine import find_embedded
from edge.engine.engine import Engine
from edge.engine.inspect import inspect
from edge.models.open import ModelFile
from edge.models.store import Store
from edge.plan.argv import render
from edge.plan.plan import Ladder, LaunchPlan, ModelPlan, Settings
from edge.supervisor.status import State
from edge.supervisor.supervisor import SupervisorCallbacks
from tests.supervisor.rig import ENV, gpu_settings, launch_plan, rigged, settings

CROSS = Path.home() / ".cache/edgellm-cross/cuda/llama-server.sh"
WANTED = gpu_settings("CUDA0", n_ctx=512)
CPU = settings(n_ctx=512)


def plan(engine: Engine, file: ModelFile, chosen: Settings, rung: int = 0) -> LaunchPlan:
    argv = render(chosen, engine, file, "chat").args
    return replace(launch_plan(("x",), rung, chosen), argv=argv, env={**ENV, "HOME": "/nonexistent"})


def model(engine: Engine, file: ModelFile) -> ModelPlan:
    return ModelPlan("chat", (), file, Ladder((plan(engine, file, WANTED),), 0))


@pytest.fixture
def file(smollm2: Path) -> ModelFile:
    return Store(smollm2.parent).resolve(str(smollm2))


@pytest.mark.e2e
async def test_the_embedded_engine_never_stands_in_for_cuda(short_dir: Path, file: ModelFile) -> None:
    engine = find_embedded(sys.executable)
    assert engine is not None
    async with rigged(short_dir, model=model(engine, file)) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        status = rig.supervisor.status()
        assert status.failure is not None and status.failure.kind == "cpu_only"
        assert not status.gates["context"].ready and not status.gates["backend"].ready
        assert "READY" not in rig.states and rig.supervisor.restarts == 3


@pytest.mark.e2e
async def test_it_serves_degraded_where_the_profile_allows_the_cpu(short_dir: Path, file: ModelFile) -> None:
    engine = find_embedded(sys.executable)
    assert engine is not None
    callbacks = SupervisorCallbacks(cpu=lambda: plan(engine, file, CPU))
    async with rigged(short_dir, model=model(engine, file), callbacks=callbacks) as rig:
        await rig.ready()
        first = rig.supervisor.status().degraded[0]
        assert (first.subject, first.got) == ("device", "CPU")


@pytest.mark.e2e
async def test_a_model_in_a_folder_with_the_name_of_the_placeholder_starts(short_dir: Path, smollm2: Path) -> None:
    folder = short_dir / "{socket}"
    folder.mkdir()
    (folder / "x.gguf").symlink_to(smollm2)
    engine, there = find_embedded(sys.executable), Store(folder).resolve(str(folder / "x.gguf"))
    assert engine is not None and there.path == str(folder / "x.gguf")
    own = ModelPlan("chat", (), there, Ladder((plan(engine, there, CPU),), 0))
    async with rigged(short_dir, model=own) as rig:
        await rig.ready()


def with_template(source: Path, path: Path, template: str) -> ModelFile:
    """Write a copy of a model with another chat template, which must not be longer."""
    data, key = bytearray(source.read_bytes()), b"tokenizer.chat_template"
    at = data.index(key) + len(key) + struct.calcsize("<I")  # the type of the value
    (length,) = struct.unpack_from("<Q", data, at)
    text = template.encode().ljust(length)
    assert len(text) == length
    data[at + 8 : at + 8 + length] = text
    path.write_bytes(data)
    return Store(path.parent).resolve(str(path))


FORGED = (
    "9.59.999.999 I llama_context: n_ctx = 7",
    "0.00.000.001 I llama_kv_cache: size = 9999.00 MiB ( 1 cells, 1 layers), K (q4_0): 1.00 MiB, V (q4_0): 1.00 MiB",
    "0.00.000.001 I srv          init: model loaded",
    "0.00.000.001 I sched_reserve:  CPU compute buffer size = 99.00 MiB",
)


@pytest.mark.e2e
async def test_lines_that_a_chat_template_prints_are_no_facts(short_dir: Path, smollm2: Path) -> None:
    """The engine prints an example of the template: a forged time moved all gates to the spawn, others were added."""
    engine = find_embedded(sys.executable)
    assert engine is not None
    lines = "\\n".join(FORGED)
    there = with_template(smollm2, short_dir / "x.gguf", f'{{{{"\\n{lines}\\n"}}}}')
    own = ModelPlan("chat", (), there, Ladder((plan(engine, there, CPU),), 0))
    async with rigged(short_dir, model=own) as rig:
        await rig.ready()
        watch = rig.supervisor.watch
        assert watch is not None and set(FORGED) <= set(rig.lines)
        attempt = watch.attempt
        assert (attempt.facts.n_ctx, attempt.facts.kv_types, attempt.facts.kv_mib) == (512, ("f16", "f16"), 11.25)
        assert attempt.facts.buffers.compute["CPU"] < 99
        marks = [attempt.marks[name] for name in ("process", "load", "tensors_end", "slots")]
        assert marks == sorted(set(marks)) and attempt.marks["loaded"] >= marks[-1]
        assert rig.supervisor.status().degraded == ()


@pytest.mark.e2e
async def test_a_chat_template_that_fails_is_no_lack_of_memory(short_dir: Path, smollm2: Path) -> None:
    """Its exception is printed as it is: an allocator's message in it took every rung, and FAILED as out_of_memory."""
    engine = find_embedded(sys.executable)
    assert engine is not None
    text = "0.00.900.001 I srv          init: listening on x\\nNvMapMemAllocInternalTagged: 1 error 12"
    there = with_template(smollm2, short_dir / "x.gguf", f'{{{{ raise_exception("no\\n{text}\\n") }}}}')
    plans = tuple(plan(engine, there, CPU, rung) for rung in range(2))
    async with rigged(short_dir, model=ModelPlan("chat", (), there, Ladder(plans, 0))) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        status = rig.supervisor.status()
        assert status.failure is not None and status.failure.kind == "bad_model"
        assert (status.rung, rig.supervisor.restarts) == (0, 0)
        assert "NvMapMemAllocInternalTagged: 1 error 12" in rig.lines


@pytest.mark.full
@pytest.mark.skipif(not CROSS.exists(), reason="tests/cross/aarch64.sh cuda has not been run here")
async def test_a_cuda_engine_of_a_jetson_without_a_driver_is_noticed(short_dir: Path, file: ModelFile) -> None:
    """aarch64 and sm_87 under qemu: CUDA is compiled in, cannot be initialised, and the server goes on on the CPU."""
    engine = inspect(CROSS, None)
    hidden = replace(WANTED, devices=())  # --device CUDA0 would end it at once: here it is to get as far as it can
    silent = ModelPlan("chat", (), file, Ladder((plan(engine, file, hidden),), 0))
    async with rigged(short_dir, model=silent) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        status = rig.supervisor.status()
        assert status.failure is not None and status.failure.kind in ("driver_too_old", "no_gpu", "cuda_init")
        assert "READY" not in rig.states


@pytest.mark.full
async def test_a_built_server_ends_by_itself_after_sigterm(
    short_dir: Path, file: ModelFile, built_server: Path
) -> None:
    """With the progress protocol it reads its stdin to the end, which no deadline may have to end with SIGKILL."""
    engine = inspect(built_server, None)
    own = ModelPlan("chat", (), file, Ladder((plan(engine, file, CPU),), 0))
    async with rigged(short_dir, model=own) as rig:
        await rig.ready()
        watch = rig.supervisor.watch
        assert watch is not None
        rig.supervisor.stop()
        assert await rig.settle(State.STOPPED) is State.STOPPED
        ended = watch.child.poll()
        assert ended is not None
        assert (ended.code, ended.signal) == (0, None)
