"""Any llama-server binary → Engine, asked once (FC-10, FC-28, FC-74, FC-77)."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from edge.engine.engine import Device
from edge.engine.inspect import inspect
from edge.errors import EngineBrokenError, EngineMissingError
from tests.fakes.toolchain.server import ERAS, write_server


@pytest.fixture
def quiet(tmp_path: Path) -> Path:
    """A root folder without any GPU."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def _calls(trace: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []


@pytest.mark.parametrize("era", list(ERAS))
def test_fc28_each_era(tmp_path: Path, era: str, quiet: Path) -> None:
    engine = inspect(write_server(tmp_path / "llama-server", era=era), None, root=quiet)
    assert engine.era == era
    assert (engine.version, engine.commit) == ("0.5.0-dev", "0c1e57098")
    assert engine.has("--load-mode") == (era in ("load-mode", "both"))
    assert engine.has("--no-mmap") == (era != "load-mode")


def test_the_binary_sees_nothing_of_our_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: Path
) -> None:
    """LLAMA_ARG_* of a shell would change what it answers; FC-77: it gets a HOME that does not exist."""
    monkeypatch.setenv("LLAMA_ARG_TOOLS", "all")
    trace = tmp_path / "trace"
    inspect(write_server(tmp_path / "llama-server", trace=str(trace)), None, root=quiet)
    calls = _calls(trace)
    assert [call["arguments"] for call in calls] == [["--version"], ["--help"], ["--list-devices"]]
    for call in calls:
        environment = call["environment"]
        assert isinstance(environment, dict)
        assert set(environment) <= {"LC_ALL", "PATH", "HOME", "LLAMA_CACHE", "HF_HUB_CACHE", "CUDA_DEVICE_ORDER"}
        assert call["cwd"] == "/"


def test_answers_are_kept_by_path_time_and_size(tmp_path: Path, quiet: Path) -> None:
    trace, cache = tmp_path / "trace", tmp_path / "cache"
    server = write_server(tmp_path / "llama-server", trace=str(trace))
    first = inspect(server, cache, root=quiet)
    assert inspect(server, cache, root=quiet) == first
    assert len(_calls(trace)) == 3
    os.utime(server, ns=(1, server.stat().st_mtime_ns + 1))
    assert inspect(server, cache, root=quiet) == first
    assert len(_calls(trace)) == 6
    write_server(server, trace=str(trace), era="flash-bare")
    assert inspect(server, cache, root=quiet).era == "flash-bare"


def test_a_spoiled_cache_is_asked_again(tmp_path: Path, quiet: Path) -> None:
    cache = tmp_path / "cache"
    server = write_server(tmp_path / "llama-server")
    first = inspect(server, cache, root=quiet)
    (kept,) = cache.iterdir()
    for text in ("{", "[]"):
        kept.write_text(text)
        assert inspect(server, cache, root=quiet) == first


def test_fc74_a_cuda_engine_that_saw_no_gpu_is_asked_again(tmp_path: Path, quiet: Path) -> None:
    """At boot the driver may be late: "no device" must not be remembered."""
    trace, cache = tmp_path / "trace", tmp_path / "cache"
    server = write_server(tmp_path / "llama-server", cuda=True, trace=str(trace))
    assert inspect(server, cache, root=quiet).devices == ()
    before = server.stat()
    write_server(server, cuda=True, trace=str(trace), devices=["CUDA0: Orin (7485 MiB, 6152 MiB free)"])
    os.utime(server, ns=(before.st_atime_ns, before.st_mtime_ns))
    engine = inspect(server, cache, root=quiet)
    assert engine.devices == (Device("CUDA0", "Orin", 7485 * 1024**2, 6152 * 1024**2),)
    assert engine.cuda


def test_fc41_a_driver_that_only_ld_library_path_points_to(tmp_path: Path, quiet: Path) -> None:
    """Images of NVIDIA's older container runtime: a child with an environment of its own would fall back to the CPU."""
    folder = quiet / "usr/local/nvidia/lib64"
    server = write_server(tmp_path / "llama-server", cuda=True, devices=["CUDA0: A (1 MiB)"], driver_folder=str(folder))
    assert inspect(server, None, root=quiet).devices == ()
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").touch()
    engine = inspect(server, None, root=quiet)
    assert [device.id for device in engine.devices] == ["CUDA0"]
    assert engine.library_path == str(folder)


