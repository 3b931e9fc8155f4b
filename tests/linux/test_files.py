from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from pathlib import Path

import pytest

from edge.linux.files import (
    CHUNK_BYTES,
    READ_MAX_BYTES,
    parse_foreign_json,
    parse_json,
    read_bounded,
    read_json,
    sha256_file,
    sync_folder,
    try_lock,
    writable_by_others,
    write_atomic,
    write_report,
    write_shared,
)
from edge.resources import load_toml


def test_a_file_is_replaced_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, "one")
    write_atomic(path, "two", mode=0o640)
    assert path.read_text() == "two" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="the group root is trusted, so only a file of root's needs the list")
def test_a_user_that_an_access_list_lets_write_is_found(tmp_path: Path) -> None:
    """Bits and group of the file are those of an ordinary one: -rw-rw-r-- root root."""
    path = tmp_path / "llama-server"
    path.touch()
    path.chmod(0o664)
    ours = frozenset({os.geteuid()})
    assert writable_by_others(path, ours) is None
    # Version 2 of linux/posix_acl_xattr.h: tag, permissions, id; the second is user 12345, the fourth the mask.
    entries = [(0x01, 6, -1), (0x02, 6, 12345), (0x04, 4, -1), (0x10, 6, -1), (0x20, 4, -1)]
    try:
        os.setxattr(
            path, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *e) for e in entries)
        )
    except OSError:
        pytest.skip("a file system without access lists")
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    assert writable_by_others(path, ours) == path


@pytest.mark.parametrize("name", ["{}.new", ".{}.new", "{}.tmp", ".{}.tmp", "{}~"])
def test_a_link_planted_beside_a_file_is_not_written_through(tmp_path: Path, name: str) -> None:
    """Another user's link under a name that can be guessed would have root write to its target."""
    victim, path = tmp_path / "victim", tmp_path / "cache" / "headers.json"
    victim.write_text("secret")
    path.parent.mkdir()
    planted = path.with_name(name.format(path.name))
    planted.symlink_to(victim)
    write_atomic(path, "ours")
    assert (path.read_text(), victim.read_text(), planted.readlink()) == ("ours", "secret", victim)
    path.unlink()
    path.symlink_to(victim)
    write_atomic(path, "ours")
    assert not path.is_symlink() and victim.read_text() == "secret"


def test_a_failed_write_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, "one")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_a_shared_file_gets_its_folder_and_is_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "engines/one/engine.json"
    write_shared(path, "{}")
    assert path.read_text() == "{}" and stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": NaN}', '{"a": 1e400}', '{"a": -Infinity}', '{"a": ', '"\\ud800', "1" * 5000]
)
def test_bad_json_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError):
        read_json(tmp_path / "a.json")


def test_good_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, 2.5, null]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, 2.5, None]}


def test_bad_toml_is_a_value_error(tmp_path: Path) -> None:
    for number, text in enumerate(("a = " + "[" * 100_000, "a = ", "a = '\xff")):
        path = tmp_path / f"{number}.toml"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError):
            load_toml(path)


def test_only_regular_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    """A FIFO would block the caller, /dev/zero never ends, a folder is an error of its own."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path, tmp_path / "none"):
        with pytest.raises(OSError):
            read_bounded(path)
    with (tmp_path / "big").open("wb") as file:
        file.truncate(READ_MAX_BYTES + 1)
    with pytest.raises(ValueError, match="larger"):
        read_bounded(tmp_path / "big")


def test_the_hash_of_a_file_and_its_progress(tmp_path: Path) -> None:
    data = os.urandom(CHUNK_BYTES + 77)
    seen: list[int] = []
    (tmp_path / "a").write_bytes(data)
    assert sha256_file(tmp_path / "a", seen.append) == hashlib.sha256(data).hexdigest()
    assert sum(seen) == len(data) and len(seen) == 2


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as other:
        assert try_lock(one) and not try_lock(other) and not try_lock(other, shared=True)
    with (tmp_path / "lock").open("w") as other:
        assert try_lock(other)


def test_a_write_that_the_disk_refuses_has_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """write(2) and fsync(2) know a descriptor only: the command line blamed its own output."""

    def refused(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match=r"state\.json"):
        write_atomic(tmp_path / "state.json", "new")
    with pytest.raises(OSError, match=tmp_path.name):
        sync_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_400_digits_is_no_json_of_ours_and_nothing_in_that_of_others() -> None:
    """A float cannot hold it: the first division would end a command with a traceback."""
    for text in ("9" * 400, "-" + "9" * 400, "1e400", "NaN"):
        with pytest.raises(ValueError):
            parse_json(f'{{"a": {text}}}')
        assert parse_foreign_json(f'{{"a": {text}, "b": {2**64 - 1}, "c": {-(2**63)}}}') == {
            "a": None,
            "b": 2**64 - 1,
            "c": -(2**63),
        }
    assert parse_json(str(2**64 - 1)) == 2**64 - 1


@pytest.mark.parametrize("kind", ["absent", "link", "fifo", "file"])
def test_a_report_replaces_what_has_its_name(tmp_path: Path, kind: str) -> None:
    """Another user may have put a link to a file of root's, or a FIFO, in its place."""
    path, secret = tmp_path / "report.html", tmp_path / "secret"
    secret.write_text("secret")
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("old")
    write_report(path, "new")
    assert (path.is_symlink(), path.read_text(), secret.read_text()) == (False, "new", "secret")


def test_a_report_to_a_device_that_is_full_is_named() -> None:
    with pytest.raises(OSError, match="/dev/full"):
        write_report(Path("/dev/full"), "new")
