"""No log line can stop the event loop: every pattern takes 64 kB of anything, and lines are cut before matching."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.config.devices import rpc_address
from edge.plan.calibration import measure
from edge.resources import data_dir, load_toml
from edge.supervisor import process_io
from edge.supervisor.process_io import TURN_BYTES, PipeLines, read_lines
from edge.supervisor.rpc_server import RpcRequest, RpcServer
from edge.supervisor.start import LINE_CHARACTERS, Attempt
from edge.supervisor.start_log import LOADED
from tests.supervisor.rig import PATTERNS, TABLE, launch_plan, settings

LENGTH = 64 * 1024
CPU_S = 20  # all patterns together take about a second; one that is quadratic in the line takes longer than this
LITERAL = re.compile(r"[A-Za-z_: ]{3,}")


def every_pattern() -> list[str]:
    table = load_toml(data_dir("build") / "llama-server.toml")
    groups = [value for name in ("gates", "marks", "facts", "noise", "rpc") for value in table[name].values()]
    listed = [pattern for group in groups for pattern in ([group] if isinstance(group, str) else group)]
    return [*listed, *(row["pattern"] for row in table["signatures"])]


def lines(pattern: str) -> Iterator[str]:
    """Yield lines that are long everywhere a pattern could wait for its end: repeated, or after each of its words."""
    for unit in ("x", " ", "1", "1.", "a ", "'", "- "):
        yield unit * (LENGTH // len(unit))
    for unit in beginnings(pattern):
        yield unit * (LENGTH // len(unit))
        yield (unit + "a (1 MiB, ") * (LENGTH // (len(unit) + 10))
    for literal in LITERAL.findall(pattern):
        yield literal * (LENGTH // len(literal))
        yield from (literal + fill * (LENGTH - len(literal)) for fill in ("x", " ", "1"))


def beginnings(pattern: str) -> Iterator[str]:
    """Yield the text before each place where a pattern takes any character: repeated, each one is a new beginning."""
    for written, plain in ((r"\d+", "1"), (r"\d{1,6}", "1"), (r"\s*", " "), (r"\s", " "), (r"\w+", "a"), (r"\.", ".")):
        pattern = pattern.replace(written, plain)
    pattern = re.sub(r"\(\?P<\w+>|\(\?:|(?<!\\)[()?^]", "", pattern).replace("\\", "")
    for branch in pattern.split("|"):
        heads = re.split(r"\.[+*{]|\[\^", branch)[:-1]
        yield from (head for head in heads if head.strip())


def search_all() -> None:
    for pattern in every_pattern():
        compiled = re.compile(pattern)
        for line in lines(pattern):
            compiled.search(line)
    measure("calibration reads the same lines", lines("CUDA0 model buffer size = 1.0 MiB"))


def test_each_pattern_takes_64_kb_of_anything() -> None:
    """In a process with a limit of CPU time, so that a machine under load does not fail it."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))\n"
        f"from tests.supervisor.{Path(__file__).stem} import search_all; search_all()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_long_line_is_cut_before_it_is_matched_and_kept() -> None:
    attempt = Attempt(launch_plan(("x",), 0, settings()), PATTERNS, 100.0, 1)
    attempt.stderr("x" * LENGTH + " llama_context: constructing llama_context", 101.0)
    assert not attempt.gates.openings.get("weights")
    assert [len(line) for line in attempt.tail] == [LINE_CHARACTERS]


def test_a_long_line_of_an_rpc_server_is_cut_too() -> None:
    kept: list[str] = []
    request = RpcRequest(Path("rpc-server"), rpc_address("127.0.0.1:50052"), {})
    server = RpcServer(request, TABLE, lambda _: None, kept.append)
    server._line("  CUDA0: " + "x" * LENGTH + " (1 MiB, 1 MiB free)")
    server._line("  CUDA0: Orin (8000 MiB, 6000 MiB free)")
    assert server._listed == ["CUDA0 Orin"] and len(kept[0]) == LINE_CHARACTERS
    assert [len(line) for line in server._tail] == [len(line) for line in kept]


async def test_a_flood_of_lines_leaves_turns_of_the_loop_to_others() -> None:
    """The gateway, probes and the watchdog share the event loop with the log of a start."""
    read_end, write_end = os.pipe()
    lines: list[str] = []
    turns: list[int] = []
    transport, protocol = await read_lines(os.fdopen(read_end, "rb"), lines.append)
    flood = b"x" * 99 + b"\n"
    count = 20 * TURN_BYTES // len(flood)
    writing = asyncio.create_task(asyncio.to_thread(write_all, write_end, flood * count))
    while not protocol.ended.is_set():
        turns.append(len(lines))
        await asyncio.sleep(0)
    await writing
    transport.close()
    assert len(lines) == count, "none is lost"
    steps = [after - before for before, after in itertools.pairwise([*turns, len(lines)])]
    assert max(steps) * len(flood) <= 2 * TURN_BYTES


def write_all(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(data)


async def test_an_engine_that_floods_waits_for_its_pipe_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop, which is never at rest, shares its core with nothing; the last lines of the dead come at once."""
    monkeypatch.setattr(process_io, "BURST_BYTES", 1000)
    judged: list[bool] = []
    floods = PipeLines._floods

    def noted(self: PipeLines, count: int) -> bool:
        judged.append(floods(self, count))
        return judged[-1]

    monkeypatch.setattr(PipeLines, "_floods", noted)
    for hurry in (False, True):
        read_end, write_end = os.pipe()
        lines: list[str] = []
        judged.clear()
        transport, protocol = await read_lines(os.fdopen(read_end, "rb"), lines.append)
        if hurry:
            protocol.hurry()
        writing = asyncio.create_task(asyncio.to_thread(write_all, write_end, b"x\n" * 50_000))
        await protocol.ended.wait()
        await writing
        transport.close()
        assert len(lines) == 50_000
        assert any(judged) is not hurry


def test_what_decides_is_anchored_at_the_begin_of_a_message() -> None:
    """A model's metadata and a client's text may hold any line of the engine, but not at the begin of one."""
    decides = {f"fact {name}": each for name, each in TABLE["facts"].items()}
    decides |= {f"gate {name}": TABLE["gates"][name] for name in ("weights", "kv_cache")}
    decides |= {f"mark {name}": TABLE["marks"][name] for name in ("tensors_begin", *LOADED)}
    decides |= {f"noise {name}": TABLE["noise"][name] for name in ("requests", "template_begins", "template_ends")}
    for name, patterns in decides.items():
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            assert pattern.startswith("^"), f"{name}: {pattern}"


def test_a_quoted_echo_of_a_probe_is_progress_and_no_echo() -> None:
    assert PATTERNS.noise("srv  log_server_r: request: GET /health 127.0.0.1 503")
    assert PATTERNS.noise("srv  log_server_r: done request: GET /health 127.0.0.1 200")
    assert not PATTERNS.noise("slot 0: the text 'done request: ' of a client")
