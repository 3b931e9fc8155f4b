"""An engine as one file: to board 2…50."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
import tarfile
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from edge.builder.install import export_engine, import_engine
from edge.builder.smoke import request
from edge.engine.installed import SelectedEngine, catalogue, ids, load, manifest, read_selection, write_selection
from edge.errors import BadDataError, BuildError, DoesNotFitError, EdgeError, EngineBrokenError
from edge.paths import Folders, folders
from tests.builder.installing import put
from tests.fakes.toolchain.server import ERAS, write_server


@pytest.fixture
def other(tmp_path: Path) -> Folders:
    """Another board's folders."""
    return folders({}, tmp_path / "other")


@pytest.mark.parametrize("name", ["engine.tar", "engine.tar.gz"])
def test_there_and_proved_again(places: Folders, other: Folders, tmp_path: Path, name: str) -> None:
    put(places.engines, "0c1e57098-cpu-1")
    size = export_engine(places.engines, "0c1e57098-cpu-1", tmp_path / name)
    assert size == (tmp_path / name).stat().st_size
    put(other.engines, "old", tokens=8)
    write_selection(other.engines, SelectedEngine("old"))
    assert import_engine(other.engines, tmp_path / name) == ("0c1e57098-cpu-1", True)
    assert read_selection(other.engines) == SelectedEngine("0c1e57098-cpu-1", "old")
    document = manifest(other.engines, "0c1e57098-cpu-1")
    assert document["proof"]["smoke_tokens"] == 16, "proved here, not only there"
    assert document["imported"]["proof"]["smoke_tokens_s"] == 1.0
    assert document["fingerprint"] == "fingerprint-0c1e57098-cpu-1"
    assert load(other.engines, "0c1e57098-cpu-1").has("--host")


def test_the_same_engine_again_is_only_selected(places: Folders, tmp_path: Path) -> None:
    put(places.engines, "a")
    put(places.engines, "b", tokens=8)
    export_engine(places.engines, "a", tmp_path / "a.tar")
    write_selection(places.engines, SelectedEngine("b"))
    assert import_engine(places.engines, tmp_path / "a.tar") == ("a", False)
    assert read_selection(places.engines) == SelectedEngine("a", "b")


def test_an_import_repairs_an_engine_that_was_damaged(places: Folders, tmp_path: Path) -> None:
    """With the right size, which is all that a start looks at."""
    folder = put(places.engines, "a")
    export_engine(places.engines, "a", tmp_path / "a.tar")
    good = (folder / "bin/llama-server").read_bytes()
    (folder / "bin/llama-server").write_bytes(good[:-1] + b"#")
    engine_id, new = import_engine(places.engines, tmp_path / "a.tar")
    assert new and (places.engines / engine_id / "bin/llama-server").read_bytes() == good
    assert read_selection(places.engines).current == engine_id != "a"
    with pytest.raises(BadDataError, match="not what its manifest says"):
        export_engine(places.engines, "a", tmp_path / "b.tar")
    assert not (tmp_path / "b.tar").exists()


def test_another_engine_of_the_same_name_gets_the_next_number(places: Folders, other: Folders, tmp_path: Path) -> None:
    put(places.engines, "0c1e57098-cpu-1")
    export_engine(places.engines, "0c1e57098-cpu-1", tmp_path / "a.tar")
    folder = put(other.engines, "0c1e57098-cpu-1")
    document = json.loads((folder / "engine.json").read_text())
    document["files"]["bin/llama-bench"] = {"sha256": "0" * 64, "bytes": 1}
    (folder / "engine.json").write_text(json.dumps(document))
    assert import_engine(other.engines, tmp_path / "a.tar") == ("0c1e57098-cpu-2", True)


