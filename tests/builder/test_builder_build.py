"""A whole build with stand-in compilers: what goes wrong, and that a working engine survives all of it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge.board.board import Board, Cpu
from edge.builder.build import BuildReport, build
from edge.builder.compile import NinjaProgress, run_logged
from edge.builder.plan import make_plan
from edge.builder.request import BuildRequest
from edge.builder.source import SourceChoice
from edge.engine.installed import SelectedEngine, ids, load, manifest, read_selection, write_selection
from edge.errors import BuildError, DoesNotFitError, EdgeError, UnavailableError, full_disk_named
from edge.linux.procfs import session_pids
from edge.linux.tree import Tree
from edge.paths import Folders
from tests.builder.installing import put
from tests.fakes.toolchain import programs
from tests.fakes.toolchain.server import write_server
from tests.serving import alive

_BOARD = Board("x86_64", "a PC", None, None, 16 * 1024**3, False, Cpu("x", 2, 2))
_TARGETS = ("llama-server", "llama-quantize", "llama-bench", "llama-gguf-split")


class Bench:
    """A source tree, stand-in tools and one request."""

    def __init__(self, tmp_path: Path, places: Folders) -> None:
        self.bin = tmp_path / "tools"
        self.tree = tmp_path / "tree"
        self.server = write_server(tmp_path / "made/llama-server")
        self.said: list[str] = []
        self.steps: list[NinjaProgress] = []
        self.report = BuildReport(self.said.append, self.steps.append)
        (self.tree / "tools/server").mkdir(parents=True)
        names = ("GGML_CUDA", "GGML_CUDA_NO_VMM", "GGML_NATIVE", "GGML_CPU_ARM_ARCH", "GGML_CCACHE", "GGML_OPENMP")
        (self.tree / "CMakeLists.txt").write_text("".join(f'option({name} "x" OFF)\n' for name in names))
        programs.cmake(self.bin)
        programs.gcc(self.bin, "12.2.0")
        programs.tool(self.bin, "ccache", "ccache version 4.7.5")
        self.outcomes({})
        self.request = BuildRequest(
            folders=places,
            board=_BOARD,
            environment={"PATH": f"{self.bin}:/usr/bin:/bin", "TMPDIR": str(tmp_path)},
            recipe="cpu",
            source=SourceChoice("path", str(self.tree)),
            jobs=4,
        )

    def outcomes(self, *outcomes: dict[str, Any]) -> None:
        files = {name: str(self.server) for name in _TARGETS}
        programs.ninja(self.bin, [{"files": files if not o.get("code") else {}, **o} for o in outcomes])
        (self.bin / "made").unlink(missing_ok=True)

    @property
    def made(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.bin / "made").read_text().splitlines()]

    @property
    def configured(self) -> list[str]:
        return (self.bin / "configured").read_text().splitlines()

    def build(self, **changes: Any):  # type: ignore[no-untyped-def]
        request = replace(self.request, **changes)
        return build(request, make_plan(request), self.report)


@pytest.fixture
def bench(tmp_path: Path, places: Folders) -> Bench:
    return Bench(tmp_path, places)


def test_a_build_is_proved_described_installed_and_selected(bench: Bench, places: Folders) -> None:
    result = bench.build()
    assert result.new and result.engine_id == "unknown-cpu-1"
    assert read_selection(places.engines) == SelectedEngine("unknown-cpu-1", None)
    document = manifest(places.engines, result.engine_id)
    assert set(document["files"]) == {f"bin/{name}" for name in _TARGETS}
    assert document["proof"]["smoke_tokens"] == 16
    assert document["options"]["GGML_CUDA"] == "OFF" and document["options"]["LLAMA_BUILD_UI"] == "OFF"
    assert document["toolchain"] == {"cmake": "3.25.1", "cc": "12.2.0", "nvcc": None}
    assert document["recipe"]["name"] == "cpu" and document["schema"] == 1
    assert load(places.engines, result.engine_id).has("--load-mode")
    assert [step.done for step in bench.steps] == [1, 2, 3, 4]
    assert result.log is not None and "[4/4] Building" in Path(result.log).read_text()


def test_options_that_the_tree_does_not_know_are_reported(bench: Bench, places: Folders) -> None:
    result = bench.build()
    assert "LLAMA_BUILD_UI" in result.notes
    assert any("does not know" in sentence and "LLAMA_BUILD_UI" in sentence for sentence in bench.said)
    assert manifest(places.engines, result.engine_id)["unknown_options"] == list(result.notes)


def test_a_tree_that_lacks_a_critical_option_is_refused(bench: Bench, places: Folders) -> None:
    (bench.tree / "CMakeLists.txt").write_text('option(GGML_NATIVE "x" OFF)\n')
    with pytest.raises(BuildError, match="GGML_CUDA"):
        bench.build()
    assert ids(places.engines) == []


def test_the_next_build_stands_beside_the_former_one(bench: Bench, places: Folders) -> None:
    bench.build()
    result = bench.build()
    assert (result.engine_id, result.previous) == ("unknown-cpu-2", "unknown-cpu-1")
    assert set(ids(places.engines)) == {"unknown-cpu-1", "unknown-cpu-2"}
    assert manifest(places.engines, "unknown-cpu-2")["previous"] == "unknown-cpu-1"


def test_a_pinned_build_of_the_same_fingerprint_does_nothing(
    bench: Bench, places: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(bench.request)
    pinned = replace(plan, source=replace(plan.source, pinned=True, commit="0c1e57098" + "0" * 31))
    put(places.engines, "same", fingerprint=pinned.commands.fingerprint)
    put(places.engines, "other")
    write_selection(places.engines, SelectedEngine("other"))
    result = build(bench.request, replace(pinned, built="same"), bench.report)
    assert (result.engine_id, result.new, result.previous) == ("same", False, "other")
    assert not (bench.bin / "configured").exists() and not (bench.bin / "made").exists()
    assert read_selection(places.engines).current == "same"


def test_fc14_a_killed_compiler_is_retried_with_half_the_jobs_and_no_clean(bench: Bench) -> None:
    killed = {"code": 1, "output": "c++: fatal error: Killed signal terminated program cc1plus"}
    bench.outcomes(killed, killed, {})
    assert bench.build().new
    assert [call[call.index("-j") + 1] for call in bench.made] == ["4", "2", "1"]
    assert len({call[call.index("-C") + 1] for call in bench.made}) == 1
    assert not any("clean" in call for call in bench.made)


def test_fc14_the_kernels_count_of_kills_decides_whatever_a_compiler_printed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter of our own control group: a compiler that died of memory may print nothing that is known."""
    root, after = tmp_path / "root", tmp_path / "after"
    events = root / "sys/fs/cgroup/build/memory.events"
    for path, text in ((root / "proc/self/cgroup", "0::/build\n"), (events, "oom_kill 3\n"), (after, "oom_kill 4\n")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("edge.builder.build._MACHINE", Tree(root))
    unknown = {"code": 1, "output": "x.cpp:1: error: oh", "files": {str(events): str(after)}}
    bench.outcomes(unknown, {})
    assert bench.build().new
    assert [call[call.index("-j") + 1] for call in bench.made] == ["4", "2"]
    bench.outcomes(unknown, {})
    with pytest.raises(BuildError):
        bench.build()
    assert len(bench.made) == 1, "the counter stands where it was"


def test_with_one_job_a_killed_compiler_is_the_end(bench: Bench) -> None:
    bench.outcomes({"code": 1, "output": "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"})
    with pytest.raises(BuildError, match="memory ran out"):
        bench.build(jobs=2)
    assert len(bench.made) == 2


def test_fc07_a_header_mismatch_is_tried_once_more_with_the_safe_cpu(bench: Bench, places: Folders) -> None:
    mismatch = {"code": 1, "output": "arm_neon.h:6: error: inlining failed: target specific option mismatch"}
    bench.outcomes(mismatch, {})
    plan = make_plan(bench.request)
    on_arm = replace(plan, inputs=replace(plan.inputs, machine="aarch64", isa=("asimddp", "fphp", "asimdhp")))
    result = build(bench.request, on_arm, bench.report)
    options = manifest(places.engines, result.engine_id)["options"]
    assert options["GGML_CPU_ARM_ARCH"] == "armv8-a", "what was built is what is written down"
    first, second = bench.configured
    assert "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16" in first and "-DGGML_NATIVE=OFF" in first
    assert "-DGGML_CPU_ARM_ARCH=armv8-a" in second
    bench.outcomes(mismatch)
    with pytest.raises(BuildError, match="disagree"):
        build(bench.request, on_arm, bench.report)
    assert len(bench.made) == 2, "once more, not without end"


def test_an_engine_that_crashes_at_the_proof_is_installed_with_what_works(bench: Bench, places: Folders) -> None:
    bench.server = write_server(bench.server, crashes_without="--no-repack")
    bench.outcomes({})
    engine = load(places.engines, bench.build().engine_id)
    assert [off.args for off in engine.without] == [("--no-repack",)]
    assert any("prompts are slower on the CPU" in line for line in bench.said)


def test_a_build_for_any_cpu_detects_nothing_and_has_its_own_folder(bench: Bench) -> None:
    native, portable = make_plan(bench.request), make_plan(replace(bench.request, native=False))
    assert "-DGGML_NATIVE=OFF" in portable.commands.configure
    assert "-DGGML_NATIVE=OFF" not in native.commands.configure
    assert portable.commands.fingerprint != native.commands.fingerprint


FAILURES: list[tuple[str, dict[str, Any]]] = [
    ("disk is full", {"code": 1, "output": "fatal error: error writing to x.o: No space left on device"}),
    ("does not know this GPU", {"code": 1, "output": "nvcc fatal   : Unsupported gpu architecture 'compute_120a'"}),
    ("build failed", {"code": 2, "output": "x.cpp:1: error: y"}),
    ("build failed", {"code": -9, "output": ""}),
]


@pytest.mark.parametrize(("sentence", "outcome"), FAILURES)
def test_no_failing_build_replaces_a_working_engine(
    bench: Bench, places: Folders, sentence: str, outcome: dict[str, Any]
) -> None:
    put(places.engines, "good-cpu-1")
    write_selection(places.engines, SelectedEngine("good-cpu-1"))
    bench.outcomes(outcome)
    with pytest.raises(BuildError, match=sentence) as caught:
        bench.build()
    assert "log:" in str(caught.value)
    assert read_selection(places.engines) == SelectedEngine("good-cpu-1")
    assert ids(places.engines) == ["good-cpu-1"]
    assert {entry.name for entry in places.engines.iterdir()} == {"good-cpu-1", "selected.json", ".lock"}


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("exit code 127.*libllama", {"needs_library": True}),  # FC-10
    ("exit code 3", {"version_code": 3}),
    ("not a llama-server", {"help": "usage: something else\n"}),
    ("died .*invalid magic", {"dies": "error: invalid magic"}),
    ("failed with 500", {"completion_code": 500}),
    ("failed with 200", {"tokens": 0}),
]


