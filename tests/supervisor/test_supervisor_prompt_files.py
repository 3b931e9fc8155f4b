"""Saved prompts on disk: what is kept, what is removed, and that no fault is more than a lost file."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from edge.supervisor.prompt_files import PromptFiles, file_key

KEY = file_key("model", "engine", "8192")
MIB = 1 << 20


def slot_file(*tokens: int, state: bytes = b"k" * 1000) -> bytes:
    """Return a file as llama_state_seq_save_file writes it."""
    return struct.pack(f"=III{len(tokens)}i", 0x67677371, 2, len(tokens), *tokens) + state


@pytest.fixture
def files(tmp_path: Path) -> PromptFiles:
    return PromptFiles(tmp_path / "prompts", MIB)


def saved(files: PromptFiles, content: bytes, key: str = KEY, age_s: int = 0) -> Path:
    name = files.begin_write(key, len(content))
    assert name is not None
    (files.folder / name).write_bytes(content)
    kept = files.keep(name)
    assert kept is not None
    os.utime(kept, (1e9 - age_s, 1e9 - age_s))
    return kept


def test_the_newest_come_first_and_only_those_of_the_key(files: PromptFiles) -> None:
    old, new = saved(files, slot_file(1, 2), age_s=50), saved(files, slot_file(3, 4))
    saved(files, slot_file(5, 6), key=file_key("another model"))
    assert files.newest(KEY, 4) == [new, old]
    assert files.newest(KEY, 1) == [new]


def test_only_this_user_can_read_them_and_names_cannot_be_guessed(files: PromptFiles) -> None:
    first, second = (files.begin_write(KEY, 10) for _ in range(2))
    assert first != second
    kept = saved(files, slot_file(1))
    assert kept.stat().st_mode & 0o777 == 0o600
    assert files.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
        lambda path: path.write_bytes(b""),
        lambda path: path.chmod(0o622),
    ],
    ids=["truncated", "one byte", "empty", "writable by others"],
)
def test_a_damaged_file_is_removed(files: PromptFiles, damage: object) -> None:
    good, bad = saved(files, slot_file(1), age_s=9), saved(files, slot_file(2))
    assert callable(damage)
    damage(bad)
    assert files.newest(KEY, 4) == [good]
    assert not bad.exists()


def test_a_link_is_removed_and_its_target_is_not(files: PromptFiles, tmp_path: Path) -> None:
    kept = saved(files, slot_file(1))
    target = tmp_path / "target"
    target.write_bytes(kept.read_bytes())
    kept.unlink()
    kept.symlink_to(target)
    assert files.newest(KEY, 4) == []
    assert target.exists() and not kept.is_symlink()


def test_what_was_being_written_or_read_at_a_kill_is_gone_at_the_next_start(files: PromptFiles) -> None:
    whole, read = saved(files, slot_file(1)), saved(files, slot_file(2))
    name = files.begin_write(KEY, 10)
    assert name is not None
    (files.folder / name).write_bytes(slot_file(3))
    assert files.begin_read(read) is not None
    assert files.newest(KEY, 4) == [whole]
    assert [path.name for path in files.folder.iterdir()] == [whole.name]


def test_a_file_that_was_read_is_the_newest(files: PromptFiles) -> None:
    old, new = saved(files, slot_file(1), age_s=50), saved(files, slot_file(2))
    assert files.begin_read(old) == old.with_suffix(".reading").name
    files.end_read(old, good=True)
    assert files.newest(KEY, 2) == [old, new]
    files.begin_read(old)
    files.end_read(old, good=False)
    assert files.newest(KEY, 2) == [new]


def test_what_is_no_slot_file_is_not_kept(files: PromptFiles) -> None:
    for content in (b"", b"GGUF" * 9, slot_file(1, 2, 3)[:20]):
        name = files.begin_write(KEY, 10)
        assert name is not None
        (files.folder / name).write_bytes(content)
        assert files.keep(name) is None
    assert files.keep("never-written.part") is None
    assert list(files.folder.iterdir()) == []


def test_a_conversation_that_goes_on_replaces_its_former_file(files: PromptFiles) -> None:
    words = tuple(range(100))
    former = saved(files, slot_file(*words, 7, 8))
    other = saved(files, slot_file(*reversed(words)))
    later = saved(files, slot_file(*words, 9, 10, 11))
    assert not former.exists() and other.exists() and later.exists()


def test_the_folder_stays_within_its_limit_the_last_used_are_kept(tmp_path: Path) -> None:
    files = PromptFiles(tmp_path / "prompts", 5000)
    made = [saved(files, slot_file(number, state=b"k" * 1800), age_s=100 - number) for number in range(4)]
    assert [path.exists() for path in made] == [False, False, True, True]
    assert files.begin_write(KEY, 5001) is None, "it would be removed at once"


def test_a_full_disk_gets_no_file(tmp_path: Path) -> None:
    assert PromptFiles(tmp_path / "prompts", 1 << 60).begin_write(KEY, 10) is None


def test_a_folder_of_another_kind_costs_only_the_files(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("not a folder")
    files = PromptFiles(tmp_path / "prompts", MIB)
    assert files.begin_write(KEY, 10) is None and files.newest(KEY, 4) == []
