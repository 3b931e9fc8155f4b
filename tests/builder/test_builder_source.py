"""The source is the pinned one or none (build/llama.cpp.toml)."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.builder.download import clone, download
from edge.builder.source import Pin, fetch, locate, parse_source, pin_for, pins, unchanged, unpack
from edge.errors import BadDataError, UnavailableError, UsageError
from edge.resources import data_dir, load_toml

_TABLE = load_toml(data_dir("build") / "llama.cpp.toml")


def _sdist(path: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(content), 0o755 if name.endswith(".sh") else 0o644, 1_700_000_000
            tar.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def pin(tmp_path: Path) -> Pin:
    """The shipped pin, pointed at a small archive in src/."""
    (tmp_path / "src").mkdir()
    inside = "pkg-1/vendor/llama.cpp"
    files = {
        f"{inside}/CMakeLists.txt": b"project(x)",
        f"{inside}/tools/server/server.cpp": b"int main() {}",
        f"{inside}/run.sh": b"#!/bin/sh\n",
        f"{inside}/.git": b"gitdir: ../../.git/modules/x\n",
        f"{inside}/models/vocab.gguf": b"big",
        f"{inside}/../../../escaped": b"no",
        "pkg-1/setup.py": b"not ours",
    }
    sha256 = _sdist(tmp_path / "src/pkg-1.tar.gz", files, {f"{inside}/link": "/etc/passwd"})
    size = (tmp_path / "src/pkg-1.tar.gz").stat().st_size
    pypi = {"name": "pkg", "version": "1", "file": "pkg-1.tar.gz", "bytes": size, "sha256": sha256, "inside": inside}
    return replace(pins(_TABLE)[0], pypi=pypi)


def test_only_the_tree_is_written_and_only_plain_files(tmp_path: Path, pin: Pin) -> None:
    source = fetch(parse_source("pypi"), pin, tmp_path / "src", ("models/*.gguf",), lambda _: None)
    names = sorted(str(p.relative_to(source.tree)) for p in source.tree.rglob("*") if p.is_file() or p.is_symlink())
    assert names == ["CMakeLists.txt", "run.sh", "tools/server/server.cpp"]
    assert not (tmp_path / "escaped").exists() and not (tmp_path / "src/escaped").exists()
    assert os.access(source.tree / "run.sh", os.X_OK)
    assert (source.tree / "CMakeLists.txt").stat().st_mtime == 1_700_000_000
    assert (source.commit, source.pinned, source.version) == (pin.commit, True, pin.version)


def test_a_wrong_hash_is_refused_and_leaves_nothing(tmp_path: Path, pin: Pin) -> None:
    archive = tmp_path / "src/pkg-1.tar.gz"
    data = bytearray(archive.read_bytes())
    data[-9] ^= 1
    archive.write_bytes(bytes(data))
    with pytest.raises(BadDataError, match="wrong hash") as caught:
        fetch(parse_source("pypi"), pin, tmp_path / "src", (), lambda _: None)
    assert caught.value.exit_code == 65
    assert [p.name for p in (tmp_path / "src").iterdir()] == ["pkg-1.tar.gz"]


def test_a_second_fetch_does_nothing(tmp_path: Path, pin: Pin) -> None:
    said: list[str] = []
    fetch(parse_source("pypi"), pin, tmp_path / "src", (), said.append)
    assert said
    (tmp_path / "src/pkg-1.tar.gz").unlink()
    said.clear()
    fetch(parse_source("pypi"), pin, tmp_path / "src", (), said.append)
    assert said == []


def test_the_sdist_as_a_file_for_boards_without_a_network(tmp_path: Path, pin: Pin) -> None:
    archive = (tmp_path / "src/pkg-1.tar.gz").rename(tmp_path / "carried.tar.gz")
    source = fetch(parse_source(f"path:{archive}"), pin, tmp_path / "src", (), lambda _: None)
    assert (source.tree / "tools/server/server.cpp").is_file()
    assert source.pinned


def test_a_full_disk_leaves_no_half_tree(tmp_path: Path, pin: Pin) -> None:
    """FC-14: the tree appears by a rename."""
    (tmp_path / "src" / pin.commit9).write_text("a file where the tree should go")
    with pytest.raises(Exception, match="could not be unpacked"):
        unpack(tmp_path / "src/pkg-1.tar.gz", pin.pypi, tmp_path / "src" / pin.commit9, ())
    assert sorted(p.name for p in (tmp_path / "src").iterdir()) == [pin.commit9, "pkg-1.tar.gz"]


def _tree(folder: Path) -> Path:
    (folder / "tools/server").mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text("project(x)")
    return folder


def test_a_folder_a_checkout_with_vendor_and_what_is_neither(tmp_path: Path, pin: Pin) -> None:
    tree = _tree(tmp_path / "tree")
    assert locate(parse_source(f"path:{tree}"), pin, tmp_path).tree == tree
    vendored = _tree(tmp_path / "binding/vendor/llama.cpp")
    found = locate(parse_source(f"path:{tmp_path / 'binding'}"), pin, tmp_path)
    assert (found.tree, found.commit, found.pinned) == (vendored, "unknown", False)
    with pytest.raises(BadDataError, match=r"no llama\.cpp tree"):
        locate(parse_source(f"path:{tmp_path}"), pin, tmp_path)


def test_a_symlinked_folder_is_resolved_and_a_dangling_git_file_is_named(tmp_path: Path, pin: Pin) -> None:
    """Through a symlink the relative path in .git points nowhere, and ninja restarts without end."""
    tree = _tree(tmp_path / "a/b/vendor")
    (tmp_path / "a/modules").mkdir()
    (tree / ".git").write_text("gitdir: ../../modules\n")
    (tmp_path / "link").symlink_to(tree)
    assert locate(parse_source(f"path:{tmp_path / 'link'}"), pin, tmp_path).tree == tree
    (tmp_path / "a/modules").rmdir()
    with pytest.raises(BadDataError, match="does not exist"):
        locate(parse_source(f"path:{tree}"), pin, tmp_path)
    (tree / ".git").write_bytes(b"gitdir: \xff\0\n")
    with pytest.raises(BadDataError, match="does not exist"):
        locate(parse_source(f"path:{tree}"), pin, tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> tuple[str, str]:
    """A git repository with one commit and the tag b1 → (url, commit)."""
    tree = _tree(tmp_path / "upstream")
    (tree / "tools/server/server.cpp").write_text("int main() {}")
    identity = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "a"}
    env = {**os.environ, **identity, "GIT_COMMITTER_EMAIL": "a@example.org"}
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "b1"]):
        subprocess.run(["git", *command], cwd=tree, env=env, check=True)
    subprocess.run(["git", "config", "uploadpack.allowAnySHA1InWant", "true"], cwd=tree, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
    return f"file://{tree}", head.stdout.strip()


def test_git_by_commit_is_pinned_and_by_tag_is_not(tmp_path: Path, pin: Pin, repository: tuple[str, str]) -> None:
    url, commit = repository
    pin = replace(pin, commit=commit, git={"url": url})
    source = fetch(parse_source("git"), pin, tmp_path / "a", (), lambda _: None)
    assert source.pinned and source.tree == tmp_path / "a" / commit[:9]
    source = fetch(parse_source("git:b1"), pin, tmp_path / "b", (), lambda _: None)
    assert (source.pinned, source.commit, source.version) == (False, commit, "b1")


def test_git_that_answers_nothing_leaves_nothing(tmp_path: Path, repository: tuple[str, str]) -> None:
    with pytest.raises(UnavailableError, match="git fetch failed"):
        clone(repository[0], "b999", tmp_path / "c/tree", lambda _: None)
    assert list((tmp_path / "c").iterdir()) == []


def test_pip_refuses_another_file_than_the_pinned_one(
    tmp_path: Path, pin: Pin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is a folder here; its file has the right name and another hash."""
    index = tmp_path / "index"
    index.mkdir()
    _sdist(
        index / "pkg-1.tar.gz",
        {"pkg-1/PKG-INFO": b"Metadata-Version: 2.1\nName: pkg\nVersion: 1\n", "pkg-1/setup.py": b""},
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(BadDataError, match="another hash"):
        download(pin.pypi, tmp_path / "elsewhere", lambda _: None)


def test_words_of_source() -> None:
    assert parse_source("git:b9592").ref == "b9592"
    for text in ("", "pip", "git:", "path:", "pypi:x", "path"):
        with pytest.raises(UsageError):
            parse_source(text)


def test_pins_are_keyed_by_the_cuda_they_need() -> None:
    first = _TABLE["pins"][0]
    table = {"pins": [{**first, "id": "new", "cuda_min": "12.0"}, {**first, "id": "old", "cuda_min": "11.4"}]}
    assert [pin_for(table, cuda).id for cuda in ((13, 0), (12, 6), (11, 8), (11, 4), (10, 2), None)] == [
        "new", "new", "old", "old", "new", "new",
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["edited", "added", "removed", "planted"])
def test_a_tree_that_changed_since_it_was_unpacked_is_not_built(tmp_path: Path, pin: Pin, change: str) -> None:
    """What lies in the tree is compiled, and CMakeLists.txt runs: an edit or a planted file is no pinned source."""
    src, said = tmp_path / "src", list[str]()
    tree = fetch(parse_source("pypi"), pin, src, (), said.append).tree
    if change == "edited":
        (tree / "CMakeLists.txt").write_text("execute_process(COMMAND id)")
    elif change == "added":
        (tree / "evil.cmake").symlink_to("/tmp/evil.cmake")
    elif change == "removed":
        (tree / "run.sh").unlink()
    else:
        (src / f"{pin.commit9}.manifest.json").unlink()
    assert not unchanged(tree)
    fetch(parse_source("pypi"), pin, src, (), said.append)
    assert unchanged(tree) and (tree / "CMakeLists.txt").read_bytes() == b"project(x)"
    assert sorted(p.name for p in tree.iterdir()) == ["CMakeLists.txt", "models", "run.sh", "tools"]
    assert any("taking it anew" in line for line in said)
