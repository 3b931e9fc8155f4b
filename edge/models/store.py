"""List models in our folder and in other stores, and resolve a reference to one usable file.

Names decide here; a header is read only of the requested model (survey.py reads them all).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from edge.errors import ModelMissingError
from edge.linux.slow_reads import reading
from edge.models import ollama, receipt, source
from edge.models.header import peek_kind
from edge.models.open import ModelFile, missing_shards, open_model
from edge.models.quant import UNKNOWN, canonical, is_named, label_from_name, matching, order
from edge.models.scan import ModelCandidate, scan
from edge.models.verdict import HeaderVerdict, VerdictError, of_kind
from edge.paths import Folders, system_folders

# The user's Hugging Face cache: its folder, and the repository and revision of a file in it. Pure.


def hub_cache(env: Mapping[str, str]) -> Path | None:
    """Return the cache that other programs fill (`llama-server -hf`, `hf download`). It need not exist."""
    named = named_hub_cache(env)
    base = env.get("XDG_CACHE_HOME") or (f"{env['HOME']}/.cache" if env.get("HOME") else None)
    return named or (Path(base) / "huggingface" / "hub" if base else None)


def named_hub_cache(env: Mapping[str, str]) -> Path | None:
    """Return the cache that a variable names; None where only the default place is left."""
    # In the order of huggingface_hub's constants.py.
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if env.get(variable):
            return Path(env[variable]) / below
    return None


def hub_origin(path: Path) -> tuple[str, str] | None:
    """Return source and revision: `models--owner--repo/snapshots/<rev>/a.gguf` -> ("hf://owner/repo/a.gguf", rev)."""
    parts = path.parts
    for at, part in enumerate(parts[:-3]):
        if part.startswith("models--") and parts[at + 1] == "snapshots":
            repo = "/".join(part.split("--", 2)[1:])
            return (f"hf://{repo}/{'/'.join(parts[at + 3 :])}", parts[at + 2]) if "/" in repo else None
    return None


# LM Studio's folders, <publisher>/<repository>/<file>.gguf, since 0.3.6 and before.
_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
# Words in the names of files that go beside a model; the header decides.
_BESIDE_MODELS = ("mmproj", "mtp", "draft", "assistant", "eagle", "dflash")


class StoreEntry(Struct, frozen=True):
    """A file or a set, usable or not. `quant` is the name's; the header may correct it."""

    name: str
    quant: str
    path: Path
    shards: tuple[Path, ...]
    bytes: int
    verdict: HeaderVerdict | None = None
    source: str | None = None
    revision: str | None = None
    writable: bool = False  # in our own folder

    @property
    def id(self) -> str:
        return self.name if self.quant == UNKNOWN else f"{self.name}:{self.quant}"

    @property
    def order(self) -> tuple[str, int, bool, str]:
        """Return the place in a list: by name, then size, then our own copy first."""
        return self.name.lower(), self.bytes, not self.writable, str(self.path)


