"""The remembered launch: used only while nothing that it was planned from has changed, and confirmed by the plan."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge.config import load, resolve_profile
from edge.daemon import children as children_module
from edge.daemon import planning
from edge.daemon.children import Children
from edge.daemon.kept_by_model import KeptRemedies, key
from edge.daemon.remembered_launch import (
    EngineCommand,
    RememberedLaunch,
    board_identity,
    changed,
    forget,
    identity,
    keep,
    read_record,
    record_path,
    relevant,
    trace_inputs,
    why_not,
    working_directory,
)
from edge.engine.installed import SelectedEngine, write_selection
from edge.models.header import read_kept
from edge.models.open import fingerprint
from edge.paths import folders
from edge.plan import start_records
from tests.daemon.served import Served, config_text, install
from tests.fakes.gguf_writer import Gguf
from tests.fakes.llama_switches import Death, change
from tests.plan.golden import ERAS, FOLDERS, NOWHERE, planned
from tests.serving import environment, eventually, free_port

ARGV = ["-p", "cpu"]
ENV = {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "0", "SSH_TTY": "/dev/pts/1"}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A copy of the files that identify a board."""
    root = tmp_path / "root"
    for name, text in {
        "proc/meminfo": "MemTotal:  8000000 kB\nMemFree:  100 kB\nMemAvailable:  6000000 kB\n",
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano\0",
        "proc/driver/nvidia/version": "NVRM version: 580.1\nGCC version: 12\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: X\nGPU UUID: \t GPU-1\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "dev/nvidiactl": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def record(machine: Path, tmp_path: Path) -> RememberedLaunch:
    files = {"model.gguf": "x", "edgellm.toml": "y"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "store").mkdir()
    inputs = [*(str(tmp_path / name) for name in files), str(tmp_path / "store"), str(tmp_path / "absent.toml")]
    return RememberedLaunch(
        argv=ARGV,
        cwd=str(Path.cwd()),
        env=relevant(ENV),
        listen=["127.0.0.1:8080"],
        tls=False,
        files={path: identity(path) for path in inputs},
        board=board_identity(machine),
        nodes=[str(machine / "dev/nvidiactl")],
        needed_bytes=5 << 30,
        models={"chat": EngineCommand(["llama-server"], {}, [0, 500, []], ["m.gguf"], None, {"unified": 1})},
    )


def test_an_unchanged_machine_uses_it(record: RememberedLaunch, machine: Path) -> None:
    assert why_not(record, ARGV, ENV, machine) is None
    assert why_not(record, ARGV, ENV | {"SSH_TTY": "other", "EDGELLM_API_KEY": "secret"}, machine) is None


def test_a_record_is_read_back_as_written(record: RememberedLaunch, tmp_path: Path) -> None:
    record.write(tmp_path / "launch.json")
    assert read_record(tmp_path / "launch.json") == record
    assert (tmp_path / "launch.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "models": {}}', '{"schema": 1}'])
def test_a_damaged_record_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text(text)
    assert read_record(tmp_path / "launch.json") is None


@pytest.mark.parametrize("odd", [None, [], {}, 5, "", "\ud800", "a\0b", True, [None], {"a": None}, [["\ud800"]]])
def test_a_field_of_another_kind_ends_no_start(
    record: RememberedLaunch, machine: Path, tmp_path: Path, odd: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "launch.json"
    for name in (*record._fields, *record.models["chat"]._fields):
        record.write(path)
        document = json.loads(path.read_text())
        (document if name in document else document["models"]["chat"])[name] = odd
        path.write_text(json.dumps(document))
        found = read_record(path)
        if found is not None:
            why_not(found, ARGV, ENV, machine)
            monkeypatch.setattr(children_module, "spawn", lambda argv, env, socket, limits: os.fspath(argv[0]))
            Children().start("chat", found.models["chat"], tmp_path / "socket")


@pytest.mark.parametrize(
    ("field", "odd"),
    [
        ("limits", [0, 500]),
        ("limits", [0, 500, None]),
        ("limits", [0, None, []]),
        ("limits", [0, 500, ["1"]]),
        ("env", {"A=B": "c"}),
        ("env", {"": "c"}),
        ("env", {"A\0": "c"}),
        ("held_bytes", {"host": "x"}),
        ("files", []),
        ("argv", []),
        ("cold_argv", []),
    ],
)
def test_a_command_that_no_process_can_have_is_no_record(
    record: RememberedLaunch, tmp_path: Path, field: str, odd: object
) -> None:
    command = record.models["chat"]._replace(**{field: odd})
    record._replace(models={"chat": command}).write(tmp_path / "launch.json")
    assert read_record(tmp_path / "launch.json") is None


def test_a_record_that_another_user_could_have_written_is_none(record: RememberedLaunch, tmp_path: Path) -> None:
    """Its commands are executed before anything else is read: as root, they would be another user's."""
    path = tmp_path / "launch.json"
    record.write(path)
    assert read_record(path) is not None
    (tmp_path / "link.json").symlink_to(path)
    assert read_record(tmp_path / "link.json") is None
    path.chmod(0o664)
    assert read_record(path) is None
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        assert read_record(path) is None


@pytest.mark.parametrize(
    ("argv", "env", "reason"),
    [
        (["-p", "cpu", "--set", "n_ctx=1"], {}, "the command line differs"),
        ([], {}, "the command line differs"),
        (ARGV, {"EDGELLM_N_CTX": "1"}, "the environment variable EDGELLM_N_CTX differs"),
        (ARGV, {"CUDA_VISIBLE_DEVICES": "1"}, "the environment variable CUDA_VISIBLE_DEVICES differs"),
        (ARGV, {"HOME": "/other"}, "the environment variable HOME differs"),
    ],
)
def test_another_command_is_planned(
    record: RememberedLaunch, machine: Path, argv: list[str], env: dict[str, str], reason: str
) -> None:
    assert why_not(record, argv, ENV | env, machine) == reason


def test_a_folder_that_is_gone_ends_no_start(
    record: RememberedLaunch, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert why_not(record, ARGV, ENV, machine) == "the working directory differs"
    assert why_not(record._replace(cwd=working_directory()), ARGV, ENV, machine) is None


def test_another_version_or_folder_is_planned(
    record: RememberedLaunch, machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert why_not(record._replace(version="0.0.1"), ARGV, ENV, machine) == "it is of edgellm 0.0.1"
    monkeypatch.chdir(tmp_path)
    assert why_not(record, ARGV, ENV, machine) == "the working directory differs"


def grow(path: Path) -> None:
    path.write_text(path.read_text() + "z")


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replace_with_the_same(path: Path) -> None:
    """Same size and mtime, another inode: how a download or a build replaces a file."""
    stat, text = path.stat(), path.read_text()
    other = path.with_suffix(".other")
    other.write_text(text)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("alter", [grow, touch, replace_with_the_same, Path.unlink])
@pytest.mark.parametrize("name", ["model.gguf", "edgellm.toml"])
def test_a_changed_file_is_planned_for(
    record: RememberedLaunch, machine: Path, tmp_path: Path, name: str, alter: Callable[[Path], None]
) -> None:
    alter(tmp_path / name)
    reason = changed(record, machine)
    assert reason in (f"{tmp_path / name} changed", f"{tmp_path / name} is missing")


def test_new_files_are_planned_for(record: RememberedLaunch, machine: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "new.gguf").write_text("")
    assert changed(record, machine) == f"{tmp_path / 'store'} changed"
    files = {**record.files, str(tmp_path / "store"): identity(str(tmp_path / "store"))}
    (tmp_path / "absent.toml").write_text("")
    assert changed(record._replace(files=files), machine) == f"{tmp_path / 'absent.toml'} changed"


@pytest.mark.parametrize(
    ("file", "text", "fact"),
    [
        ("proc/device-tree/model", "NVIDIA Jetson AGX Orin\0", "model"),
        ("proc/meminfo", "MemTotal:  4000000 kB\nMemFree:  100 kB\nMemAvailable:  6000000 kB\n", "memory"),
        ("proc/driver/nvidia/version", "NVRM version: 590.2\n", "driver version"),
        ("proc/driver/nvidia/gpus/0000:01:00.0/information", "GPU UUID: GPU-2\n", "set of GPUs"),
        ("proc/driver/nvidia/gpus/0000:02:00.0/information", "GPU UUID: GPU-2\n", "set of GPUs"),
        ("sys/fs/cgroup/cpu.max", "50000 100000\n", "CPU quota"),
    ],
)
def test_another_board_is_planned_for(record: RememberedLaunch, machine: Path, file: str, text: str, fact: str) -> None:
    (machine / file).parent.mkdir(exist_ok=True)
    (machine / file).write_text(text)
    assert (changed(record, machine) or "").startswith(f"the {fact} changed: ")


def test_fewer_usable_cpus_are_planned_for(record: RememberedLaunch, machine: Path) -> None:
    board = record.board | {"number of usable CPUs": 99}
    assert (changed(record._replace(board=board), machine) or "").startswith("the number of usable CPUs changed: 99")


def test_too_little_memory_is_planned_for(record: RememberedLaunch, machine: Path) -> None:
    (machine / "proc/meminfo").write_text("MemTotal:  8000000 kB\nMemFree:  1 kB\nMemAvailable:  5000000 kB\n")
    assert changed(record, machine) == "5120 MiB of memory are needed and 4882 MiB available"


def test_a_device_node_that_is_gone_is_planned_for(record: RememberedLaunch, machine: Path) -> None:
    (machine / "dev/nvidiactl").unlink()
    assert changed(record, machine) == f"the device node {machine / 'dev/nvidiactl'} does not open"


def test_inputs_are_what_a_block_reads(tmp_path: Path) -> None:
    places = folders({}, tmp_path / "s")
    places.instance_state.mkdir(parents=True)
    (places.instance_state / "starts.jsonl").write_text("")
    (tmp_path / "read").write_text("")
    with trace_inputs(places) as inputs:
        (tmp_path / "read").read_text()
        list((tmp_path).iterdir())
        (tmp_path / "written").write_text("")
        (places.instance_state / "starts.jsonl").read_text()
        Path("/proc/meminfo").read_text()
        with pytest.raises(OSError):
            (tmp_path / "absent").read_text()
    assert {path: inputs[path] for path in inputs} == {
        str(tmp_path / "read"): identity(str(tmp_path / "read")),
        str(tmp_path): identity(str(tmp_path)),
        str(tmp_path / "absent"): None,
    }
    Path("/etc/hostname").exists() and Path("/etc/hostname").read_text()
    assert len(inputs) == 3


def test_a_model_whose_header_was_kept_is_an_input_too(tmp_path: Path) -> None:
    places, model = folders({}, tmp_path / "s"), Gguf("llama").model().save(tmp_path / "m.gguf")
    for _ in range(2):
        with trace_inputs(places) as inputs:
            read_kept(model, places.kept_headers)
        assert inputs == {str(model): identity(str(model))}


WRITER = """
import sys
from pathlib import Path
from edge.daemon.remembered_launch import read_record
path = Path(sys.argv[1])
record = read_record(path)
print("ready", flush=True)
number = 0
while True:
    number += 1
    record._replace(at=float(number)).write(path)
"""


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_record(record: RememberedLaunch, tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    record.write(path)
    for _ in range(12):
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(random.uniform(0, 0.02))
            writer.send_signal(signal.SIGKILL)
        left = read_record(path)
        assert left is not None and left._replace(at=0.0) == record._replace(at=0.0)


def test_an_equal_record_is_not_written_again(record: RememberedLaunch, tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    keep(places, record)
    before = identity(str(record_path(places)))
    keep(places, record._replace(at=time.time()))
    assert identity(str(record_path(places))) == before
    forget(places)
    assert read_record(record_path(places)) is None


# --- confirmed by the plan -------------------------------------------------------------------------------------------


def confirm(rung_running: int, rung_planned: int, **changes: Any) -> tuple[Any, tuple[str, ...], bool]:
    plan = planned("orin-nano-8", ERAS[0])
    (model,) = plan.models.values()
    running = model.ladder.plans[rung_running]
    known = EngineCommand(list(running.argv), dict(running.env), [0, 500, []], ["m.gguf"], None, {})._replace(**changes)
    ladder = planning.replace(model.ladder, chosen=rung_planned)
    plan = planning.replace(plan, models={model.id: planning.replace(model, ladder=ladder)})
    profile = resolve_profile(load(FOLDERS, {"profile": "orin"}, {}, NOWHERE), plan.board, FOLDERS, NOWHERE)
    prepared = planning.Prepared(planning.Config(), plan.board, profile, plan)
    children = Recorded()
    launch = RememberedLaunch([], "", {}, [], False, {}, {}, [], 0, {model.id: known})
    kept, notes = planning._confirm(prepared, launch, children, KeptRemedies(FOLDERS))
    return kept, notes, children.killed


class Recorded(Children):
    killed = False

    def kill(self) -> None:
        self.killed = True


def test_the_planned_rung_is_kept_without_a_word() -> None:
    kept, notes, killed = confirm(0, 0)
    assert not killed and notes == () and next(iter(kept.plan.models.values())).ladder.chosen == 0


def test_a_rung_below_the_plan_is_kept_and_said() -> None:
    kept, notes, killed = confirm(1, 0)
    assert not killed and "more memory is free" in notes[0]
    assert next(iter(kept.plan.models.values())).ladder.chosen == 1


def test_a_rung_that_no_longer_fits_is_ended() -> None:
    _, notes, killed = confirm(0, 1)
    assert killed and "no longer fits" in notes[0]


def test_another_command_for_a_cold_start_replaces_it() -> None:
    assert confirm(0, 0, cold_argv=["llama-server", "--load-mode", "dio"], cold_below=0.2)[2]


@pytest.mark.parametrize(
    ("resident", "started"),
    [(0.0, "cold"), (0.19, "cold"), (0.2, "usual"), (1.0, "usual"), (None, "usual")],
)
def test_a_start_takes_the_command_for_what_the_page_cache_holds(
    resident: float | None, started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "resident_ratio", lambda _: resident)
    monkeypatch.setattr(children_module, "spawn", lambda argv, *_: argv)
    command = EngineCommand(["usual"], {}, [0, 500, []], [str(tmp_path / "m.gguf")], None, {}, ["cold"], 0.2)
    children = Children()
    children.start("chat", command, tmp_path / "s")
    assert children["chat"] == [started] and children.resident == {"chat": resident}


def test_a_record_with_two_commands_is_read_back_as_written(record: RememberedLaunch, tmp_path: Path) -> None:
    model = record.models["chat"]._replace(cold_argv=["llama-server", "--load-mode", "dio"], cold_below=0.2)
    record = record._replace(models={"chat": model})
    record.write(tmp_path / "launch.json")
    assert read_record(tmp_path / "launch.json") == record


def test_another_command_line_or_other_limits_replace_it() -> None:
    assert confirm(0, 0, argv=["llama-server", "--ctx-size", "1"])[1:] == (
        ("the remembered launch was replaced: Qwen3.5-4B gets another command line",),
        True,
    )
    assert confirm(0, 0, limits=[5, 500, []])[2]


# --- in a running edgellm --------------------------------------------------------------------------------------------


@pytest.fixture
def state(short_dir: Path, chat: str) -> Path:
    """A configuration and an installed engine."""
    state = short_dir / "s"
    (state / "config").mkdir(parents=True)
    (state / "config" / "edgellm.toml").write_text(config_text(chat))
    install(state / "data", "fake-cpu-1")
    write_selection(state / "data" / "engines", SelectedEngine("fake-cpu-1"))
    return state


@contextmanager
def started(state: Path, port: int) -> Iterator[Served]:
    with Served(state, port=port) as up:
        up.fake, up.config = state / "data/engines/fake-cpu-1/bin", state / "config" / "edgellm.toml"
        yield up


def last_start(up: Served, number: int) -> dict[str, Any]:
    """Wait for the record of that start, the last so far; it is written after READY."""
    path = up.state / "state/main/starts.jsonl"
    eventually(lambda: len(start_records.read(path)) >= number, lambda: f"not recorded: {up.output}")
    (*_, row) = start_records.read(path)
    return row


@pytest.fixture
def port() -> int:
    """The same for each start: it is part of the command line."""
    return free_port()


@pytest.fixture
def chat(smollm2: Path) -> str:
    return f'id = "chat"\nref = "{smollm2}"'


def remembered(up: Served) -> Path:
    """Wait for the record, which is written after READY."""
    up.wait_for("ok")
    path = up.state / "state/main/launch.json"
    eventually(path.exists, lambda: f"no record: {up.output}")
    return path


def test_the_second_start_spawns_before_it_plans(state: Path, port: int) -> None:
    with started(state, port) as up:
        remembered(up)
        assert last_start(up, 1)["remembered"] is False
    with started(state, port) as up:
        up.wait_for("ok")
        row = last_start(up, 2)
        assert row["remembered"] is True
        order = [span["name"] for span in row["spans"] if span["source"] == "launcher"]
        assert order == ["python", "compare", "spawn", "plan"]
        assert len(up.pids) == 2 and up.chat().status_code == 200


def test_a_record_that_the_plan_contradicts_is_replaced_before_it_serves(state: Path, port: int) -> None:
    with started(state, port) as up:
        path = remembered(up)
    document = json.loads(path.read_text())
    argv = document["models"]["chat"]["argv"]
    argv[argv.index("--ctx-size") + 1] = "512"
    path.write_text(json.dumps(document))
    with started(state, port) as up:
        up.wait_for("ok")
        assert last_start(up, 2)["remembered"] is False
        assert "the remembered launch was replaced: chat gets another command line" in up.output
        command = Path(f"/proc/{up.model()['pid']}/cmdline").read_bytes().split(b"\0")
        assert command[command.index(b"--ctx-size") + 1] != b"512"
        assert len(up.pids) in (2, 3)  # the replaced engine may have been killed before it ran


@pytest.mark.parametrize("known", [False, True])
def test_remedies_that_came_later_replace_it(state: Path, port: int, smollm2: Path, known: bool) -> None:
    """The supervisor had remedies and the launcher's child had none: each start ended with a traceback."""
    with started(state, port) as up:
        path = remembered(up)
        plan = json.loads(path.read_text())
    row = last_start(up, 1)
    (read,) = [each for each in plan["files"] if each.endswith("remedies.json")]
    kept = KeptRemedies(folders({}, up.state))
    kept.keep("chat", key(fingerprint([smollm2]), row["engine"], row["rung"]), [("no-flash-attention", "signal_segv")])
    if known:  # the record was written after it, by a process that ended meanwhile
        plan["files"][read] = identity(read)
        path.write_text(json.dumps(plan))
    with started(state, port) as up:
        up.wait_for("degraded")
        assert [each["subject"] for each in up.model()["degraded"]] == ["flash_attention"]
        assert ("chat starts with remedies now" in up.output) is known
        assert up.chat().status_code == 200


def test_a_changed_configuration_is_planned_anew(state: Path, port: int, chat: str) -> None:
    with started(state, port) as up:
        remembered(up)
    up.configure(f"{chat}\nset = {{ n_ctx = 1024 }}")
    with started(state, port) as up:
        up.wait_for("ok")
        assert last_start(up, 2)["remembered"] is False
        assert b"1024" in Path(f"/proc/{up.model()['pid']}/cmdline").read_bytes().split(b"\0")


def test_a_reload_that_changes_something_forgets_it(state: Path, port: int, chat: str) -> None:
    with started(state, port) as up:
        path = remembered(up)
        up.cli("reload")
        assert path.exists()
        up.configure(f"{chat}\nset = {{ n_ctx = 1024 }}")
        up.cli("reload")
        eventually(lambda: not path.exists(), lambda: f"still there: {up.output}")


def test_a_failed_start_forgets_it(state: Path, port: int) -> None:
    with started(state, port) as up:
        path = remembered(up)
    change(up.fake, death=Death("line", ["error: invalid argument: --nonsense"], code=1))
    with started(state, port) as up:
        eventually(lambda: not path.exists(), lambda: f"still there: {up.output}")


def test_a_kill_while_the_remembered_engine_loads_leaves_the_record(state: Path, port: int) -> None:
    with started(state, port) as up:
        path = remembered(up)
    before = path.read_bytes()
    with started(state, port) as up:
        eventually(lambda: len(up.pids) == 2, "no second engine")
        up.process.kill()
        up.process.wait()
        assert path.read_bytes() == before
    with started(state, port) as up:
        up.wait_for("ok")
        assert last_start(up, 2)["remembered"] is True


def test_plan_shows_which_start_spawns_at_once(state: Path, port: int, chat: str) -> None:
    with started(state, port) as up:
        remembered(up)
        assert "spawns its remembered launch, then plans" in up.cli("plan")
        up.configure(f"{chat}\nset = {{ n_ctx = 1024 }}")
        assert f"plans before it spawns: {up.config} changed" in up.cli("plan")
        shown = json.loads(up.cli("plan", "--json"))["remembered_launch"]
        assert shown["argv"][0] == "up" and shown["plans_first_because"] == f"{up.config} changed"