@pytest.mark.parametrize(("sentence", "behaviour"), BROKEN)
def test_an_engine_that_cannot_prove_itself_is_not_installed(
    bench: Bench, places: Folders, sentence: str, behaviour: dict[str, Any]
) -> None:
    put(places.engines, "good-cpu-1")
    write_selection(places.engines, SelectedEngine("good-cpu-1"))
    write_server(bench.server, **behaviour)
    with pytest.raises(BuildError, match=sentence):
        bench.build()
    assert read_selection(places.engines) == SelectedEngine("good-cpu-1")
    assert ids(places.engines) == ["good-cpu-1"]


def test_fc14_the_preflight_stops_before_anything_is_fetched(bench: Bench) -> None:
    plan = make_plan(bench.request)
    for name, kind in (("disk", DoesNotFitError), ("clock", UnavailableError)):
        finding = next(f for f in plan.preflight.findings if f.name == name)
        failed = replace(plan.preflight, findings=(replace(finding, verdict="fail", hint="do this"),))
        with pytest.raises(kind) as caught:
            build(bench.request, replace(plan, preflight=failed), bench.report)
        assert caught.value.hint == "do this"
    assert not (bench.bin / "configured").exists()


def test_fc13_sources_from_the_future(bench: Bench) -> None:
    ahead = time.time() + 7200
    os.utime(bench.tree / "CMakeLists.txt", (ahead, ahead))
    with pytest.raises(UnavailableError, match="clock"):
        bench.build()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_fc14_a_disk_that_is_full_at_the_last_step(bench: Bench, places: Folders) -> None:
    """The programs do not fit beside the working engine: said so, and nothing half copied stays."""
    places.engines.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(places.engines)], check=True)
    try:
        put(places.engines, "good-cpu-1")
        write_selection(places.engines, SelectedEngine("good-cpu-1"))
        bench.server.write_bytes(bench.server.read_bytes() + b"\n" + b"#" * 100_000)
        with pytest.raises(BuildError, match="No space left"):
            bench.build()
        assert read_selection(places.engines) == SelectedEngine("good-cpu-1")
        assert ids(places.engines) == ["good-cpu-1"]
        assert load(places.engines, "good-cpu-1").id == "good-cpu-1"
        assert list(places.engines.glob(".new-*")) == []
    finally:
        subprocess.run(["umount", str(places.engines)], check=True)


