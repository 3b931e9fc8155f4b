"""Exit status, last log lines and the kernel's evidence give kind, fault and one next step."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from edge.supervisor.diagnose import Death, diagnose, find_cause
from edge.supervisor.oom import OomWitness, named_in_kernel_log
from edge.supervisor.policy import EngineFault
from edge.supervisor.process import ExitStatus
from tests.fakes import engine_log
from tests.supervisor.rig import PATTERNS
from tests.supervisor.test_supervisor_engine_patterns import LINES


def status(code: int | None = None, signal: int | None = None) -> ExitStatus:
    return ExitStatus(code, signal, 3.25)


@pytest.mark.parametrize("id", [row.id for row in PATTERNS.signatures if not row.serves])
def test_every_signature_is_a_diagnosis(id: str) -> None:
    """Each known cause matches a line of its kind and gives the fault that the state machine acts on."""
    row = next(each for each in PATTERNS.signatures if each.id == id)
    for line in LINES[id]:
        found = diagnose(Death(status(1), ["something before", line]), PATTERNS)
        assert found.failure.kind == row.kind and found.failure.hint == row.hint
        expected = EngineFault.PERMANENT if row.permanent else EngineFault.CRASH
        if row.device:
            expected = EngineFault.DEVICE
        if row.oom:
            expected = EngineFault.NVMAP if row.kind == "nvmap_refused" else EngineFault.OOM
        assert found.fault is expected
        assert line in found.failure.evidence and "exit code 1 after 3.2 s" in found.failure.evidence


# As llama.cpp prints them (ggml/src/gguf.cpp, src/llama-model-loader.cpp, src/llama-adapter.cpp, tools/mtmd/clip.cpp).
NAMED = (
    "srv    load_model: loading model '/m/{}.gguf'",
    "cmn  common_init_: failed to load model '/m/{}.gguf'",
    "llama_model_load: error loading model: llama_model_loader: failed to load model from /m/{}.gguf",
    "gguf_init_from_reader: tensor '{}' has offset 31744544, expected 31744512",
    "gguf_init_from_reader: key '{}' has invalid GGUF type 99",
    "llama_model_load: error loading model: unknown model architecture: '{}'",
    "llama_model_load: error loading model: error loading model vocabulary: unknown pre-tokenizer type: '{}'",
    "llama_adapter_lora_init: failed to apply lora adapter: LoRA tensor '{}' has unexpected suffix",
    "llama_adapter_lora_init: failed to apply lora adapter: expect general.type to be 'adapter', but got: {}",
    "clip_init: failed to load model '/m/x.gguf': load_hparams: unknown projector type: {}",
)


@pytest.mark.parametrize("line", NAMED)
def test_no_name_of_a_file_a_tensor_or_a_key_is_a_cause(line: str) -> None:
    """NvMapMemHandleAlloc: error.gguf took every rung with all memory free; a tensor rolled a new engine back."""
    own = find_cause([line.format("x")], PATTERNS)
    for id, texts in LINES.items():
        for text in texts:
            for name in (text, f"it's {text} ' {text}", f"a.gguf {text}"):
                found = find_cause([line.format(name), engine_log.prefixed(line.format(name), 0.1)], PATTERNS)
                assert found is own, (id, name)
                assert own is None or own.kind in ("bad_model", "model_too_new", "load_failed")


def test_there_are_enough_signatures() -> None:
    assert len(PATTERNS.signatures) >= 30


@pytest.mark.parametrize("id", [row.id for row in PATTERNS.signatures if row.serves])
def test_what_only_explains_is_no_cause_of_death(id: str) -> None:
    found = diagnose(Death(status(1), LINES[id]), PATTERNS)
    assert found.failure.kind == "exited"


@pytest.mark.parametrize(
    ("death", "fault", "kind"),
    [
        (Death(status(signal=signal.SIGKILL), oom_killed=True), EngineFault.OOM, "out_of_memory"),
        (Death(status(signal=signal.SIGKILL)), EngineFault.KILLED, "killed"),
        (Death(status(signal=signal.SIGKILL), asked=True), EngineFault.CRASH, "hung"),
        (Death(status(signal=signal.SIGSEGV)), EngineFault.CRASH, "signal_segv"),
        (Death(status(signal=signal.SIGSEGV), oom_killed=True), EngineFault.CRASH, "signal_segv"),
        (Death(status(signal=signal.SIGILL)), EngineFault.PERMANENT, "wrong_cpu"),
        (Death(status(signal=63)), EngineFault.CRASH, "signal_63"),
        (Death(status(64)), EngineFault.PERMANENT, "bad_flag"),
        (Death(status(64), served=True), EngineFault.CRASH, "exited"),
        (Death(status(127)), EngineFault.PERMANENT, "install_fault"),
        (Death(status(126)), EngineFault.PERMANENT, "install_fault"),
        (Death(status(126), served=True), EngineFault.CRASH, "exited"),
        (Death(status(signal=signal.SIGSYS)), EngineFault.PERMANENT, "signal_sys"),
        (Death(status(signal=signal.SIGSYS), served=True), EngineFault.CRASH, "signal_sys"),
        (Death(status(0)), EngineFault.CRASH, "exited"),
    ],
)
def test_without_a_known_line_exit_and_kernel_decide(death: Death, fault: EngineFault, kind: str) -> None:
    found = diagnose(death, PATTERNS)
    assert (found.fault, found.failure.kind) == (fault, kind)
    assert found.failure.hint and "it printed nothing" in found.failure.evidence


def test_an_old_complaint_is_not_what_a_server_died_of() -> None:
    """It served for days after that line."""
    log = ["std::bad_alloc", *["I srv  update_slots: all slots are idle"] * 100]
    assert diagnose(Death(status(signal=signal.SIGABRT), log, served=True), PATTERNS).failure.kind == "signal_abrt"
    assert diagnose(Death(status(signal=signal.SIGABRT), log), PATTERNS).failure.kind == "out_of_memory"
    near = ["std::bad_alloc", *["another line"] * 20]
    assert diagnose(Death(status(signal=signal.SIGKILL), near, served=True), PATTERNS).failure.kind == "killed"


@pytest.mark.parametrize("line", ["chat template parsing error", *LINES["cuda-buffer-oom"], *LINES["nvrm-open"]])
def test_a_line_in_the_log_of_a_serving_engine_takes_no_rung_and_ends_no_retry(line: str) -> None:
    """A client can make the engine print nearly anything: a grammar whose text holds an allocator's message, say."""
    log = [line, "another line"]
    for number, kind in ((signal.SIGSEGV, "signal_segv"), (signal.SIGKILL, "killed")):
        found = diagnose(Death(status(signal=number), log, served=True), PATTERNS)
        assert (found.fault in (EngineFault.CRASH, EngineFault.KILLED), found.failure.kind) == (True, kind)
        assert diagnose(Death(status(signal=number), log), PATTERNS).failure.kind != kind, "of a start it is evidence"
    aborted = diagnose(Death(status(signal=signal.SIGABRT), log, served=True), PATTERNS)
    assert aborted.fault is EngineFault.CRASH and aborted.failure.kind != "signal_abrt", "it explains"
    by_kernel = Death(status(signal=signal.SIGKILL), log, oom_killed=True, served=True)
    assert diagnose(by_kernel, PATTERNS).fault is EngineFault.OOM, "the kernel's counter decides"


