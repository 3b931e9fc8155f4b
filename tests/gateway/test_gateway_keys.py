from __future__ import annotations

import fcntl
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import ConfigError, UsageError
from edge.gateway import keys
from edge.gateway.keys import Key, KeyRing
from edge.resources import load_toml

SECRET = "sk-edge-abcdefghijklmnopqrstuvwxyz"


def made(name: str = "laptop", secret: str = SECRET, **options: bool) -> Key:
    return keys.make(name, secret, admin=options.get("admin", False), created="2026-11-29", others=())


def test_a_key_is_kept_as_a_hash_only_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "keys.toml"
    old = os.umask(0)
    try:
        keys.write(path, [made()])
    finally:
        os.umask(old)
    assert SECRET not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["keys.toml"]
    assert keys.read(path) == (made(),)


def test_two_new_keys_differ_and_are_long() -> None:
    first, second = keys.new_secret(), keys.new_secret()
    assert first != second
    assert len(first) > 40


def test_a_key_is_found_among_others() -> None:
    ring = [made("a", SECRET + "a"), made("b", SECRET + "b"), made("c", SECRET + "c")]
    assert keys.find(ring, SECRET + "b") == ring[1]
    assert keys.find(ring, SECRET) is None
    assert keys.find(ring, "") is None
    assert keys.find([], SECRET) is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Authorization": "Bearer abc"}, ("abc",)),
        ({"Authorization": "bearer  abc "}, ("abc",)),
        ({"Authorization": "abc"}, ("abc",)),
        ({"x-api-key": "abc"}, ("abc",)),
        ({"Authorization": "Bearer abc", "x-api-key": "other"}, ("abc", "other")),
        ({"Authorization": "Basic abc", "x-api-key": "other"}, ("Basic abc", "other")),
        ({"Authorization": "", "x-api-key": ""}, ()),
        ({}, ()),
    ],
)
def test_where_a_request_carries_its_key(headers: dict[str, str], expected: tuple[str, ...]) -> None:
    assert keys.presented(headers) == expected


@pytest.mark.parametrize("secret", ["short", "with space in a long enough one", "ümlauts-in-a-long-enough-key"])
def test_a_key_that_can_be_guessed_is_refused_without_repeating_it(secret: str) -> None:
    with pytest.raises(UsageError) as error:
        made(secret=secret)
    assert secret not in str(error.value)


@pytest.mark.parametrize("name", ["", "a" * 65, 'quo"te', "back\\slash", "new\nline"])
def test_a_name_that_would_break_the_file_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        made(name)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(UsageError, match="already"):
        keys.make("laptop", SECRET, admin=False, created="", others=[made()])


def test_a_secret_has_one_name() -> None:
    """Revoked under one name it would be accepted under the other."""
    with pytest.raises(UsageError, match="named 'laptop'"):
        keys.make("phone", SECRET, admin=True, created="", others=[made()])


@given(st.lists(st.tuples(st.from_regex(r"[A-Za-z0-9_.@ -]{1,20}", fullmatch=True), st.booleans()), max_size=5))
def test_what_is_written_is_read_again(entries: list[tuple[str, bool]]) -> None:
    import tempfile

    ring = tuple(Key(name, keys.digest(name), admin, "2026-11-29") for name, admin in entries)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        path.write_text(keys.render(ring))
        assert keys.parse(load_toml(path)) == ring


@pytest.mark.parametrize(
    "text",
    [
        "key = 3",
        "[[key]]\nname='a'",
        "[[key]]\nname='a'\nsha256='xyz'",
        "[[key]]\nname='a'\nsha256=3",
        "not toml [",
        "schema = 2",
        "schema = true",
    ],
)
def test_a_broken_key_file_is_an_error_that_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        keys.read(path)


