"""`edgellm bench load` and `bench serve`, over the fake engine: real processes, real plans, real HTTP."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from edge.bench.load import LoadRow, choice_of, cold_winner, drop_pages, winner
from edge.bench.serve import SILENCE_S, LoadLevel, TimedAnswer, document, llama_bench, page, read_event, runs_as
from edge.board.probe import probe
from edge.cli.chat import key_of, named_faults
from edge.engine.inspect import Identity
from edge.engine.installed import SelectedEngine, write_selection
from edge.errors import EdgeError, UsageError
from edge.linux.procfs import resident_ratio
from edge.models.open import open_model
from edge.plan import start_records
from edge.plan.choices import LoadChoice, choice_for, chosen_mode, read_choices, size_class, write_choice
from edge.plan.plan import Ladder, LaunchPlan, ModelPlan, Plan
from edge.units import GIB
from tests.daemon.served import Served, config_text, install, served
from tests.fakes import llama_switches
from tests.plan import shapes
from tests.serving import children, edgellm, eventually
from tests.supervisor.rig import launch_plan, settings


def choice(mode: str = "none", mount: str = "/", kind: int = 0, offload: str = "none", board: str = "b") -> LoadChoice:
    return LoadChoice(board, "e", mount, kind, offload, mode, 1.0)


def test_a_choice_holds_for_its_disk_size_and_offload() -> None:
    choices = [choice("none"), choice("mmap", "/data"), choice("dio", "/data", 1, "full")]
    assert chosen_mode(choices, "/data/m.gguf", 1, "none") == "mmap", "the innermost mount"
    assert chosen_mode(choices, "/home/m.gguf", 1, "none") == "none"
    assert chosen_mode(choices, "/data/m.gguf", 2 * GIB, "full") == "dio"
    assert chosen_mode(choices, "/data/m.gguf", 2 * GIB, "none") is None, "another size class"
    assert chosen_mode(choices, "/database/m.gguf", 1, "none") == "none", "not a folder of /data"
    assert [size_class(size * GIB) for size in (1, 2, 5, 17, 65)] == [0, 1, 2, 3, 4]


def test_dio_is_never_used_with_a_partial_offload() -> None:
    assert chosen_mode([choice("dio", offload="partial")], "/m.gguf", 1, "partial") is None


def test_a_winner_with_prefetch_is_kept_as_such(tmp_path: Path) -> None:
    write_choice(tmp_path / "c.json", replace(choice("mmap"), prefetch=True))
    (found,) = read_choices(tmp_path / "c.json", LoadChoice, "b", "e")
    assert found.prefetch and choice_for([found], "/m.gguf", 1, "none") == found


def test_choices_are_kept_by_board_and_engine_and_damage_is_none(tmp_path: Path) -> None:
    path = tmp_path / "load_modes.json"
    for each in (choice("mmap"), choice("none"), choice("mmap", board="other")):
        write_choice(path, each)
    assert read_choices(path, LoadChoice, "b", "e") == (choice("none"),)
    path.write_text('{"schema": 1, "choices": [{"board": 3}]}')
    assert read_choices(path, LoadChoice, "b", "e") == ()
    write_choice(path, choice("dio"))
    assert [each.mode for each in read_choices(path, LoadChoice, "b", "e")] == ["dio"]


def test_the_winner_counts_cold_and_warm_starts() -> None:
    rows = [LoadRow("none", [3.0, 3.0], [1.0]), LoadRow("mmap", [2.0], [1.5]), LoadRow("dio", note="not here")]
    best = winner([*rows, LoadRow("auto", [0.1], [0.1])])
    assert best is not None and best.mode == "mmap"
    assert winner([LoadRow("dio", note="no")]) is None


@pytest.mark.parametrize(
    ("rows", "mode", "ahead"),
    [
        ([LoadRow("mmap", [2.0], [1.0]), LoadRow("mmap+prefetch", [2.6], [1.0])], "mmap", False),
        ([LoadRow("mmap", [2.0], [1.0]), LoadRow("mmap+prefetch", [1.4], [1.0])], "mmap", True),
        (
            [LoadRow("dio", [3.0], [3.0]), LoadRow("none", [3.5], [1.0])],
            "none",
            False,
        ),  # dio gains nothing from a cache
        ([LoadRow("dio", [1.0], [1.0]), LoadRow("none", [3.5], [1.0])], "dio", False),
    ],
)
def test_a_way_that_loses_here_is_not_kept(
    rows: list[LoadRow], mode: str, ahead: bool, tmp_path: Path, smollm2: Path
) -> None:
    """Reading ahead that hurts and dio that loses: from the measurement to what the next plan takes."""
    best = winner(rows)
    assert best is not None
    plan, model, launch = planned(smollm2, n_gpu_layers=99)
    write_choice(tmp_path / "c.json", choice_of(best, plan, model, launch))
    kept = read_choices(tmp_path / "c.json", LoadChoice, plan.board.id, plan.engine.id)
    found = choice_for(kept, model.model.path, model.model.bytes, "full")
    assert found is not None and (found.mode, found.prefetch) == (mode, ahead)


@pytest.mark.parametrize(
    ("rows", "usual", "cold"),
    [
        # An H200, 8.72 GB: docs/numbers.md.
        ([LoadRow("mmap", [5.79], [1.45]), LoadRow("dio", [5.06], [5.16])], "mmap", ("dio", 0.16)),
        # The mean of both would be dio's, which loses nine seconds of each warm start.
        ([LoadRow("mmap", [20.0], [1.0]), LoadRow("dio", [10.0], [10.0])], "mmap", ("dio", 0.53)),
        ([LoadRow("mmap", [5.2], [1.45]), LoadRow("dio", [5.06], [5.16])], "mmap", None),  # within the noise
        ([LoadRow("mmap", [2.0], [1.0]), LoadRow("none", [3.0], [1.5])], "mmap", None),
        (
            [LoadRow("mmap", [6.0], [1.0]), LoadRow("mmap+prefetch", [4.0], [1.1]), LoadRow("dio", [3.9], [3.9])],
            "mmap+prefetch",
            None,
        ),
        (
            [LoadRow("mmap", [6.0], [1.0]), LoadRow("mmap+prefetch", [4.0], [0.9]), LoadRow("dio", [3.0], [3.0])],
            "mmap+prefetch",
            ("dio", 0.32),
        ),
        ([LoadRow("mmap", [6.0]), LoadRow("dio", [3.0])], "dio", None),  # --cold: nothing is known of a warm start
        ([LoadRow("mmap", [6.0], [1.0]), LoadRow("dio", note="not here")], "mmap", None),
    ],
)
def test_a_cold_start_has_a_mode_of_its_own_where_that_gains(
    rows: list[LoadRow], usual: str, cold: tuple[str, float] | None, smollm2: Path
) -> None:
    best = winner(rows, warm=True)
    assert best is not None and best.mode == usual
    found = cold_winner(rows, best)
    assert (found and (found[0].mode, found[1])) == cold
    kept = choice_of(best, *planned(smollm2, n_gpu_layers=99), rows)
    assert (kept.cold_mode, kept.cold_below) == (cold or (None, 0.0))
    assert kept.mode == usual.partition("+")[0] and kept.prefetch == ("+" in usual and cold is None)
    partial = choice_of(best, *planned(smollm2, n_gpu_layers=3), rows)
    assert partial.cold_mode is None and partial.offload == "partial"


def planned(path: Path, n_gpu_layers: int) -> tuple[Plan, ModelPlan, LaunchPlan]:
    launch = launch_plan(("x",), 0, settings(n_gpu_layers=n_gpu_layers))
    model = ModelPlan("chat", (), open_model(path), Ladder((launch,), 0))
    return Plan(shapes.gpu_board(24), shapes.engine(cuda=True), {"chat": model}), model, launch


def test_load_measures_each_mode_and_the_plan_uses_the_winner(short_dir: Path, smollm2: Path) -> None:
    state = short_dir / "s"
    (state / "config").mkdir(parents=True)
    (state / "config" / "edgellm.toml").write_text(config_text(f'id = "chat"\nref = "{smollm2}"'))
    fake = install(state / "data", "fake-cpu-1")
    write_selection(state / "data" / "engines", SelectedEngine("fake-cpu-1"))
    options = ("--set", "load_mode=auto", "--state-dir", str(state))
    done = edgellm(
        "bench",
        "load",
        "--repeat",
        "2",
        "--modes",
        "none,mmap,dio,none+prefetch",
        "--apply",
        "--json",
        "--state-dir",
        str(state),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["mode"]: row for row in result["rows"]}
    assert [len(rows[mode]["cold_s"]) for mode in ("none", "mmap")] == [2, 2] and len(rows["none"]["warm_s"]) == 2
    assert "needs all weights on the GPU" in rows["dio"]["note"]
    assert result["winner"]["mode"] in ("none", "mmap") and result["applied"] is True
    assert len(llama_switches.starts(fake)) == 12
    plan = json.loads(edgellm("plan", "--json", *options).stdout)["models"]["chat"]
    assert plan["ladder"][plan["chosen"]]["settings"]["load_mode"] == result["winner"]["mode"]
    assert "measured by `edgellm bench load`" in edgellm("plan", *options).stdout


def test_load_refuses_beside_a_running_instance_and_unknown_modes(short_dir: Path, smollm2: Path) -> None:
    with served(short_dir, f'id = "chat"\nref = "{smollm2}"') as up:
        assert "stop it first" in up.cli("bench", "load", rc=69)
    wrong = edgellm("bench", "load", "--modes", "quick", "--state-dir", str(up.state))
    assert wrong.returncode == 64 and "unknown load mode" in wrong.stderr


def test_serve_measures_levels_and_writes_one_page(short_dir: Path, smollm2: Path) -> None:
    report = short_dir / "report.html"
    with served(short_dir, f'id = "chat"\nref = "{smollm2}"') as up:
        assert isinstance(up, Served)
        arguments = ("--clients", "1,2", "--seconds", "0", "--max-tokens", "4", "--html", str(report), "--json")
        results = json.loads(up.cli("bench", "serve", *arguments))
    assert [(level["clients"], level["requests"]) for level in results["levels"]] == [(1, 2), (2, 4)]
    assert all(level["ttft_s"]["p50"] > 0 and level["tokens_s"] > 0 for level in results["levels"])
    assert len(results["answers"]) == 6 and results["model"] == "chat"
    text = report.read_text()
    assert text.startswith("<!doctype html>") and text.count("<svg") >= 1 and "http" not in text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(401, json={"error": {"message": "Invalid API Key"}}), "this server needs a key"),
        (httpx.RemoteProtocolError("peer closed connection"), "the answer broke off"),
        (httpx.ConnectError("refused"), "nothing answers at http://h"),
        (httpx.ReadTimeout("slow"), "http://h sent nothing for 600 s"),
    ],
)
def test_a_fault_of_the_server_is_named_and_no_bug(answer: httpx.Response | Exception, said: str) -> None:
    with pytest.raises(EdgeError, match=said), named_faults("http://h", SILENCE_S):
        if isinstance(answer, Exception):
            raise answer
        answer.request = httpx.Request("POST", "http://h")
        answer.raise_for_status()


@pytest.mark.parametrize("key", ["sk\n", "\u00e9"])
def test_what_is_no_key_is_named(key: str) -> None:
    with pytest.raises(UsageError, match="EDGELLM_API_KEY holds no key"):
        key_of({"EDGELLM_API_KEY": key})


@pytest.mark.parametrize(
    "event",
    [
        '{"choices":null,"usage":null,"timings":[]}',
        '{"choices":[{"delta":null}],"usage":{"prompt_tokens":"x","completion_tokens":null}}',
        '{"choices":[null],"timings":{"predicted_per_second":NaN,"prompt_per_second":1e400}}',
        "[" * 100_000,
        "{",
    ],
)
def test_an_event_of_another_shape_ends_no_measurement(event: str) -> None:
    assert read_event(event) == {"text": False, "usage": {}, "timings": {}}


def test_llama_bench_beside_the_engine_is_run_with_its_options(short_dir: Path, smollm2: Path) -> None:
    said = [{"n_prompt": 200, "n_gen": 0, "avg_ts": 512.34}, {"n_prompt": 0, "n_gen": 4, "avg_ts": 40.5}]
    with served(short_dir, f'id = "chat"\nref = "{smollm2}"') as up:
        bench = up.fake / "llama-bench"
        bench.write_text(f"#!/bin/sh\necho \"$@\" > {short_dir}/asked\ncat <<'END'\n{json.dumps(said)}\nEND\n")
        bench.chmod(0o755)
        arguments = ("--clients", "1", "--seconds", "0", "--max-tokens", "4")
        results = json.loads(up.cli("bench", "serve", *arguments, "--json"))
        asked = (short_dir / "asked").read_text().split()
        assert results["llama_bench"] == {"prompt_tokens_s": 512.34, "tokens_s": 40.5}
        assert asked[asked.index("-m") + 1] == str(smollm2) and asked[-4:] == ["-p", "200", "-n", "4"]
        assert "-t" in asked
        bench.write_text("#!/bin/sh\necho 'no memory' >&2\nexit 3\n")
        assert "llama-bench ended with 3: no memory" in up.cli("bench", "serve", *arguments)
        bench.unlink()
        assert json.loads(up.cli("bench", "serve", *arguments, "--json"))["llama_bench"] is None
        for clients in ("x", "1,x", "0", "-1", ",", "9" * 5000):
            assert "not numbers of clients" in up.cli("bench", "serve", "--clients", clients, rc=64)
        lost = up.cli("bench", "serve", *arguments, "--html", "/dev/full", rc=74)
        assert "/dev/full: No space left on device" in lost


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_root_runs_no_llama_bench_that_a_server_names(short_dir: Path) -> None:
    """The process of the status may be any of the service's user: its program runs as that user, or as its owner."""
    program = short_dir / "llama-bench"
    program.write_text("")
    program.chmod(0o755)
    assert runs_as(os.getpid(), program) == Identity()
    with subprocess.Popen(["sleep", "60"], user=12345, group=12346, extra_groups=[12347]) as other:
        assert runs_as(other.pid, program) == Identity(12345, 12346, [12347])
        other.kill()
    os.chown(program, 12345, 12345)
    assert runs_as(os.getpid(), program).user == 12345
    program.write_text(f"#!/bin/sh\n(id -u; pwd) > {short_dir}/ran\necho '[]'\n")
    short_dir.chmod(0o777)
    assert llama_bench([str(program)], os.getpid()) == {}
    # llama.cpp loads backends from the current folder.
    assert (short_dir / "ran").read_text() == "12345\n/\n"


