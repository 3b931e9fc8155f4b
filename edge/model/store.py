"""The model folder and what else holds models: list what is there, and turn a reference into one usable file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from edge.errors import ModelMissingError, UsageError
from edge.model import receipt, source, splitset
from edge.model.file import ModelFile
from edge.model.header import quant_of, read_header
from edge.model.meta import ModelMeta
from edge.model.quant import PREFERENCE, UNKNOWN, canonical, label_from_name, public_name
from edge.model.scan import Found, scan, size_of
from edge.model.verdict import Verdict, VerdictError, not_a_model


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the list: a file or a set, usable or not. `quant` is by its name; the header may know better."""

    name: str
    quant: str
    path: Path
    shards: tuple[Path, ...]
    bytes: int
    verdict: Verdict | None = None
    source: str | None = None
    revision: str | None = None
    writable: bool = False  # in our own folder

    @property
    def id(self) -> str:
        return self.name if self.quant == UNKNOWN else f"{self.name}:{self.quant}"


class Store:
    """`models_dir` is ours; `extra_dirs` are only read (a hub cache among them). Nothing is created here."""

    def __init__(self, models_dir: Path, extra_dirs: Sequence[Path] = ()) -> None:
        self.models_dir = models_dir
        self.extra_dirs = tuple(extra_dirs)

    def list(self) -> list[Entry]:
        """Everything by name, then size. A bad file is an entry with a verdict, never an error."""
        entries: dict[str, Entry] = {}
        for folder in (self.models_dir, *self.extra_dirs):
            for found in scan(folder):
                entry = self._entry(found, own=folder == self.models_dir)
                # A hub cache shows one file under each revision: the first is enough.
                entries.setdefault(os.path.realpath(entry.path), entry)
        return sorted(entries.values(), key=lambda entry: (entry.name.lower(), entry.bytes, str(entry.path)))

    def resolve(self, ref: str) -> ModelFile:
        """`NAME[:QUANT]`, a path, or a source that was installed.

        Raises ModelMissingError (what there is, and the next step) or BadModelError (the verdict).
        """
        if source.is_source(ref):
            return self._resolve_source(ref)
        path = Path(ref).expanduser()
        if "/" in ref or ref.lower().endswith(".gguf"):
            if not os.path.lexists(path):
                raise ModelMissingError(
                    f"no such file: {ref}", "give the path of a .gguf file, or see: edgellm model list"
                )
            return open_model(path.absolute())
        return self._best(self._named(ref), ref)

    def _entry(self, found: Found, own: bool) -> Entry:
        verdict = found.wrong or (splitset.missing_shards(found.missing) if found.missing else None)
        note = receipt.read(found.path.parent)
        path = str(found.path)
        return Entry(
            public_name(path),
            label_from_name(path if len(found.shards) > 1 else found.path.name),
            found.path,
            found.shards,
            found.bytes,
            verdict,
            note.source if note else None,
            note.revision if note else None,
            own,
        )

    def _named(self, ref: str) -> Sequence[Entry]:
        name, _, quant = ref.partition(":")
        wanted = canonical(quant) if quant else None
        entries = self.list()
        same = [entry for entry in entries if entry.name.lower() == name.lower()]
        found = [entry for entry in same if wanted in (None, entry.quant, entry.quant.removeprefix("UD-"))]
        if not found:
            raise missing(ref, same or entries)
        return found

    def _resolve_source(self, ref: str) -> ModelFile:
        wanted = source.parse(ref)
        if isinstance(wanted, source.FileSource):
            return self.resolve(wanted.path)
        found = [entry for entry in self.list() if entry.source and _comes_from(entry, wanted)]
        if not found:
            raise ModelMissingError(f"{wanted} is not here yet", f"fetch it: edgellm model pull {wanted}")
        return self._best(found, str(wanted))

    def _best(self, entries: Iterable[Entry], ref: str) -> ModelFile:
        """The preferred quant among usable ones; the verdict of the first when none is usable."""
        ranked = sorted(entries, key=lambda entry: (entry.verdict is not None, _rank(entry.quant), not entry.writable))
        error: VerdictError | None = None
        for entry in ranked:
            try:
                return open_model(entry.path)
            except VerdictError as bad:
                error = error or bad
        raise error or ModelMissingError(f"no model {ref}", "edgellm model list")


