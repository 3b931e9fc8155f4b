"""Time how an idle model comes back: a new engine's first token, and that of an engine that put itself to sleep."""

from __future__ import annotations

import json
import statistics
import time
from http.client import HTTPException
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from edge.bench.load import EngineBench, read_through, running, wait_ready
from edge.board.nvml import process_bytes
from edge.builder.smoke import request
from edge.errors import TimedOutError, UnavailableError
from edge.linux.procfs import family_pids, read_family_usage
from edge.plan.choices import SLEEP_OPTION, SleepChoice, can_sleep, size_class, winner
from edge.plan.plan import LaunchPlan, ModelPlan, Plan
from edge.supervisor.process import Child

IDLE_S = 1  # until the engine sleeps, the least that the option takes
SLEEP_LIMIT_S = 60.0
ANSWER_LIMIT_S = 900.0
_LOOK_S = 0.05
_BODY = json.dumps({"prompt": "The", "n_predict": 1, "cache_prompt": False})


class SleepRow(Struct):
    """The measured times to a first token, and the memory that the engine's own sleep leaves occupied."""

    stop_s: list[float] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    left_bytes: int = 0
    note: str | None = None  # why the engine's own sleep was not measured


class SleepBench(EngineBench):
    """Wakes one model in both ways."""

    def measure(self, *, repeat: int) -> SleepRow:
        """Measure both ways in turns, so that other load falls on both. Raises what planning and starting raise."""
        row, launch = SleepRow(), self._plan("stop", "off")
        plan, model, _ = self.plans["stop"]
        if not can_sleep(plan.engine):
            row.note = f"{plan.engine.id} does not sleep by itself, or does not report it"
            return row
        if launch.settings.role != "chat":
            row.note = f"a model with the role {launch.settings.role} gives no first token"
            return row
        asleep = sleeping(launch)
        for number in range(repeat):
            for path in (launch.model or model.model).shards:
                read_through(Path(path))
            with running(launch, self._socket_path) as child:
                wait_ready(child)
                answer(child)
                row.stop_s.append(time.monotonic() - child.spawned_at_s)
            with running(asleep, self._socket_path) as child:
                wait_ready(child)
                answer(child)
                row.left_bytes = max(row.left_bytes, wait_asleep(child))
                began_s = time.monotonic()
                answer(child)
                row.engine_s.append(time.monotonic() - began_s)
            self._on_step(f"{number + 1} of {repeat}")
        return row


def sleeping(launch: LaunchPlan) -> LaunchPlan:
    """Return the launch with an engine that sleeps after IDLE_S idle seconds."""
    words = list(launch.argv)
    if "--params" in words:
        place = words.index("--params") + 1
        words[place] = json.dumps(json.loads(words[place]) | {"sleep_idle_seconds": IDLE_S})
    else:
        words += [SLEEP_OPTION, str(IDLE_S)]
    return replace(launch, argv=tuple(words))


def answer(child: Child) -> None:
    """Ask for one token. Raises UnavailableError."""
    try:
        status, _ = request(child.socket_path, "POST", "/completion", _BODY, timeout_s=ANSWER_LIMIT_S)
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"the engine does not answer: {error}", "see `edgellm doctor`") from error
    if status != 200:
        raise UnavailableError(f"the engine answered a completion with {status}", "see `edgellm doctor`")


def wait_asleep(child: Child) -> int:
    """Return the bytes of memory that the engine keeps while it sleeps. Raises TimedOutError if it does not."""
    end_s = time.monotonic() + SLEEP_LIMIT_S
    while time.monotonic() < end_s:
        for pipe in (child.stdout, child.stderr):  # a full pipe would stop the engine
            pipe.read(1 << 16)
        try:
            _, text = request(child.socket_path, "GET", "/props", timeout_s=5)  # does not wake it
            props = json.loads(text)
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            raise UnavailableError(f"the engine does not answer: {error}", "see `edgellm doctor`") from error
        if isinstance(props, dict) and props.get("is_sleeping"):
            usage = read_family_usage(child.pid)
            return (usage.rss_bytes if usage else 0) + gpu_bytes(child)
        time.sleep(_LOOK_S)
    raise TimedOutError(f"the engine did not sleep within {SLEEP_LIMIT_S:.0f} s")


def gpu_bytes(child: Child) -> int:
    """Return what the engine holds on all GPUs, as far as NVML reports it by process: 0 on a Jetson."""
    return sum(process_bytes(pid) or 0 for pid in family_pids(child.pid))


def choice_of(row: SleepRow, plan: Plan, model: ModelPlan, launch: LaunchPlan) -> SleepChoice | None:
    """Return the choice that `--apply` keeps for this board, engine and size class; None if nothing was measured."""
    if not row.engine_s:
        return None
    file_bytes = (launch.model or model.model).bytes
    stop_s, engine_s = (round(statistics.median(values), 3) for values in (row.stop_s, row.engine_s))
    mode = winner(stop_s, engine_s, row.left_bytes, file_bytes)
    return SleepChoice(plan.board.id, plan.engine.id, size_class(file_bytes), mode, stop_s, engine_s, row.left_bytes)