def test_fc14_a_disk_that_fills_up_while_it_compiles(bench: Bench, places: Folders, tmp_path: Path) -> None:
    """The log lies on the disk that is full: the compiler's message is still read."""
    lines: list[str] = []
    said = ["sh", "-c", "echo 'fatal error: No space left on device'; exit 1"]
    assert run_logged(said, {"PATH": "/usr/bin:/bin"}, Path("/dev/full"), lines.append) == 1
    assert lines == ["fatal error: No space left on device"]
    bench.outcomes({"code": 1, "output": lines[0]})
    with pytest.raises(BuildError, match="disk is full"):
        bench.build()
    with pytest.raises(BuildError, match="disk is full: /x"), full_disk_named():
        raise OSError(errno.ENOSPC, "No space left on device", "/x")
    with pytest.raises(PermissionError), full_disk_named():
        raise PermissionError(errno.EACCES, "no")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_builds_nothing_that_another_user_could_have_planted(bench: Bench, places: Folders) -> None:
    places.cache.mkdir(parents=True, exist_ok=True)
    os.chown(places.cache, 65534, 65534)
    tool = places.cache / "tools/bin/cmake"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!/bin/sh\ntouch {bench.bin}/planted\necho 3.31\n")
    tool.chmod(0o755)
    with pytest.raises(UnavailableError, match="another user may write"):
        bench.build()
    assert not (bench.bin / "configured").exists() and not (bench.bin / "planted").exists()