def test_a_changed_set_of_gpus_is_asked_again(tmp_path: Path, quiet: Path) -> None:
    trace, cache = tmp_path / "trace", tmp_path / "cache"
    server = write_server(tmp_path / "llama-server", cuda=True, trace=str(trace), devices=["CUDA0: A (1 MiB)"])
    inspect(server, cache, root=quiet)
    (quiet / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    inspect(server, cache, root=quiet)
    inspect(server, cache, root=quiet)
    assert len(_calls(trace)) == 6


def test_fc10_libraries_beside_the_binary_are_found_and_remembered(tmp_path: Path, quiet: Path) -> None:
    server = write_server(tmp_path / "bin/llama-server", needs_library=True)
    engine = inspect(server, None, root=quiet)
    assert engine.library_path is not None
    assert str(server.parent) in engine.library_path.split(":")


def test_fc10_a_missing_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "llama-server"
    broken.write_text(
        "#!/bin/sh\necho 'x: error while loading shared libraries: libggml.so.0: cannot open' >&2\nexit 127\n"
    )
    broken.chmod(0o755)
    with pytest.raises(EngineBrokenError, match=r"127.*libggml\.so\.0"):
        inspect(broken, None)


def test_what_is_no_server_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineMissingError):
        inspect(tmp_path / "absent", None)
    with pytest.raises(EngineBrokenError, match="not a llama-server"):
        inspect(Path("/bin/ls"), None)
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(EngineBrokenError, match="cannot be started"):
        inspect(text, None)
    text.chmod(0o755)
    with pytest.raises(EngineBrokenError):
        inspect(text, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("owner", "mode"), [(65534, 0o755), (0, 0o777)], ids=["a user's", "root's, and anybody may write it"]
)
def test_root_runs_what_others_may_write_as_another_user(owner: int, mode: int) -> None:
    """In a folder that anybody may enter; a shell script, since the test's Python may lie in root's home."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        trace = folder / "trace"
        trace.touch()
        trace.chmod(0o666)
        server = folder / "llama-server"
        server.write_text(f"#!/bin/sh\nid -u >> {trace}\necho 'version: 1 (abcdef012)'\n")
        server.chmod(mode)
        os.chown(server, owner, owner)
        with pytest.raises(EngineBrokenError, match="not a llama-server"):
            inspect(server, None)
        assert trace.read_text().split() == ["65534", "65534"]


def test_markers_in_the_bytes(tmp_path: Path, quiet: Path) -> None:
    plain = inspect(write_server(tmp_path / "a/llama-server"), None, root=quiet)
    assert (plain.progress_protocol, plain.cuda, plain.no_vmm) == (False, False, None)
    both = inspect(write_server(tmp_path / "b/llama-server", cuda=True, progress=True), None, root=quiet)
    assert (both.progress_protocol, both.cuda, both.no_vmm) == (True, True, True)
    split = write_server(tmp_path / "c/llama-server")
    (split.parent / "libggml-cuda.so").write_bytes(b"...ggml_cuda_init...cuMemAddressReserve...")
    found = inspect(split, None, root=quiet)
    assert (found.cuda, found.no_vmm) == (True, False), "CUDA may live in a library beside the server (FC-11: with VMM)"


@pytest.mark.parametrize("answers", ["{}", "5", '{"flags": 3}', "[" * 50_000])
def test_a_damaged_cache_is_asked_again(tmp_path: Path, quiet: Path, answers: str) -> None:
    """One bad state file stops no start."""
    server = write_server(tmp_path / "bin/llama-server")
    inspect(server, tmp_path / "cache", root=quiet)
    file = next((tmp_path / "cache").iterdir())
    kept = json.loads(file.read_text())
    file.write_text(f'{{"key": {json.dumps(kept["key"])}, "engine": {answers}}}')
    assert inspect(server, tmp_path / "cache", root=quiet).has("--host")


@pytest.mark.parametrize("question", ["--version", "--help"])
def test_an_engine_that_dies_of_a_signal_is_named(tmp_path: Path, quiet: Path, question: str) -> None:
    """SIGILL before main: the binary is for another CPU, not "no llama-server"."""
    server = write_server(tmp_path / "llama-server", signal=[question, 4])
    with pytest.raises(EngineBrokenError, match="SIGILL") as error:
        inspect(server, None, root=quiet)
    assert "--no-native" in str(error.value.hint)