@pytest.mark.parametrize(
    ("place", "odd"),
    [
        *((("target", "cuda_arch"), odd) for odd in (None, "x", [None], 3)),
        *((("files", "bin/llama-server", "bytes"), odd) for odd in (10**400, None, -1, float("nan"))),
        *(((name,), odd) for name in ("recipe", "source", "target", "files", "proof", "flags") for odd in (True, None)),
    ],
)
def test_no_value_of_a_manifest_is_a_traceback(places: Folders, tmp_path: Path, place: Sequence[str], odd: Any) -> None:
    folder = put(places.engines, "a")
    document = json.loads((folder / "engine.json").read_text())
    export_engine(places.engines, "a", tmp_path / "a.tar")
    table = document
    for name in place[:-1]:
        table = table[name]
    table[place[-1]] = odd

    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[0] = (members[0][0], json.dumps(document).encode())

    (folder / "engine.json").write_text(json.dumps(document))
    (entry,) = catalogue(places.engines)["engines"]  # one bad engine takes no list down
    assert entry["id"] == "a"
    with suppress(EdgeError):
        import_engine(tmp_path / "there", _rewrite(tmp_path / "a.tar", tmp_path / "b.tar", change))


def _rewrite(source: Path, target: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> Path:
    members = []
    with tarfile.open(source) as tar:
        for member in tar:
            content = tar.extractfile(member)
            members.append((member, content.read() if content else b""))
    change(members)
    with tarfile.open(target, "w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return target


def _flip(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    info, data = members[1]
    members[1] = (info, data[:-1] + bytes([data[-1] ^ 1]))


def _manifest_after(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.reverse()


def _outside(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append((tarfile.TarInfo("bin/../../escaped"), b"x"))


def _link(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    info = members[1][0]
    info.type, info.linkname = tarfile.SYMTYPE, "/bin/sh"
    members[1] = (info, b"")


def _twice(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append(members[1])


def _edit(**changes: Any) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        document = {**json.loads(members[0][1]), **changes}
        members[0] = (members[0][0], json.dumps(document).encode())

    return change


@pytest.mark.parametrize(
    "change",
    [
        _flip,
        _manifest_after,
        _outside,
        _link,
        _twice,
        lambda members: members.pop(),
        lambda members: members.clear(),
        _edit(schema=2),
        _edit(files={}),
        _edit(files={"bin/llama-server": {"sha256": "0" * 64, "bytes": 3}}),
        _edit(target={"machine": "riscv64", "cuda_arch": []}),
        _edit(target=None),
        _edit(id="../../../escaped"),
        _edit(id=["a"]),
        _edit(recipe={"name": "../../escaped"}),
        _edit(source={"commit": "../escaped"}),
        _edit(source=None),
    ],
)
def test_a_spoiled_or_hostile_file_changes_nothing(
    places: Folders, other: Folders, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    put(places.engines, "a")
    export_engine(places.engines, "a", tmp_path / "a.tar")
    put(other.engines, "good")
    write_selection(other.engines, SelectedEngine("good"))
    bad = _rewrite(tmp_path / "a.tar", tmp_path / "bad.tar", change)
    with pytest.raises(BadDataError) as caught:
        import_engine(other.engines, bad)
    assert caught.value.exit_code == 65
    assert read_selection(other.engines) == SelectedEngine("good")
    assert ids(other.engines) == ["good"]
    assert not list(tmp_path.rglob("escaped")) and not list(other.engines.glob(".new-*"))


@pytest.mark.parametrize("content", [b"", b"no tar at all", b"\x1f\x8b\x08 half a gzip"])
def test_what_is_no_archive(other: Folders, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(BadDataError):
        import_engine(other.engines, tmp_path / "x.tar")
    with pytest.raises(BadDataError):
        import_engine(other.engines, tmp_path / "absent.tar")


def test_an_engine_that_does_not_run_here_is_not_installed(places: Folders, other: Folders, tmp_path: Path) -> None:
    folder = put(places.engines, "a")
    write_server(folder / "bin/llama-server", dies="Illegal instruction")
    document = json.loads((folder / "engine.json").read_text())
    import hashlib

    data = (folder / "bin/llama-server").read_bytes()
    document["files"]["bin/llama-server"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / "engine.json").write_text(json.dumps(document))
    export_engine(places.engines, "a", tmp_path / "a.tar")
    with pytest.raises(BuildError, match="Illegal instruction"):
        import_engine(other.engines, tmp_path / "a.tar")
    assert ids(other.engines) == []


def test_a_broken_engine_is_not_exported(places: Folders, tmp_path: Path) -> None:
    (put(places.engines, "a") / "bin/llama-server").write_bytes(b"")
    with pytest.raises(EngineBrokenError):
        export_engine(places.engines, "a", tmp_path / "a.tar")
    with pytest.raises(EdgeError):
        export_engine(places.engines, "absent", tmp_path / "a.tar")
    assert list(tmp_path.glob("*.tar*")) == []


def test_the_file_does_not_tell_who_made_it(places: Folders, tmp_path: Path) -> None:
    put(places.engines, "a")
    export_engine(places.engines, "a", tmp_path / "1.tar")
    export_engine(places.engines, "a", tmp_path / "2.tar")
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    with tarfile.open(tmp_path / "1.tar") as tar:
        assert {(m.uid, m.gid, m.uname, m.mtime) for m in tar if m.name != "engine.json"} == {(0, 0, "", 0)}


def test_an_export_writes_to_no_file_that_another_user_made(
    places: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp it would be a link, or a file that its maker can write to later."""
    put(places.engines, "a")
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / f".a.tar.partial-{os.getpid()}").symlink_to(victim)  # a name that can be guessed
    export_engine(places.engines, "a", tmp_path / "a.tar")
    assert victim.read_text() == "kept" and (tmp_path / "a.tar").is_file()
    monkeypatch.setattr("secrets.token_hex", lambda _: "same")
    for name in ("a.tar", "a.tar.gz"):
        (tmp_path / ".edgellm-same.partial").symlink_to(victim)
        with pytest.raises(BuildError, match="File exists"):
            export_engine(places.engines, "a", tmp_path / name)
    assert victim.read_text() == "kept"


@pytest.mark.real_user
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="needs root and a Python for all"
)
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_root_proves_an_archive_as_another_user(tmp_path: Path, umask: int) -> None:
    """The archive may come from anywhere: what it holds does not run as root at import. A hardened root has 077."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        trace = Path(name) / "trace"
        trace.touch()
        Path(name).chmod(0o755)
        trace.chmod(0o666)
        engines = tmp_path / "engines"
        folder = put(engines, "0c1e57098-cpu-1")
        server = write_server(folder / "bin/llama-server", trace=str(trace), python="/usr/bin/python3")
        document = json.loads((folder / "engine.json").read_text())
        digest = hashlib.sha256(server.read_bytes()).hexdigest()
        document["files"] = {"bin/llama-server": {"sha256": digest, "bytes": server.stat().st_size}}
        (folder / "engine.json").write_text(json.dumps(document))
        export_engine(engines, "0c1e57098-cpu-1", tmp_path / "e.tar")
        former = os.umask(umask)
        try:
            import_engine(tmp_path / "there", tmp_path / "e.tar", root=tmp_path / "root")
        finally:
            os.umask(former)
        installed = tmp_path / "there/0c1e57098-cpu-1"
        for path in (installed, *installed.rglob("*")):
            assert path.stat().st_mode & 0o044 == 0o044, f"the service's user cannot read {path}"
        users = {json.loads(line)["uid"] for line in trace.read_text().splitlines()}
        assert users and 0 not in users


def script(version: str, serve: str) -> str:
    """Return a shell script that looks like a llama-server to its proof, until it has to serve."""
    cases = (
        f"--version) {version};;\n--help) cat <<'END'\n{ERAS['load-mode']}\nEND\n;;\n--list-devices) ;;\n*) {serve};;\n"
    )
    return f'#!/bin/sh\ncase "$1" in\n{cases}esac\n'


def exported(tmp_path: Path, program: str) -> Path:
    folder = put(tmp_path / "engines", "a")
    server = folder / "bin/llama-server"
    server.write_text(program)
    document = json.loads((folder / "engine.json").read_text())
    digest = hashlib.sha256(server.read_bytes()).hexdigest()
    document["files"] = {"bin/llama-server": {"sha256": digest, "bytes": server.stat().st_size}}
    (folder / "engine.json").write_text(json.dumps(document))
    export_engine(tmp_path / "engines", "a", tmp_path / "e.tar")
    return tmp_path / "e.tar"


@pytest.mark.real_user
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")
@pytest.mark.parametrize("instead", ["ln -s {}", "ln {}", "mkfifo", "ln -s /dev/zero"])
def test_what_an_archive_puts_in_place_of_its_log_is_not_read(tmp_path: Path, instead: str) -> None:
    """root read /etc/shadow into the error, waited for a FIFO, and took all memory for /dev/zero."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        secret = Path(name) / "secret"
        secret.write_text("secret line\n")
        secret.chmod(0o600)
        program = 'for d in "${2%/*}" "${2%/*}/run"; do rm -f "$d/log"; INSTEAD "$d/log"; done; echo the end; exit 1'
        file = exported(
            tmp_path, script("echo 'version: 1 (abcdef012)'", program.replace("INSTEAD", instead.format(secret)))
        )
        with pytest.raises(BuildError, match="exit code 1") as error:
            import_engine(tmp_path / "there", file, root=tmp_path / "root")
    assert "secret line" not in str(error.value)


def test_a_program_that_prints_without_end_takes_no_memory(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="prints without end"):
        import_engine(tmp_path / "there", exported(tmp_path, script("yes", "exit 1")), root=tmp_path / "root")


@pytest.mark.parametrize("begin", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_an_answer_that_drips_is_given_up(short_dir: Path, begin: bytes) -> None:
    """Each byte begins a socket's own timeout anew."""
    given_up = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_dir / "s"))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.sendall(begin)
                while not given_up.wait(0.01):
                    client.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises((OSError, HTTPException)):
            request(short_dir / "s", "GET", "/", timeout_s=0.3)
        given_up.set()
        thread.join()


def test_an_answer_without_end_takes_no_memory(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_dir / "s"))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    client.sendall(bytes(1 << 20))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HTTPException, match="no end"):
            request(short_dir / "s", "GET", "/")
        thread.join()


@pytest.mark.parametrize("name", ["selected.json", "--help", "x" * 300, "a\nb", ".hidden", "a/b", "\x1b[2J"])
def test_an_archive_cannot_name_its_engine_as_it_likes(tmp_path: Path, name: str) -> None:
    engines = tmp_path / "engines"
    folder = put(engines, "good-1")
    document = json.loads((folder / "engine.json").read_text())
    (folder / "engine.json").write_text(json.dumps({**document, "id": name}))
    export_engine(engines, "good-1", tmp_path / "e.tar")
    with pytest.raises(BadDataError) as error:
        import_engine(tmp_path / "there", tmp_path / "e.tar", root=tmp_path / "root")
    assert str(error.value).isprintable()
    assert read_selection(tmp_path / "there") == SelectedEngine()


def test_what_is_no_regular_file_is_no_archive_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "e.tar.gz")
    for path in (tmp_path / "e.tar.gz", Path("/dev/zero"), tmp_path):
        with pytest.raises(BadDataError, match="is not a file"):
            import_engine(tmp_path / "there", path, root=tmp_path / "root")


def test_an_archive_of_zeros_is_refused_before_it_is_written(tmp_path: Path) -> None:
    zeros = bytes(1 << 22)
    document = {
        "schema": 1, "id": "z-1", "recipe": {"name": "cpu"}, "source": {"commit": "abc"}, "target": {"machine": None},
        "files": {"bin/llama-server": {"sha256": hashlib.sha256(zeros).hexdigest(), "bytes": len(zeros)}},
    }  # fmt: skip
    with tarfile.open(tmp_path / "z.tar.gz", "w:gz") as tar:
        for name, body in (("engine.json", json.dumps(document).encode()), ("bin/llama-server", zeros)):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    with pytest.raises(BadDataError, match="no Linux program"):
        import_engine(tmp_path / "there", tmp_path / "z.tar.gz", root=tmp_path / "root")
    document["files"]["bin/llama-server"]["bytes"] = 1 << 60  # type: ignore[index]
    with tarfile.open(tmp_path / "huge.tar", "w") as tar:
        body = json.dumps(document).encode()
        info = tarfile.TarInfo("engine.json")
        info.size = len(body)
        tar.addfile(info, io.BytesIO(body))
    with pytest.raises(DoesNotFitError):
        import_engine(tmp_path / "there", tmp_path / "huge.tar", root=tmp_path / "root")