def test_a_line_that_only_explains_does_not_match_another_cause_either() -> None:
    """mlock's warning ends in the words of a full memory, and the engine goes on."""
    assert diagnose(Death(status(signal=signal.SIGSEGV), LINES["mlock"]), PATTERNS).failure.kind == "signal_segv"
    both = [*LINES["mlock"], "terminate called after throwing an instance of 'std::bad_alloc'"]
    assert diagnose(Death(status(signal=signal.SIGABRT), both), PATTERNS).fault is EngineFault.OOM


def test_fc25_full_memory_comes_with_advice() -> None:
    for line in (*LINES["host-oom"], *LINES["cuda-oom"], *LINES["kv-oom"]):
        assert "smaller n_ctx" in diagnose(Death(status(1), [line]), PATTERNS).failure.hint


def test_evidence_is_the_exit_and_what_a_person_reads_before_scrolling() -> None:
    found = diagnose(Death(status(3), [f"line {n}" for n in range(300)]), PATTERNS)
    assert found.failure.evidence.splitlines() == ["exit code 3 after 3.2 s", *[f"line {n}" for n in range(288, 300)]]


# --- the kernel's word -----------------------------------------------------------------------------------------------


def test_the_counter_of_the_childs_own_cgroup_counts(tmp_path: Path) -> None:
    """The cgroup of a zombie cannot be read: it is read at the spawn."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (root / "memory/a").mkdir(parents=True)
    (root / "b").mkdir()
    (proc / "7/cgroup").write_text("4:memory:/a\n0::/b\n")
    (root / "memory/a/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (root / "b/memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    witness = OomWitness(7, 50.0, proc=proc, cgroup_root=root, kmsg=tmp_path / "none")
    (proc / "7/cgroup").write_text("4:memory:/\n")
    assert not witness.killed()
    (root / "b/memory.events").write_text("low 0\noom 2\noom_kill 2\n")
    assert witness.killed()
    witness.alive(60.0)
    witness.alive(61.0)
    assert witness.killed(), "one that is dying may still look alive, for seconds"
    witness.alive(70.0)
    assert not witness.killed(), "it lives on: the kernel has killed a neighbour"


def test_no_cgroup_and_no_kernel_log_are_no_evidence(tmp_path: Path) -> None:
    assert not OomWitness(7, 50.0, proc=tmp_path, cgroup_root=tmp_path, kmsg=tmp_path / "none").killed()


@pytest.mark.parametrize(
    ("line", "since_s", "found"),
    [
        ("3,1,60000000,-;Out of memory: Killed process 815 (llama-server) total-vm:1kB", 50.0, True),
        ("3,1,60000000,-;Memory cgroup out of memory: Killed process 815 (llama-server)", 50.0, True),
        ("3,1,60000000,-;Out of memory: Kill process 815 (llama-server) score 900 or sacrifice child", 50.0, True),
        ("3,1,60000000,-;Out of memory: Killed process 8150 (llama-server)", 50.0, False),
        ("3,1,40000000,-;Out of memory: Killed process 815 (llama-server)", 50.0, False),
        ("garbage", 50.0, False),
        ("11,1,60000000,-;Out of memory: Killed process 815 (llama-server)", 50.0, False),
        (
            "6,1,60000000,-;oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/user/Killed process 815 (,pid=9",
            50.0,
            False,
        ),
        ("6,1,60000000,-;usb 1-1: Product: Killed process 815 (llama-server)", 50.0, False),
    ],
    ids=[
        *("global", "cgroup", "old kernels", "another pid", "the same pid, before", "garbage"),
        *("written by a process", "a group of another user", "a device's name"),
    ],
)
def test_the_kernel_log_names_this_pid_since_it_was_spawned(
    line: str, since_s: float, found: bool, tmp_path: Path
) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text(f"6,0,1,-;Linux version\n{line}\n SUBSYSTEM=x\n")
    assert named_in_kernel_log(815, since_s, kmsg) == found
