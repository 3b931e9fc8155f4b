"""An engine beside llama.cpp: its port, its memory, its gates, and what none of them shows."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from edge.board.cgroup import group_bytes
from edge.linux import procfs
from edge.linux.tree import Tree
from edge.plan.plan import DomainBudget, LaunchPlan, OtherEngine, Settings
from edge.supervisor import other_engine
from edge.supervisor.other_engine import (
    EngineFoundAt,
    OtherAttempt,
    free_port,
    over_claim,
)
from edge.supervisor.status import GATES
from edge.supervisor.warmup_run import EngineClient
from edge.units import GIB, MIB

SETTINGS = Settings(0, 1, 0, "", "", "", "", 0, 0, 0, 0, role="other")


def engine(**claim: int) -> OtherEngine:
    return OtherEngine("/health", (), claim or {"host": GIB})


def attempt(found: OtherEngine, driver: str | None = None) -> OtherAttempt:
    budget = {name: DomainBudget(8 * GIB, 0, claim_bytes=size) for name, size in found.claim_bytes.items()}
    seen = OtherAttempt(LaunchPlan(0, SETTINGS, budget, ("x",), {}), found, 10.0)
    if driver is not None:
        seen.driver_opens(driver)
    return seen


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_only_readiness_opens_a_gate_and_every_other_states_why_it_is_closed() -> None:
    seen = attempt(engine())
    # The lines of llama.cpp are no evidence here, whatever they resemble.
    assert not seen.stderr("load_tensors: offloaded 29/29 layers to GPU", 11.0)
    assert not seen.stdout('cmd_child_to_router:state:{"state":"ready"}', 11.0)
    assert not seen.answered(12.0, None)
    before = seen.gates.as_status()
    assert set(before) == set(GATES)
    assert not any(gate.ready for gate in before.values())
    seen.warmed(12.5, "GET /health is answered")
    after = seen.gates.as_status()
    assert (after["warm"].ready, after["warm"].took_s) == (True, 2.5)
    for name in set(GATES) - {"warm"}:
        assert not after[name].ready
        assert (after[name].evidence or "").startswith(("unknown", "not applicable"))
        assert after[name].blocked_by is None
    assert not seen.gates.as_status(alive=False)["warm"].ready
    assert len(seen.tail) == 2


def test_a_gpu_is_shown_by_nvml_alone() -> None:
    seen = attempt(engine(**{"host": GIB, "GPU-0": GIB}), driver="/dev/nvidia0 opens")
    assert seen.gates.as_status()["driver"].ready
    assert seen.gates.as_status()["context"].evidence == "unknown: NVML shows no memory of this engine on a GPU"
    seen.on_gpu(11.0, 512 * MIB, "GPU-0")
    assert seen.gates.as_status()["context"].evidence == "NVML: 512.0 MiB of GPU-0"


def test_a_failed_start_closes_its_gate_with_the_kind() -> None:
    seen = attempt(engine())
    seen.gates = seen.gates.fail("exited")
    assert seen.gates.as_status(alive=False)["warm"].evidence == "exited"


def test_a_port_is_judged_by_the_process_that_listens_and_its_address(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    found = EngineFoundAt(engine(), port)
    assert found.judge_port(os.getpid()) is None
    # Not process 1: it can be this one's ancestor, and the engine is judged with its descendants.
    with subprocess.Popen(["sleep", "60"]) as other:
        foreign = found.judge_port(other.pid)
        other.kill()
    assert foreign is not None
    assert foreign.kind == "socket_busy"
    with socket.create_server(("0.0.0.0", 0)) as open_:
        refused = EngineFoundAt(engine(), open_.getsockname()[1]).judge_port(os.getpid())
    assert refused is not None
    assert refused.kind == "not_loopback"


def test_its_memory_is_measured_and_unknown_domains_are_left_out(tmp_path: Path) -> None:
    found = EngineFoundAt(engine(**{"host": GIB, "GPU-none": GIB}), 1).measure(os.getpid())
    assert set(found) == {"host"}
    usage = procfs.read_usage(os.getpid())
    assert usage is not None
    assert 4 * MIB < found["host"] <= usage.rss_bytes * 1.5
    for pid, name, text in ((7, "smaps_rollup", "Pss:  2048 kB\n"), (8, "status", "VmRSS:\t1024 kB\n")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / name).write_text(text)
    assert procfs.family_pss_bytes([7, 8, 9], tmp_path) == 3 * MIB
    assert procfs.family_pss_bytes([9], tmp_path) is None


@pytest.mark.parametrize("base", ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"])
def test_the_memory_of_a_group_of_its_own_counts_without_its_file_cache(tmp_path: Path, base: str) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    tree = Tree(tmp_path)
    write("/proc/self/cgroup", "0::/system.slice/edgellm.service\n")
    write("/proc/7/cgroup", "4:memory:/v1\n0::/docker/abc\n")
    write("/proc/8/cgroup", "0::/system.slice/edgellm.service\n")
    write("/proc/9/cgroup", "0::/\n")
    assert group_bytes(tree, 7) is None, "no counter"
    for group in ("/docker/abc", "/system.slice/edgellm.service", ""):
        write(f"{base}{group}/memory.current", f"{900 * MIB}\n")
        write(f"{base}{group}/memory.stat", f"anon 1\ninactive_file {200 * MIB}\nactive_file {100 * MIB}\n")
    assert group_bytes(tree, 7) == 600 * MIB
    # Our own group and the top of the hierarchy hold other processes too; 10 is gone.
    assert [group_bytes(tree, pid) for pid in (8, 9, 10)] == [None] * 3
    write(f"{base}/docker/abc/memory.current", "0\n")
    assert group_bytes(tree, 7) == 0


def test_the_gpu_memory_of_all_its_processes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell script starts the program: NVML knows each process by its own pid."""
    script = ("/bin/sh", "-c", "exec 3<&0; cat <&3 >/dev/null & echo $!; wait")  # it ends with its standard input
    held: dict[int, int | None] = {}
    monkeypatch.setattr(other_engine, "process_bytes", held.get)
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdin is not None and shell.stdout is not None
        child = int(shell.stdout.readline())
        found = EngineFoundAt(engine(**{"host": GIB, "unified": GIB, "GPU-0": GIB}), 1)
        none = found.measure(shell.pid)
        held |= {shell.pid: 100 * MIB, child: 300 * MIB, os.getpid(): GIB}
        both = found.measure(shell.pid)
        held[shell.pid] = None
        one = found.measure(shell.pid)
        shell.stdin.close()
    assert "GPU-0" not in none and none["unified"] == none["host"]
    assert (both["GPU-0"], both["unified"] - both["host"]) == (400 * MIB, 400 * MIB)
    assert (one["GPU-0"], one["unified"] - one["host"]) == (300 * MIB, 300 * MIB)