def test_only_one_build_at_a_time(bench: Bench, places: Folders) -> None:
    from edge.builder.install import locked

    with locked(places.engines), pytest.raises(UnavailableError, match="another build"):
        bench.build()


def test_a_shells_compiler_flags_do_not_reach_the_compiler(bench: Bench) -> None:
    bench.outcomes({"code": 0})
    programs.program(
        bench.bin / "cmake", 'if [ "$1" = --version ]; then echo cmake version 3.25.1; else env; exit 1; fi'
    )
    with pytest.raises(BuildError) as caught:
        bench.build(
            environment={**bench.request.environment, "CFLAGS": "-O0", "LLAMA_ARG_TOOLS": "all", "CCACHE_DIR": "/c"}
        )
    log = Path(str(caught.value).partition("log: ")[2].rstrip(")")).read_text()
    assert "CCACHE_DIR=/c" in log and "LC_ALL=C" in log
    assert "-O0" not in log and "LLAMA_ARG" not in log


def test_interrupted_builds_leave_no_compiler_and_can_go_on(bench: Bench, places: Folders, tmp_path: Path) -> None:
    """Ctrl-C: ninja and a compiler that ignores the interrupt are both gone; the build folder stays."""
    marker = tmp_path / "compiler.pid"
    bench.outcomes({"hang": str(marker)})
    script = tmp_path / "run.py"
    ninja, log = [str(bench.bin / "ninja"), "-C", str(tmp_path), "-j", "1"], str(tmp_path / "log")
    script.write_text(
        "from pathlib import Path\n"
        "import edge.builder.compile as compile\n"
        "compile._GRACE_S = 0.3\n"
        f"compile.run_logged({ninja!r}, {{'PATH': '/usr/bin:/bin'}}, Path({log!r}), lambda line: None)\n"
    )
    child = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=Path.cwd(),
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    try:
        deadline = time.monotonic() + 60
        while not (marker.exists() and marker.read_text()):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        compiler = int(marker.read_text())
        session = os.getsid(compiler)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) != 0
        assert session_pids(session) == []
        assert not alive(compiler)
    finally:
        child.kill()
        child.wait()


def test_every_fault_is_an_edge_error(bench: Bench) -> None:
    (bench.bin / "cmake").unlink()
    with pytest.raises(EdgeError) as caught:
        bench.build(environment={"PATH": str(bench.bin)})
    assert caught.value.hint and "--fetch-tools" in caught.value.hint
