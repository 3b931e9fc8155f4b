"""List models in our folder and in other stores, and resolve a reference to one usable file.

Names decide here; a header is read only of the requested model (survey.py reads them all).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.errors import ModelMissingError
from edge.folders import Folders, system_folders
from edge.model import hubcache, receipt, source, splitset
from edge.model.file import ModelFile
from edge.model.header import peek_kind
from edge.model.open import open_model
from edge.model.quant import UNKNOWN, canonical, is_named, label_from_name, matching, order
from edge.model.scan import Found, scan
from edge.model.verdict import Verdict, VerdictError, of_kind


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a set, usable or not. `quant` is the name's; the header may correct it."""

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
        """List everything by name, then size. A bad file is an entry with a verdict, never an error."""
        return sorted(
            (self.entry(found) for found in self.found()),
            key=lambda entry: (entry.name.lower(), entry.bytes, not entry.writable, str(entry.path)),
        )

    def found(self) -> Iterable[Found]:
        """Yield every candidate once: a hub cache has the same file under each revision."""
        seen: set[str] = set()
        for folder in (self.models_dir, *self.extra_dirs):
            for found in scan(folder):
                real = os.path.realpath(found.path)
                if real not in seen:
                    seen.add(real)
                    yield found

    def entry(self, found: Found) -> Entry:
        verdict = found.wrong or (splitset.missing_shards(found.missing) if found.missing else None)
        if verdict is None and "mmproj" in found.path.name.lower() and peek_kind(found.path) == "mmproj":
            verdict = of_kind("mmproj")
        path = str(found.path)
        note = receipt.read(found.path.parent)
        origin = (note.source, note.revision) if note else hubcache.origin(found.path) or (None, None)
        return Entry(
            receipt.name_of(found.path, note),
            label_from_name(path if len(found.shards) > 1 else found.path.name),
            found.path,
            found.shards,
            found.bytes,
            verdict,
            origin[0],
            origin[1],
            self.models_dir in found.path.parents,
        )

    def resolve(self, ref: str) -> ModelFile:
        """Resolve `NAME[:QUANT]`, a path, or the source of an installed model.

        Raises ModelMissingError, or BadModelError with the verdict.
        """
        if source.is_source(ref):
            return self._resolve_source(ref)
        if "/" in ref or ref.lower().endswith(".gguf"):
            path = Path(ref).expanduser()
            if not os.path.lexists(path):
                hint = "give the path of a .gguf file, or see: edgellm model list"
                raise ModelMissingError(f"no such file: {ref}", hint)
            return open_model(path.absolute())
        return self._best(self.named(ref), ref)

    def named(self, ref: str) -> Sequence[Entry]:
        """Return the entries that `NAME[:QUANT]` matches, in any case. Raises ModelMissingError."""
        name, _, quant = ref.partition(":")
        entries = self.list()
        same = [entry for entry in entries if entry.name.lower() == name.lower()]
        wanted = canonical(quant)
        found = matching(same, quant) if quant else same
        found = found or [entry for entry in same if _quant_by_header(entry) == wanted]
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
        """Return the preferred usable quantization. Raises BadModelError with the first verdict if none is usable."""
        best = order(sorted(entries, key=lambda entry: not entry.writable))
        ranked = sorted(best, key=lambda entry: entry.verdict is not None)
        error: VerdictError | None = None
        for entry in ranked:
            try:
                return open_model(entry.path)
            except VerdictError as bad:
                error = error or bad
        raise error or ModelMissingError(f"no model {ref}", "edgellm model list")


def standard(folders: Folders, dirs: Iterable[str], env: Mapping[str, str]) -> Store:
    """Return the store that `model`, `plan`, `up` and `doctor` read.

    `dirs` is store.dirs of the configuration. The system service's models count where `folders` shares stores, and so
    does the Hugging Face cache; an instance in a folder of its own sees a cache only where the environment names one.
    """
    extra = [Path(text).expanduser() for text in dirs]
    system = system_folders()
    if folders.shared_stores and folders.models != system.models:
        extra.append(system.models)
    cache = hubcache.folder(env) if folders.shared_stores else hubcache.named_folder(env)
    return Store(folders.models, (*extra, *((cache,) if cache else ())))


def missing(ref: str, entries: Sequence[Entry]) -> ModelMissingError:
    """Return the error for a missing model, with what exists, nearest name first, and the next step."""
    import difflib

    ids = list(dict.fromkeys(entry.id for entry in entries if entry.verdict is None))
    pull = f"edgellm model pull {ref}"
    if not ids:
        return ModelMissingError(f"no model {ref!r}: there is none here yet", pull)
    near = difflib.get_close_matches(ref, ids, 3, 0.5)
    table = "\n".join(f"  {name}" for name in list(dict.fromkeys([*near, *ids]))[:12])
    return ModelMissingError(f"no model {ref!r} here; there is", f"name one of these, or: {pull}", table=table)


def _quant_by_header(entry: Entry) -> str | None:
    """Return the header's quantization if the file's name has none or a wrong one."""
    try:
        return open_model(entry.path).quant
    except VerdictError:
        return None


def _comes_from(entry: Entry, wanted: source.Source) -> bool:
    if not isinstance(wanted, source.HubSource):
        return entry.source == str(wanted)
    installed = source.parse(entry.source or "")
    return (
        isinstance(installed, source.HubSource)
        and installed.repo.lower() == wanted.repo.lower()
        and (wanted.quant is None or is_named(entry.quant, wanted.quant))
        and wanted.file in (None, installed.file)
        and wanted.revision in (None, installed.revision, entry.revision)
    )
