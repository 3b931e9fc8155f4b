"""Find candidates for models under a folder, by names only; no file is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from edge.linux.slow_reads import reading
from edge.models.quant import shard_of
from edge.models.verdict import HeaderVerdict, bad_name
from edge.units import printable

PARTIAL = ".partial"
_DEPTH = 8  # a hub cache needs 5
_LINKS_MAX = 40  # MAXSYMLINKS of the kernel
# Folders of the Hugging Face cache whose files are not models under their own names, and our own work.
_SKIPPED = frozenset({PARTIAL, "blobs", "refs", ".no_exist", ".locks", ".cache", ".git"})
# Names of unfinished downloads, and of pieces that must be joined first.
_UNFINISHED = (
    ".part",
    ".partial",
    ".incomplete",
    ".download",
    ".downloading",
    ".crdownload",
    ".aria2",
    ".tmp",
    ".gguf.aria2",
)


class ModelCandidate(Struct, frozen=True):
    """One candidate: its shards in order. `missing`: shards that its name implies; `wrong`: why it is unusable."""

    path: Path
    shards: tuple[Path, ...]
    bytes: int
    missing: tuple[str, ...] = ()
    wrong: HeaderVerdict | None = None
    name: str | None = None  # where the file's own name is none: a blob of another program's store
    projector: Path | None = None  # the one that this store names for it


def scan(folder: Path, depth: int = _DEPTH) -> list[ModelCandidate]:
    """Return every candidate under `folder`, by path; none for an absent or unreadable folder."""
    files = sorted(_walk(folder, depth, set()))
    found = [one for path in files if (one := _single(path)) is not None]
    return found + list(_sets([path for path in files if _is_gguf(path) and shard_of(path.stem)]))


def _walk(folder: Path, depth: int, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Walk a folder. `seen` holds the folders walked so far: links may form a loop."""
    try:
        with reading(folder):
            stat = folder.stat()
            entries = list(os.scandir(folder))
    except OSError:
        return
    # By inode: a link under another name to a folder that was walked would list its files twice, or without end.
    if (stat.st_dev, stat.st_ino) in seen:
        return
    seen.add((stat.st_dev, stat.st_ino))
    for entry in entries:
        try:
            is_folder = entry.is_dir()
        except OSError:
            is_folder = False
        if is_folder:
            if depth and entry.name not in _SKIPPED:
                yield from _walk(Path(entry.path), depth - 1, seen)
        elif ".gguf" in entry.name.lower():
            yield Path(entry.path)


def _is_gguf(path: Path) -> bool:
    return path.name.lower().endswith(".gguf")


def _single(path: Path) -> ModelCandidate | None:
    if _is_gguf(path):
        if shard_of(path.stem):
            return None
        size = size_of(path)
        return ModelCandidate(
            path, (path,), size or 0, wrong=bad_name(path.name) or (_dangling(path) if size is None else None)
        )
    wrong = unfinished(path.name)
    return ModelCandidate(path, (path,), size_of(path) or 0, wrong=wrong) if wrong else None


def unfinished(name: str) -> HeaderVerdict | None:
    """Judge a name with a suffix after `.gguf`: an interrupted download, or a piece of a cut file."""
    lower = name.lower()
    if lower.endswith(_UNFINISHED):
        return HeaderVerdict("partial", "is a download that was not finished", "fetch it again, or remove it")
    tail = lower.partition(".gguf")[2]
    if tail.startswith((".part", "-split-", ".split", ".0")):
        stem = name[: len(name) - len(tail)]
        return HeaderVerdict("piece", "is one piece of a cut file", f"join the pieces first: cat {stem}.* > {stem}")
    return None


def _sets(shards: list[Path]) -> Iterator[ModelCandidate]:
    groups: dict[tuple[Path, str, int], dict[int, Path]] = {}
    for path in shards:
        number, count = shard_of(path.stem) or (0, 0)
        prefix = path.stem[: -len("-00001-of-00001")]
        groups.setdefault((path.parent, prefix, count), {})[number] = path
    for (_, prefix, count), members in groups.items():
        ordered = tuple(members[number] for number in sorted(members))
        names = [f"{prefix}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
        missing = tuple(name for number, name in enumerate(names, 1) if number not in members)
        sizes = [size_of(path) for path in ordered]
        broken = next((_of_shard(path) for path, size in zip(ordered, sizes, strict=True) if size is None), None)
        wrong = bad_name(ordered[0].name) or broken or _suffix(ordered, count)
        yield ModelCandidate(ordered[0], ordered, sum(size or 0 for size in sizes), missing, wrong)


def _of_shard(path: Path) -> HeaderVerdict:
    """Name the shard: the verdict on a set stands beside the name of the first one."""
    one = _dangling(path)
    return HeaderVerdict(one.kind, f"has a shard {printable(path.name)} that {one.sentence}", one.hint)


def _suffix(shards: tuple[Path, ...], count: int) -> HeaderVerdict | None:
    """Judge the suffix: llama_split_prefix compares it with ".gguf" exactly, and finds no other shard of `.GGUF`."""
    odd = next((path.name for path in shards if path.suffix != ".gguf"), None)
    if odd is None or count == 1:
        return None
    hint = f'rename the shards: for f in *{odd[-5:]}; do mv "$f" "${{f%.*}}.gguf"; done'
    return HeaderVerdict("shard_suffix", f"is a set whose shards end in {odd[-5:]}; llama.cpp finds only .gguf", hint)


def size_of(path: Path) -> int | None:
    try:
        with reading(path):
            return path.stat().st_size
    except OSError:
        return None


def _end_of_links(path: Path) -> Path | None:
    """Return the first missing target of a chain of links, as its link writes it; None for a circle."""
    for _ in range(_LINKS_MAX):
        target = path.readlink()
        path = path.parent / target
        try:
            if not path.is_symlink():
                return target
        except OSError:  # in a folder that may not be entered; before Python 3.14
            return target
    return None


def _dangling(path: Path) -> HeaderVerdict:
    if path.is_symlink():
        hint = "the file it stood for was moved or removed: fetch it again, or remove the link"
        missing = _end_of_links(path)
        if missing is None:
            return HeaderVerdict("dangling", "is a link that leads in a circle", "remove the link")
        return HeaderVerdict("dangling", f"is a link to {printable(str(missing))}, which does not exist", hint)
    return HeaderVerdict("unreadable", "cannot be read", "look at its permissions and those of its folders")
