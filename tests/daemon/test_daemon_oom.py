"""The real engine runs out of memory: the kernel kills it in a memory cgroup, or an allocation fails under ulimit -v.

Both are evidence: one rung down at a time, until it fits. A SIGKILL from a process is none: the rung stays.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from edge.linux.procfs import read_usage
from tests.daemon.memory_group import memory_group
from tests.fakes.llama_switches import write_fake
from tests.serving import Up, eventually

pytestmark = pytest.mark.e2e

# Weights in anonymous memory: nothing that the kernel could drop instead of killing.
OPTIONS = ("-p", "cpu", "--set", "n_ctx=8192", "--set", "load_mode=none", "--set", "cache_ram=0")
CONFIG = "schema = 1\n[restart]\nbackoff_s = [2.0]\nstable_s = 0\n"


def started(folder: Path, model: Path) -> Up:
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "edgellm.toml").write_text(CONFIG)
    return Up(folder, *OPTIONS, "-m", f"demo={model}")


def kinds(up: Up) -> list[str]:
    return [event["kind"] for event in up.events() if event.get("event") == "failed"]


def ready_again(up: Up, restarts: int) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        model: dict[str, Any] = up.healthz().get("models", {}).get("demo", {})
        return model if model.get("state") == "READY" and model["restarts"] >= restarts else None

    model: dict[str, Any] = eventually(there, lambda: f"READY after {restarts} restarts; {up.output}")
    return model


def test_the_kernel_kills_it_for_memory_and_the_next_rung_serves(short_dir: Path, smollm2: Path) -> None:
    with memory_group() as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        with started(short_dir / "s", smollm2) as up:
            up.wait_for("ok")
            group.join(up.process.pid)
            os.kill(up.child_pid(), signal.SIGKILL)  # the next is a member
            ready_again(up, 1)
            child = read_usage(up.child_pid())
            assert child is not None
            os.kill(up.child_pid(), signal.SIGKILL)
            # 180 MiB of f16 cells are 96 MiB of q8_0: less than this rung needs, more than the next. What the
            # supervisor allocated before it joined stays charged to its former group (cgroup-v2.rst).
            group.limit(child.rss_anon_bytes - (40 << 20))
            model = ready_again(up, 3)
            group.limit(None)
            assert group.oom_kills >= 1
            assert "out_of_memory" in kinds(up) and model["rung"] >= 1
            assert [item["subject"] for item in model["degraded"]] == ["rung"]
            assert up.chat().status_code == 200


# The rung comes back after minutes, while no request is open: here after the next look.
AT_ONCE = """import sys
from msgspec.structs import replace
from edge.daemon import fleet, launch
from edge.supervisor import watch
watch.IDLE_LOOK_S = 0.1
policy_of = fleet.policy_of
fleet.policy_of = lambda *given: replace(policy_of(*given), rung_back_s=0.0)
sys.exit(launch.up(sys.argv[1:]))
"""


def test_a_request_that_the_kernel_kills_it_for_takes_a_rung_until_the_engine_is_stable(
    short_dir: Path, smollm2: Path
) -> None:
    with memory_group() as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        engine = write_fake(short_dir / "fake", swallow="much memory")
        (short_dir / "s" / "config").mkdir(parents=True)
        (short_dir / "s" / "config" / "edgellm.toml").write_text("schema = 1\n[restart]\nbackoff_s = [0.1]\n")
        options = (*OPTIONS, "-m", f"demo={smollm2}", "--engine", str(engine))
        with Up(short_dir / "s", *options, program=("-c", AT_ONCE)) as up:
            up.wait_for("ok", "degraded")
            group.join(up.process.pid)
            os.kill(up.child_pid(), signal.SIGKILL)  # the next is a member
            ready_again(up, 1)
            group.limit(256 << 20)
            assert up.chat("take much memory").status_code >= 500

            def rungs() -> list[int]:
                states = [event for event in up.events() if event.get("event") == "state"]
                return [event["rung"] for event in states if event["state"] == "READY"]

            # The gateway repeats a request once that got no byte: one or two rungs are lost, then all come back.
            eventually(lambda: max(rungs()) >= 1 and rungs()[-1] == 0, lambda: f"{rungs()}; {up.output}")
            assert group.oom_kills >= 1 and set(kinds(up)) == {"killed", "out_of_memory"}
            assert up.chat().status_code == 200


def test_fc25_allocations_that_fail_go_down_the_ladder_and_wait_for_memory_on_its_last_rung(
    short_dir: Path, smollm2: Path
) -> None:
    """ulimit -v: no rung goes into the address space. Then the limit is raised, and the next attempt serves."""
    with started(short_dir / "s", smollm2) as up:
        up.wait_for("ok")
        # Children inherit it; we ourselves are far below.
        resource.prlimit(up.process.pid, resource.RLIMIT_AS, (480 << 20, resource.RLIM_INFINITY))
        os.kill(up.child_pid(), signal.SIGKILL)

        def on_the_last_rung() -> bool:
            states = [event for event in up.events() if event.get("event") == "state"]
            return states[-1]["state"] == "BACKOFF" and states[-1]["rung"] >= 2

        eventually(on_the_last_rung, lambda: up.output)
        resource.prlimit(up.process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        model = ready_again(up, 3)
        assert kinds(up)[1:] and set(kinds(up)[1:]) == {"out_of_memory"} and model["rung"] >= 2
        assert up.chat().status_code == 200


def test_a_kill_by_somebody_is_no_evidence(short_dir: Path, smollm2: Path) -> None:
    with started(short_dir / "s", smollm2) as up:
        up.wait_for("ok")
        os.kill(up.child_pid(), signal.SIGKILL)
        assert ready_again(up, 1)["rung"] == 0
        assert kinds(up) == ["killed"]