def open_model(path: Path) -> ModelFile:
    """One model by the path of its file or of any of its shards. Raises BadModelError or ModelMissingError."""
    found = _found(path)
    if found.wrong:
        raise VerdictError(found.wrong, path.name)
    metas = [_header(shard) for shard in found.shards]
    single = metas[0].split is None and len(metas) == 1
    if found.missing and not single:
        raise VerdictError(splitset.missing_shards(found.missing), path.name)
    for shard, meta in zip(found.shards, metas, strict=True):
        wrong = splitset.judge_shard(shard.stem, meta)
        if wrong:
            raise VerdictError(wrong, shard.name)
    whole = splitset.merge(metas)
    whole = replace(whole, quant=quant_of(whole.file_type, whole.tensors))
    wrong = not_a_model(whole)
    if wrong:
        raise VerdictError(wrong, path.name)
    return ModelFile(
        name=public_name(str(path)),
        quant=whole.quant,
        path=str(found.path),
        shards=tuple(str(shard) for shard in found.shards),
        bytes=found.bytes,
        fingerprint=fingerprint(found.shards),
        meta=whole,
    )


def fingerprint(paths: Iterable[Path]) -> str:
    """Changes when a file's path, size or time of change does. Cheap: no content is read."""
    digest = sha256()
    for path in paths:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def missing(ref: str, entries: Sequence[Entry]) -> ModelMissingError:
    """Says what exists instead, nearest first, and the next step."""
    import difflib

    ids = [entry.id for entry in entries if entry.verdict is None]
    near = difflib.get_close_matches(ref, ids, 3, 0.5)
    table = "\n".join(f"  {name}" for name in dict.fromkeys([*near, *ids][:12])) or None
    here = "there is no model here yet" if not ids else f"no model {ref!r} here; these are"
    return ModelMissingError(here if ids else f"no model {ref!r}: {here}", f"edgellm model pull {ref}", table=table)


def _found(path: Path) -> Found:
    if path.is_dir():
        inside = scan(path)
        if len(inside) != 1:
            raise UsageError(f"{path} holds {len(inside)} models", "give the path of one .gguf file")
        return inside[0]
    if not path.name.lower().endswith(".gguf"):
        return Found(path, (path,), size_of(path) or 0)
    same = [found for found in scan_folder_of(path) if path in found.shards]
    return same[0] if same else Found(path, (path,), size_of(path) or 0)


def scan_folder_of(path: Path) -> list[Found]:
    return [found for found in scan(path.parent) if found.path.parent == path.parent]


def _header(path: Path) -> ModelMeta:
    try:
        return read_header(path)
    except OSError as error:
        hint = "look at its permissions and those of its folders"
        raise VerdictError(Verdict("unreadable", f"cannot be read: {error.strerror}", hint), path.name) from error


def _rank(quant: str) -> int:
    plain = quant.removeprefix("UD-")
    return PREFERENCE.index(plain) if plain in PREFERENCE else len(PREFERENCE)


def _comes_from(entry: Entry, wanted: source.Source) -> bool:
    if not isinstance(wanted, source.HubSource):
        return entry.source == str(wanted)
    installed = source.parse(entry.source or "")
    return (
        isinstance(installed, source.HubSource)
        and installed.repo.lower() == wanted.repo.lower()
        and wanted.quant in (None, entry.quant, entry.quant.removeprefix("UD-"))
        and wanted.file in (None, installed.file)
        and wanted.revision in (None, installed.revision, entry.revision)
    )
