"""Find candidates for models under a folder, by names only; no file is opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge.linux.slow_reads import reading
from edge.models.quant import shard_of
from edge.models.verdict import HeaderVerdict, bad_name
from edge.paths import LINKS_MAX, prepared_by_another
from edge.units import printable

PARTIAL = ".partial"
_DEPTH = 8  # a hub cache needs 5
# Files and folders that one scan looks at: in the folder (a hub cache may hold data sets), and behind links out of it.
_ENTRIES_MAX = 100_000
_LINKED_MAX = 10_000
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
    linked: bool = False  # behind a link that leads out of the scanned folder


def scan(folder: Path, depth: int = _DEPTH, *, every_link: bool = False) -> list[ModelCandidate]:
    """Return every candidate under `folder`, by path; none for an absent or unreadable folder.

    Links out of it are not followed to what another user made where every user may. `every_link` follows all of them,
    for the files beside one that the caller named.
    """
    walk = _Walk(folder, every_link)
    files = sorted(walk.files(depth), key=lambda path: (path in walk.linked, path))
    found = [one for path in files if (one := _single(path)) is not None]
    found += _sets([path for path in files if _is_gguf(path) and shard_of(path.stem)])
    return [replace(one, linked=True) if walk.linked.intersection(one.shards) else one for one in found]


class _Walk:
    """One walk: the folder itself, then what lies behind links out of it. `linked` has the files found there."""

    def __init__(self, top: Path, every_link: bool) -> None:
        self._top = top
        with reading(top):
            self._real = Path(os.path.realpath(top))
        self._every_link = every_link
        self._seen: set[tuple[int, int]] = set()  # the folders walked so far: links may form a loop
        self._out: list[tuple[Path, bool, int]] = []  # links out of the folder: to a folder?, the depth that is left
        self._left = sys.maxsize if every_link else _ENTRIES_MAX
        self._full = self._outside = False
        self.linked: set[Path] = set()

    def files(self, depth: int) -> Iterator[Path]:
        yield from self._folder(self._top, depth)
        self._outside = True
        self._left = min(self._left, _LINKED_MAX)
        for link in self._out:
            yield from self._wanted(*link)

    def _folder(self, folder: Path, depth: int) -> Iterator[Path]:
        try:
            with reading(folder):
                stat = folder.stat()
                if (stat.st_dev, stat.st_ino) in self._seen:
                    return
                # By inode: a link under another name to a folder that was walked would list its files twice.
                self._seen.add((stat.st_dev, stat.st_ino))
                with os.scandir(folder) as found:
                    entries = list(islice(found, self._left + (self._left < sys.maxsize)))
        except OSError:
            return
        if len(entries) > self._left and not self._full:
            self._full = True
            _note_rest(folder)
        del entries[self._left :]
        self._left -= len(entries)
        for entry in entries:
            try:
                is_folder = entry.is_dir()
            except OSError:
                is_folder = False
            if (depth and entry.name not in _SKIPPED) if is_folder else ".gguf" in entry.name.lower():
                yield from self._wanted(Path(entry.path), is_folder, depth)

    def _wanted(self, path: Path, is_folder: bool, depth: int) -> Iterator[Path]:
        if not self._every_link and _is_link(path):
            with reading(path):
                target = Path(os.path.realpath(path))
            if target in self._real.parents:
                return
            if not self._outside and self._real not in (target, *target.parents):
                self._out.append((path, is_folder, depth))
                return
        # Its folder was judged before: from there on, without the links that led to it.
        place = Path(os.path.realpath(path.parent)) / path.name if self._outside else None
        made = prepared_by_another(place, os.environ) if place else None
        if made is None:
            yield from self._allowed(path, is_folder, depth)
        else:
            _note_refused(made)

    def _allowed(self, path: Path, is_folder: bool, depth: int) -> Iterator[Path]:
        if is_folder:
            yield from self._folder(path, depth - 1)
        else:
            if self._outside:
                self.linked.add(path)
            yield path


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # in a folder that may not be entered; before Python 3.14
        return False


def _note_rest(folder: Path) -> None:
    _warn("%s holds too many files to look for models in all of them: the rest is not listed", printable(str(folder)))


def _note_refused(made: Path) -> None:
    try:
        owner = f"user {made.lstat().st_uid}"
    except OSError:
        owner = "another user"
    _warn(
        "%s can be written to by every user, so models that others (%s) put there are not listed: take the right away "
        "(chmod o-w, or the mount option umask=022)",
        printable(str(made.parent)),
        owner,
    )


@lru_cache  # said once by a process, which may scan for each model and at each reload
def _warn(message: str, *values: str) -> None:
    import logging  # late: a start with a small store does without it

    logging.getLogger(__name__).warning(message, *values)


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
    for _ in range(LINKS_MAX):
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
