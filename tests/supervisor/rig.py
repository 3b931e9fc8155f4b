"""A real Supervisor over the fake llama-server, with a plan made by hand."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from edge.engine.engine import Engine
from edge.engine.output import parse_help
from edge.linux.procfs import read_stat, read_usage
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile
from edge.plan.argv import render
from edge.plan.plan import DomainBudget, Ladder, LaunchPlan, ModelPlan, Settings
from edge.resources import data_dir, load_toml
from edge.supervisor.log_patterns import Patterns
from edge.supervisor.policy import Policy, SupervisorOptions
from edge.supervisor.remedies import Remedies
from edge.supervisor.state import SupervisorState
from edge.supervisor.status import State
from edge.supervisor.supervisor import Supervisor, SupervisorCallbacks
from edge.units import MIB
from tests import leftovers
from tests.fakes import llama_switches

TABLE = load_toml(data_dir("build") / "llama-server.toml")
PATTERNS = Patterns(TABLE)
PATIENCE_S = 30.0
ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "LLAMA_SERVER_ROUTER_PORT": "1", "PYTHONDONTWRITEBYTECODE": "1"}
# An engine of a run that was killed is found by its mark.
ENV |= {name: value for name, value in os.environ.items() if name == leftovers.MARK}
# Waits that a test can afford; the order of things is the same as with the real ones.
FAST = Policy(
    backoff_s=(0, 0.05, 0.1),
    jitter=0,
    allocation_pauses_s=(0.05, 0.1, 0.15),
    drain_s=5,
    term_s=2,
    look_s=0.1,
)

META = ModelMeta(
    arch="llama",
    name="fake",
    n_layer=28,
    n_embd=64,
    n_head=4,
    n_head_kv=(4,) * 28,
    key_length=16,
    value_length=16,
    n_ctx_train=4096,
    n_vocab=1000,
    sliding_window=None,
    n_expert=0,
    quant="Q4_K_M",
    tensors=(),
    tensor_bytes=900 * MIB,
    data_offset=0,
    file_bytes=900 * MIB,
    chat_template=True,
    tokenizer="llama",
    file_type=None,
)
FILE = ModelFile("fake", "Q4_K_M", "/nowhere/fake.gguf", ("/nowhere/fake.gguf",), 900 * MIB, "f", META)


def settings(**changes: Any) -> Settings:
    base = Settings(2048, 1, 0, "f16", "f16", "auto", "mmap", 1, 0, n_batch=512, n_ubatch=512)
    return replace(base, **changes)


def gpu_settings(*devices: str, **changes: Any) -> Settings:
    return settings(n_gpu_layers=29, devices=devices or ("CUDA0",), **changes)


def launch_plan(argv: tuple[str, ...], rung: int, chosen: Settings) -> LaunchPlan:
    more = (*argv, "--ctx-size", str(chosen.n_ctx), "--parallel", str(chosen.n_parallel))
    domain = "unified" if chosen.n_gpu_layers else "host"
    budget = {domain: DomainBudget(8 << 30, 1 << 30, weights_bytes=900 * MIB, kv_bytes=56 * MIB)}
    return LaunchPlan(rung, chosen, budget, more, dict(ENV))


def model_plan(argv: tuple[str, ...], rungs: int = 1, chosen: Settings | None = None, first: int = 0) -> ModelPlan:
    each = chosen or settings()
    plans = tuple(launch_plan(argv, n, replace(each, n_ctx=each.n_ctx >> n)) for n in range(rungs))
    return ModelPlan("chat", (), FILE, Ladder(plans, first))


def fake_engine(folder: Path, **switches: Any) -> Engine:
    """Write a fake that is started by a rendered command line, so that remedies can change it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = llama_switches.write_fake(folder, **switches)
    return Engine("fake", "llama-server", str(path), flags=parse_help(llama_switches.help_text("load-mode")))


def remedied(engine: Engine, chosen: Settings) -> tuple[tuple[str, ...], SupervisorCallbacks]:
    """Return the engine's command line and callbacks with its remedies."""
    line = render(chosen, engine, FILE, "chat").args
    return line, SupervisorCallbacks(remedies=Remedies(TABLE, engine, FILE, "chat"))