def test_drift_and_energy_are_shown_where_they_are_known() -> None:
    answers = [TimedAnswer(float(n), 0.1, [0.02], 10, 20, 100.0, 40.0 if n < 8 else 30.0) for n in range(16)]
    level = LoadLevel(1, 10.0, answers, watts=8.0)
    summary = level.summary()
    assert summary["drift"] == 0.75 and summary["tokens_per_joule"] == 2.0 and summary["tokens_s"] == 16.0
    assert LoadLevel(1, 1.0, answers[:4]).summary()["drift"] is None
    assert LoadLevel(1, 1.0).summary()["ttft_s"] is None
    hostile = document("<script>", {"engine": "<b>"}, [level, LoadLevel(2, 1.0)])
    assert "<script>" not in page(hostile) and "&lt;script&gt;" in page(hostile)


def test_a_start_reads_ahead_where_that_won(short_dir: Path, smollm2: Path) -> None:
    """The fake engine reads nothing of the model: what is in the page cache came from the prefetch."""
    state, model = short_dir / "s", short_dir / "m" / "SmolLM2-135M-Instruct-Q4_1.gguf"
    model.parent.mkdir()
    shutil.copyfile(smollm2, model)
    drop_pages(model)
    if (resident_ratio(model) or 0.0) > 0.1:
        pytest.skip("this file system keeps its pages (tmpfs)")
    (state / "config").mkdir(parents=True)
    (state / "config" / "edgellm.toml").write_text(config_text(f'id = "chat"\nref = "{model}"'))
    cached = short_dir / "cached"
    install(state / "data", "fake-cpu-1", silent_until=str(cached))
    write_selection(state / "data" / "engines", SelectedEngine("fake-cpu-1"))
    mode = json.loads(edgellm("plan", "--json", "--state-dir", str(state)).stdout)["models"]["chat"]["ladder"][0]
    kept = LoadChoice(probe().id, "fake-cpu-1", "/", 0, "none", mode["settings"]["load_mode"], 1.0, prefetch=True)
    write_choice(state / "data" / "load_modes.json", kept)
    drop_pages(model)
    with Served(state) as up:
        # The loader may overtake the reader at the end, and the kernel may drop a page under pressure.
        eventually(lambda: (resident_ratio(model) or 0.0) > 0.95, lambda: f"{resident_ratio(model)}: {up.output}")
        cached.touch()
        up.wait_for("ok")
        starts = state / "state/main/starts.jsonl"
        (row,) = eventually(lambda: start_records.read(starts), "the start is recorded")
        assert row["cache_state"]["resident_ratio"] < 0.5, "before the start"
        eventually(lambda: not reads_ahead(up.process.pid), "the reader ends by itself")


def reads_ahead(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return any(b"prefetch" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children(pid))
    return True