@pytest.mark.parametrize(("measured", "over"), [(GIB, False), (GIB * 5 // 4, False), (GIB * 5 // 4 + 65 * MIB, True)])
def test_clearly_more_than_the_claim_is_a_degradation(measured: int, over: bool) -> None:
    found = over_claim(engine(), {"host": measured})
    assert bool(found) is over
    assert all(each.subject == "memory" for each in found)
    assert over_claim(engine(), {}) == ()


async def test_readiness_is_asked_at_the_port_and_follows_a_redirect_whatever_host_it_names() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Host"] == "engine"
        return web.Response(status=200 if request.query.get("deep") else 404)

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("http://example.invalid/health/?deep=1")

    async def round_about(request: web.Request) -> web.Response:
        raise web.HTTPFound("/loop")

    app = web.Application()
    app.router.add_get("/health", elsewhere)
    app.router.add_get("/health/", answer)
    app.router.add_get("/loop", round_about)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        nowhere = Path("/none.sock")
        assert await EngineClient(nowhere, port).health() == 200
        assert await EngineClient(nowhere, port, "/health/").health() == 404
        assert await EngineClient(nowhere, port, "/loop").health() == 302
        assert not await EngineClient(nowhere, port, "/loop").serves()
    finally:
        await runner.cleanup()
    assert await EngineClient(nowhere, port).health() is None