class Store:
    """`models_dir` is ours; `extra_dirs` are only read (a hub cache among them). Nothing is created here.

    `headers`: the folder where headers are kept that were read, None for none.
    """

    def __init__(self, models_dir: Path, extra_dirs: Sequence[Path] = (), headers: Path | None = None) -> None:
        self.models_dir = models_dir
        self.extra_dirs = tuple(extra_dirs)
        self.headers = headers

    def list(self) -> list[StoreEntry]:
        """List everything by name, then size. A bad file is an entry with a verdict, never an error."""
        return sorted((entry for _, entry in self.entries()), key=lambda entry: entry.order)

    def entries(self) -> Sequence[tuple[ModelCandidate, StoreEntry]]:
        """Return every candidate with its entry; one behind a link out of its folder yields its id to those inside.

        One of our own folder yields to those of our own folder only.
        """
        pairs = [(found, self.entry(found)) for found in self.found()]
        inside = [entry for found, entry in pairs if not found.linked and entry.verdict is None]
        taken = {(entry.id.lower(), own) for entry in inside for own in {False, entry.writable}}
        return [
            (found, entry)
            for found, entry in pairs
            if not (found.linked and (entry.id.lower(), entry.writable) in taken)
        ]

    def found(self) -> Iterable[ModelCandidate]:
        """Yield every candidate once: a hub cache has the same file under each revision."""
        seen: set[str] = set()
        for folder in (self.models_dir, *self.extra_dirs):
            for found in ollama.models(folder) if ollama.is_store(folder) else scan(folder):
                # The hub's cache links one blob from every revision that has the file.
                real = os.path.realpath(found.path)
                if real not in seen:
                    seen.add(real)
                    yield found

    def entry(self, found: ModelCandidate) -> StoreEntry:
        verdict = found.wrong or (missing_shards(found.missing) if found.missing else None)
        if verdict is None and any(word in found.path.name.lower() for word in _BESIDE_MODELS):
            kind = peek_kind(found.path)
            verdict = of_kind(kind) if kind in ("mmproj", "drafter") else None
        path = str(found.path)
        note = receipt.read_of(found.path)
        origin = (note.source, note.revision) if note else hub_origin(found.path) or (None, None)
        return StoreEntry(
            found.name or receipt.name_of(found.path, note),
            label_from_name(path if len(found.shards) > 1 else found.path.name),
            found.path,
            found.shards,
            found.bytes,
            verdict,
            origin[0],
            origin[1],
            self.models_dir in found.path.parents,
        )

    def resolve(self, ref: str, *, drafter: bool = False) -> ModelFile:
        """Resolve `NAME[:QUANT]`, a path, or the source of an installed model. `drafter` as in open_model.

        Raises ModelMissingError, or BadModelError with the verdict.
        """
        if source.is_source(ref):
            return self._resolve_source(ref, drafter)
        if "/" in ref or ref.lower().endswith(".gguf"):
            path = Path(ref).expanduser()
            with reading(path):
                there = os.path.lexists(path)
            if not there:
                hint = "give the path of a .gguf file, or see: edgellm model list"
                raise ModelMissingError(f"no such file: {ref}", hint)
            return open_model(path.absolute(), drafter=drafter, headers=self.headers)
        return self._best(self.named(ref), ref, drafter)

    def named(self, ref: str) -> Sequence[StoreEntry]:
        """Return the entries that `NAME[:QUANT]` matches, in any case. Raises ModelMissingError."""
        name, _, quant = ref.partition(":")
        entries = self.list()
        same = [entry for entry in entries if entry.name.lower() == name.lower()]
        wanted = canonical(quant)
        found = matching(same, quant) if quant else same
        # Late: reading the header of every file of that name is only worth it where names decide nothing.
        found = found or [entry for entry in same if _quant_by_header(entry) == wanted]
        # Ollama's own spelling: qwen3:8b is listed as qwen3-8b, phi:latest as phi.
        spelled = ref.lower().removesuffix(":latest").replace(":", "-")
        found = found or [entry for entry in entries if entry.name.lower() == spelled]
        if not found:
            raise missing(ref, same or entries)
        return found

    def _resolve_source(self, ref: str, drafter: bool) -> ModelFile:
        wanted = source.parse(ref)
        if isinstance(wanted, source.FileSource):
            return self.resolve(wanted.path, drafter=drafter)
        found = [entry for entry in self.list() if entry.source and _comes_from(entry, wanted)]
        if not found:
            raise ModelMissingError(f"{wanted} is not here yet", f"fetch it: edgellm model pull {wanted}")
        return self._best(found, str(wanted), drafter)

    def _best(self, entries: Iterable[StoreEntry], ref: str, drafter: bool) -> ModelFile:
        """Return the preferred usable quantization. Raises BadModelError with the first verdict if none is usable."""
        # sorted() is stable: of equal quantizations our own copy comes first, which no other program deletes.
        best = order(sorted(entries, key=lambda entry: not entry.writable))
        ranked = sorted(best, key=lambda entry: entry.verdict is not None)
        error: VerdictError | None = None
        for entry in ranked:
            try:
                return open_model(entry.path, drafter=drafter, headers=self.headers)
            except VerdictError as bad:
                error = error or bad
        raise error or ModelMissingError(f"no model {ref}", "edgellm model list")


def standard(folders: Folders, dirs: Iterable[str], env: Mapping[str, str]) -> Store:
    """Return the store that `model`, `plan`, `up` and `doctor` read.

    `dirs` is store.dirs of the configuration. The system service's models count where `folders` shares stores, and so
    do the Hugging Face cache and the folders of Ollama and LM Studio, in place; an instance in a folder of its own sees
    such a store only where the environment names one.
    """
    extra = [Path(text).expanduser() for text in dirs]
    system = system_folders()
    if folders.shared_stores and folders.models != system.models:
        extra.append(system.models)
    cache = hub_cache(env) if folders.shared_stores else named_hub_cache(env)
    extra += [cache] if cache else []
    extra += ollama.stores(env, named_only=not folders.shared_stores)
    if folders.shared_stores and env.get("HOME", "").startswith("/"):
        extra += [Path(env["HOME"]) / below for below in _LM_STUDIO]
    return Store(folders.models, extra, folders.kept_headers)


def missing(ref: str, entries: Sequence[StoreEntry]) -> ModelMissingError:
    """Return the error for a missing model, with what exists, nearest name first, and the next step."""
    import difflib
    import shlex

    ids = list(dict.fromkeys(entry.id for entry in entries if entry.verdict is None))
    pull = shlex.join(["edgellm", "model", "pull", ref])
    if not ids:
        return ModelMissingError(f"no model {ref!r}: there is none here yet", pull)
    # 0.5 instead of 0.6: ids are long, and a wrong size or quant changes a third of one.
    near = difflib.get_close_matches(ref, ids, 3, 0.5)
    guess = f"did you mean {near[0]}? There is" if near else "there is"
    table = "\n".join(f"  {name}" for name in list(dict.fromkeys([*near, *ids]))[:12])
    return ModelMissingError(f"no model {ref!r} here; {guess}", f"name one of these, or: {pull}", table=table)


def _quant_by_header(entry: StoreEntry) -> str | None:
    """Return the header's quantization if the file's name has none or a wrong one."""
    try:
        return open_model(entry.path).quant
    except VerdictError:
        return None


def _comes_from(entry: StoreEntry, wanted: source.Source) -> bool:
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
