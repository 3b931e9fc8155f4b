"""FC-79: the exact folder that blocks, judged as the kernel would for another user."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import ConfigError
from edge.linux.files import writable_by_others
from edge.service.access import PathUser, find_problem, future_user

STRANGER = PathUser("edgellm", 987_654, frozenset({987_654}))


@pytest.fixture
def models(short_dir: Path) -> Path:
    short_dir.chmod(0o755)
    folder = short_dir / "a/b/models"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF")
    (folder / "m.gguf").chmod(0o644)
    return folder


def test_fc_79_a_closed_parent_is_named_not_the_open_folder(models: Path) -> None:
    closed = models.parent.parent
    closed.chmod(0o700)
    found = find_problem(models / "m.gguf", STRANGER)
    assert found is not None
    assert (found.kind, found.path) == ("closed", closed)
    assert f"user edgellm may not enter {closed} (mode 0700" in found.sentence
    assert found.hint.startswith(f"chmod o+x {closed}")


def test_fc_79_missing_empty_unreadable(models: Path) -> None:
    assert find_problem(models / "m.gguf", STRANGER) is None
    assert find_problem(models, STRANGER) is None
    missing = find_problem(models / "no/such/file", STRANGER)
    assert missing is not None
    assert (missing.kind, missing.path) == ("missing", models / "no")
    (models / "m.gguf").chmod(0o600)
    unreadable = find_problem(models / "m.gguf", STRANGER)
    assert unreadable is not None
    assert unreadable.kind == "unreadable"
    (models / "m.gguf").unlink()
    empty = find_problem(models, STRANGER)
    assert empty is not None
    assert empty.kind == "empty"
    assert "is its disk mounted?" in empty.sentence


def test_groups_and_owners_are_let_through(models: Path) -> None:
    state = models.stat()
    models.chmod(0o750)
    assert find_problem(models, STRANGER) is not None
    assert find_problem(models, PathUser("ann", 987_654, frozenset({state.st_gid}))) is None
    models.chmod(0o070)  # the owner's bits count, even where the group's would pass
    assert (
        find_problem(models, PathUser("ann", state.st_uid, frozenset({state.st_gid}))) is not None or state.st_uid == 0
    )


def test_what_a_link_points_to_counts(models: Path, short_dir: Path) -> None:
    link = short_dir / "link"
    link.symlink_to(models)
    assert find_problem(link / "m.gguf", STRANGER) is None
    models.parent.chmod(0o700)
    found = find_problem(link / "m.gguf", STRANGER)
    assert found is not None
    assert found.path == models.parent


def test_who_will_be(models: Path) -> None:
    assert future_user("no-user-of-that-name") == PathUser("no-user-of-that-name", -1, frozenset())
    with pytest.raises(ConfigError):
        PathUser.named("no-user-of-that-name")
    assert PathUser.named("root").uid == 0


def test_what_others_can_exchange(models: Path) -> None:
    ours = frozenset({0, os.getuid()})
    file = models / "m.gguf"
    assert writable_by_others(file, ours) is None  # /tmp is sticky: others add to it, and exchange nothing
    models.chmod(0o757)
    assert writable_by_others(file, ours) == models
    models.chmod(0o755)
    file.chmod(0o646)
    assert writable_by_others(file, ours) == file
    file.chmod(0o644)
    link = models / "link"
    link.symlink_to(file)
    assert writable_by_others(link, ours) is None
    models.parent.chmod(0o777)
    assert writable_by_others(link, ours) == models.parent


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=20))
def test_a_hint_is_one_shell_word_for_any_name(name: str) -> None:
    """A folder named `a; rm -rf b` must not become a command of the operator who follows the hint."""
    if name in (".", ".."):
        return
    with tempfile.TemporaryDirectory(prefix="e-", dir="/tmp") as base:
        Path(base).chmod(0o755)
        closed = Path(base) / name
        try:
            closed.mkdir(mode=0o700)
        except OSError:
            return  # longer than 255 bytes
        found = find_problem(closed / "m.gguf", STRANGER)
        assert found is not None
        assert shlex.split(found.hint.removesuffix(", or keep the models elsewhere")) == ["chmod", "o+x", str(closed)]