@dataclass
class Rig:
    """A running supervisor. `folder` holds the fake's switches; `states` is every state in order."""

    supervisor: Supervisor
    folder: Path
    owner: asyncio.Task[None]
    socket_path: Path
    machines: list[SupervisorState] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def states(self) -> list[str]:
        return [machine.state.value for machine in self.machines]

    @property
    def kinds(self) -> list[str]:
        """The kinds of failures in order, without repetitions."""
        found = [machine.failure.kind for machine in self.machines if machine.failure]
        return [kind for number, kind in enumerate(found) if number == 0 or found[number - 1] != kind]

    @property
    def child_lives(self) -> bool:
        vitals = read_usage(self.pids[-1])
        return vitals is not None and vitals.rss_bytes > 0

    @property
    def pids(self) -> list[int]:
        return llama_switches.starts(self.folder)

    def requests(self) -> list[dict[str, Any]]:
        return llama_switches.requests(self.folder)

    def change(self, **switches: Any) -> None:
        llama_switches.change(self.folder, **switches)

    async def settle(self, *states: State) -> State:
        settled = asyncio.ensure_future(self.supervisor.settled(*states))
        waited: set[asyncio.Future[Any]] = {settled, self.owner}
        await asyncio.wait(waited, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not settled.done():
            settled.cancel()
            raise AssertionError(f"not {states}; states {self.states}, failures {self.kinds}; {self.lines[-3:]}")
        return settled.result()

    async def ready(self) -> None:
        assert await self.settle(State.READY, State.FAILED) is State.READY, self.supervisor.status().failure

    async def until(self, true: Callable[[], object]) -> None:
        """Poll until the condition holds."""
        for _ in range(int(PATIENCE_S / 0.01)):
            if true():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"waited in vain; states {self.states}, failures {self.kinds}")

    async def complete(self, **body: Any) -> tuple[int, bytes]:
        """Send one completion through the child's socket, counted as the gateway counts it."""
        connector = aiohttp.UnixConnector(path=str(self.socket_path))
        with self.supervisor.traffic.request():
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.post("http://engine/completion", json={"n_predict": 1, **body}) as response,
            ):
                return response.status, await response.read()


@asynccontextmanager
async def rigged(
    folder: Path,
    *,
    rungs: int = 1,
    home: int = 0,
    chosen: Settings | None = None,
    terms: SupervisorOptions | None = None,
    callbacks: SupervisorCallbacks | None = None,
    start: bool = True,
    argv: tuple[str, ...] | None = None,
    model: ModelPlan | None = None,
    **switches: Any,
) -> AsyncIterator[Rig]:
    """Run a supervisor over the fake; at the end no process may be alive."""
    fake = folder / "fake"
    command = argv or llama_switches.argv(fake, **switches)
    machines: list[SupervisorState] = []
    lines: list[str] = []
    callbacks = replace(
        callbacks or SupervisorCallbacks(), on_change=lambda _, __, after: machines.append(after), on_line=lines.append
    )
    socket_path = folder / "m.sock"
    supervisor = Supervisor(
        model or model_plan(command, rungs, chosen, home),
        socket_path,
        PATTERNS,
        terms or SupervisorOptions(policy=FAST),
        callbacks,
    )
    owner = asyncio.create_task(supervisor.run())
    rig = Rig(supervisor, fake, owner, socket_path, machines, lines)
    try:
        if start:
            supervisor.start()
        yield rig
        assert not owner.done(), owner.exception()
    finally:
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)
        # A SIGKILL to a grandchild is delivered, and its process reaped, after kill(2) has returned.
        for _ in range(500):
            left = [pid for pid in rig.pids if _exists(pid)]
            if not left:
                break
            await asyncio.sleep(0.01)
        assert not left, "a child outlived its supervisor"


def _exists(pid: int) -> bool:
    """Return whether a process is left. A zombie counts if it is ours to reap; of a script's child init does."""
    stat = read_stat(pid)
    return stat is not None and (stat.state != "Z" or stat.parent_pid == os.getpid())