def test_a_file_that_every_user_may_write_has_no_valid_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys.write(path, [made()])
    ring = KeyRing(path)
    path.chmod(0o666)
    ring.refresh()
    assert ring.needed and ring.find(SECRET) is None
    with pytest.raises(ConfigError, match="every user may write"):
        keys.read(path)
    path.chmod(0o600)
    ring.refresh()
    assert ring.find(SECRET) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_that_a_member_of_a_group_put_there_or_may_write_has_no_valid_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys.write(path, [made()])
    ring = KeyRing(path)
    tmp_path.chmod(0o775)
    os.chown(tmp_path, 0, 12345)
    theirs = tmp_path / "theirs.toml"
    keys.write(theirs, [made("mallory")])
    os.chown(theirs, 12346, 12345)
    theirs.rename(path)
    ring.refresh()
    assert ring.needed and ring.find(SECRET) is None
    with pytest.raises(ConfigError, match="belongs to user 12346"):
        keys.read(path)
    os.chown(path, 0, 12345)
    path.chmod(0o660)
    with pytest.raises(ConfigError, match="group 12345 may write"):
        keys.read(path)
    path.chmod(0o640)
    assert keys.read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_that_another_user_prepared_has_no_valid_key(tmp_path: Path) -> None:
    """In /tmp any user may make it before the operator does."""
    path = tmp_path / "keys.toml"
    keys.write(path, [made()])
    ring = KeyRing(path)
    os.chown(path, 12345, 12345)
    assert keys.read(path), "a closed folder: its owner decides, as in the folder of the service"
    tmp_path.chmod(0o1777)
    os.chown(path, 12346, 12345)
    ring.refresh()
    assert ring.needed and ring.find(SECRET) is None
    with pytest.raises(ConfigError, match="user 12346 made"):
        keys.read(path)
    path.rename(tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    os.chown(tmp_path / "theirs", 0, 0)
    os.chown(path, 12346, 12345, follow_symlinks=False)
    with pytest.raises(ConfigError, match="user 12346 made"):
        KeyRing(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_file_in_a_folder_that_another_user_prepared_has_no_valid_key(tmp_path: Path) -> None:
    path = tmp_path / "theirs/deeper/keys.toml"
    keys.write(path, [made()])
    ring = KeyRing(path)
    tmp_path.chmod(0o1777)
    os.chown(path.parents[1], 12345, 12345)
    path.touch()
    ring.refresh()
    assert ring.needed and ring.find(SECRET) is None
    with pytest.raises(ConfigError, match="user 12345 made"):
        keys.read(path)
    link = tmp_path / "keys.toml"
    link.symlink_to(tmp_path / "nologin")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ConfigError, match="user 12345 made"), keys.locked(link):
        pass
    assert not (tmp_path / "nologin").exists()


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_in_its_place_rejects_requests_and_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    """The file is read on the event loop: a FIFO would hold up every request until it is written."""
    path = tmp_path / "keys.toml"
    ring = KeyRing(path)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    ring.refresh()
    assert ring.needed and ring.empty
    with pytest.raises(ConfigError, match="is no regular file"):
        KeyRing(path)


def test_a_running_gateway_sees_a_revoked_key_at_once_and_locks_when_the_file_breaks(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys.write(path, [made("a", SECRET + "a"), made("b", SECRET + "b")])
    ring = KeyRing(path)
    assert ring.find(SECRET + "a") is not None
    keys.write(path, [made("b", SECRET + "b")])
    ring.refresh()
    assert ring.find(SECRET + "a") is None
    assert ring.find(SECRET + "b") is not None
    path.write_text("broken [")
    ring.refresh()
    assert ring.needed
    assert ring.find(SECRET + "b") is None
    keys.write(path, [])
    ring.refresh()
    assert not ring.needed


@pytest.mark.parametrize("how", ["emptied", "cut", "removed", "a folder", "a fifo", "a device"])
def test_a_ring_that_had_keys_stays_closed_and_says_it(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    keys.write(path, [made()])
    ring = KeyRing(path)
    path.unlink()
    if how == "emptied":
        path.touch()
    elif how == "cut":
        path.write_text("# Written by `edgellm key`.\nschema = 1\n")
    elif how == "a folder":
        path.mkdir()
    elif how == "a fifo":
        os.mkfifo(path)
    elif how == "a device":
        path.symlink_to("/dev/zero")
    ring.refresh()
    assert ring.needed and ring.find(SECRET) is None
    assert str(path) in caplog.text
    if how == "emptied":
        keys.write(path, [made("new", SECRET + "new")])
        ring.refresh()
        assert ring.find(SECRET + "new") is not None
        keys.write(path, [])
        ring.refresh()
        assert not ring.needed, "the last key was revoked, by name"


def test_a_key_that_comes_later_closes_too(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.toml")
    assert not ring.needed
    keys.write(tmp_path / "keys.toml", [made()])
    ring.refresh()
    assert ring.needed
    (tmp_path / "keys.toml").unlink()
    ring.refresh()
    assert ring.needed


def test_an_empty_ring_lets_nobody_in_where_others_can_reach_us(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "none.toml", required=True)
    assert ring.needed
    assert ring.find(SECRET) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_root_gives_the_key_file_back_and_no_file_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of the service's user the new file may be exchanged for a link as soon as it has its name."""
    path, victim = tmp_path / "keys.toml", tmp_path / "victim"
    victim.touch()
    keys.write(path, [])
    os.chown(path, 12345, 12346)
    keys.write(path, [])
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)
    rename = Path.replace

    def exchanged(self: Path, target: Path) -> Path:
        rename(self, target)
        target.unlink()
        target.symlink_to(victim)
        return target

    monkeypatch.setattr(Path, "replace", exchanged)
    keys.write(path, [])
    assert path.is_symlink() and victim.stat().st_uid == 0


def test_a_lock_on_the_folder_holds_up_no_change_of_the_keys(tmp_path: Path) -> None:
    folder, modes = os.open(tmp_path, os.O_RDONLY), []
    fcntl.flock(folder, fcntl.LOCK_EX)  # any user that may read the folder can

    def change() -> None:
        with keys.locked(tmp_path / "keys.toml"):
            modes.append((tmp_path / "keys.toml").stat().st_mode & 0o777)

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    thread.join(10)
    os.close(folder)
    assert modes == [0o600], "no other user can hold that one"


def test_a_key_that_is_revoked_while_the_gateway_starts_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stay = tmp_path / "keys.toml", keys.Key("stay", keys.digest("s" * 24))
    keys.write(path, [stay, keys.Key("gone", keys.digest("g" * 24))])
    read = keys.read

    def then_revoked(where: Path) -> tuple[keys.Key, ...]:
        found = read(where)
        keys.write(where, [stay])
        return found

    monkeypatch.setattr(keys, "read", then_revoked)
    ring = keys.KeyRing(path)
    ring.refresh()
    assert ring.find("g" * 24) is None and ring.find("s" * 24) is not None


def test_a_change_that_ends_before_its_writing_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(ZeroDivisionError), keys.locked(path):
        raise ZeroDivisionError
    assert not path.exists()
    path.write_text("")  # emptied by the operator
    with keys.locked(path):
        pass
    assert path.read_text() == ""
