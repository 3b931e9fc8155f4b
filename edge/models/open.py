"""Open one model, a file or all shards of a set, and judge it by name and header before an engine loads it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge.errors import BadModelError, UsageError
from edge.models import ollama, receipt
from edge.models.header import Opening, open_by_name, peek_kind, quant_of, read_header, read_kept, weight_bytes
from edge.models.meta import ModelMeta
from edge.models.projector import Projector, read_projector
from edge.models.quant import (
    FILE_TYPES,
    UNKNOWN,
    arch_note,
    confirms,
    label_from_name,
    plain,
    public_name,
    shard_of,
    types_note,
)
from edge.models.scan import ModelCandidate, scan, size_of, unfinished
from edge.models.verdict import PULL_AGAIN, HeaderVerdict, VerdictError, bad_name, not_a_model
from edge.units import counted

# A model in the store. Values only.


class ModelFile(Struct, frozen=True):
    """One usable model: a file or a complete split set (`path` is the first shard)."""

    name: str  # the stable public id, without quant: "SmolLM2-135M-Instruct"
    quant: str
    path: str
    shards: tuple[str, ...]
    bytes: int  # of all shards
    fingerprint: str  # changes when a file changes: path, size, mtime
    meta: ModelMeta  # of the whole set: tensors of all shards
    mmproj: str | None = None
    projector: Projector | None = None  # read from the header of `mmproj`
    adapter_bytes: int = 0  # of the LoRA adapters' files
    drafter: str | None = None  # path of the model that drafts
    draft_type: str = "draft-simple"  # how it drafts: a value of --spec-type
    drafter_bytes: int = 0  # of the drafter or of MTP layers that draft, at the requested context: weights and KV cache
    notes: tuple[str, ...] = ()  # for the user: unknown architecture, a name with another quantization

    @property
    def mmproj_bytes(self) -> int:
        """Return the bytes of the projector's tensors."""
        return self.projector.tensor_bytes if self.projector else 0

    @property
    def beside_bytes(self) -> int:
        """Return the bytes of projector and adapters: they lie in the first GPU, or in the host."""
        return self.mmproj_bytes + self.adapter_bytes


# Check split sets: names and headers of the shards must agree before an engine opens them. Pure.


def missing_shards(missing: Sequence[str]) -> HeaderVerdict:
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return HeaderVerdict("missing_shards", f"lacks {counted(len(missing), 'shard')} of its set: {shown}", PULL_AGAIN)


def judge_shard(stem: str, meta: ModelMeta) -> HeaderVerdict | None:
    """Compare a shard's name with its header: the engine derives the other shards' names from the first."""
    named = shard_of(stem)
    if meta.split is None:
        return None
    number, count = meta.split.no + 1, meta.split.count
    proper = f"-{number:05d}-of-{count:05d}.gguf"
    if named is None:
        sentence = f"is shard {number} of {count} of a set, under a name without shard number"
        return HeaderVerdict("renamed_shard", sentence, f"name it so that it ends in {proper}, beside the other shards")
    if named != (number, count):
        sentence = f"is named shard {named[0]} of {named[1]}, but its header has {number} of {count}"
        return HeaderVerdict("wrong_shard", sentence, f"rename it so that it ends in {proper}")
    return None


def merge(metas: Sequence[ModelMeta]) -> ModelMeta:
    """Merge the headers of a set: keys of the first shard, tensors and sizes of all, offsets within each shard."""
    first = metas[0]
    if len(metas) == 1:
        return first
    return replace(
        first,
        tensors=tuple(tensor for meta in metas for tensor in meta.tensors),
        tensor_bytes=sum(meta.tensor_bytes for meta in metas),
        file_bytes=sum(meta.file_bytes for meta in metas),
    )


# Find the vision or audio projector (`mmproj`) of a model by header, if the choice is unambiguous.

# mmproj, mm-proj, mmprojector: the spellings on the hub.
_WORD = re.compile(r"(?:^|[-_. ])mm-?proj(?:ector)?(?=$|[-_. ])", re.IGNORECASE)


class ProjectorPairing(Struct, frozen=True):
    """`path` is the projector to use, None without one; `note` is the reason if the folder holds some."""

    path: Path | None = None
    note: str | None = None


def beside(model: Path) -> ProjectorPairing:
    """Pair a model with a projector of its folder, by the headers of the files there."""
    projectors, models = [], {public_name(str(model))}
    try:
        siblings = sorted(model.parent.iterdir())
    except OSError:  # a folder that may be entered but not listed
        return ProjectorPairing()
    for path in siblings:
        if path.name.lower().endswith(".gguf") and path != model:
            if peek_kind(path) == "mmproj":
                projectors.append(path)
            else:
                models.add(public_name(str(path)))
    return pair(model, projectors, models)


def pair(model: Path, projectors: Sequence[Path], models: Collection[str]) -> ProjectorPairing:
    """Choose the projector of `model` in a folder that holds models of the names `models`.

    One that carries the model's name wins over one that carries none; a lone projector beside a lone model needs no
    name. Anything else is a choice, and choices are the user's.
    """
    if not projectors:
        return ProjectorPairing()
    wanted = _plain(public_name(str(model)))
    named = [path for path in projectors if _plain(stem(path)) == wanted]
    nameless = [path for path in projectors if not stem(path)]
    for group in (named, nameless if len(models) == 1 else [], projectors if len(models) == 1 else []):
        if len(group) == 1:
            return ProjectorPairing(group[0])
        if group:
            break
    names = ", ".join(sorted(path.name for path in (named or projectors)))
    return ProjectorPairing(
        None, f"no projector is used, because several may belong to this model: {names}; set mmproj=PATH"
    )


def stem(path: Path) -> str:
    """Strip `mmproj`, quantization and extension from a projector's name: the model's name, or an empty string."""
    rest = _WORD.sub("-", path.name[: -len(".gguf")] if path.name.lower().endswith(".gguf") else path.name)
    rest = rest.strip("-_. ")
    if not rest:
        return ""
    name = public_name(rest + ".gguf")
    return "" if name == "model" and rest.lower() != "model" else name


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def usable(
    paired: ProjectorPairing, model: ModelMeta, opening: Opening = open_by_name
) -> tuple[ProjectorPairing, Projector | None]:
    """Return the pairing and its header; a broken projector becomes a note, as the model can serve without it."""
    if paired.path is None:
        return paired, None
    try:
        return paired, read_projector(paired.path, model, opening)
    except (BadModelError, OSError) as error:
        return ProjectorPairing(None, f"its projector is not used: {error}"), None


def open_model(
    path: Path, *, drafter: bool = False, headers: Path | None = None, opening: Opening = open_by_name
) -> ModelFile:
    """Open the model at `path`: its file, any of its shards, a blob of Ollama's, or a folder with exactly one model.

    `drafter`: a model that only predicts for another one is meant, or allowed. `headers`: as of `read_kept`.
    `opening`: as of `read_header`, which then reads each file.

    Raises BadModelError with the verdict, UsageError for a folder that holds more or none.
    """
    found = _found(path)
    whole = read_found(found, headers, opening)
    wrong = not_a_model(whole)
    if wrong and not (drafter and wrong.kind == "drafter"):
        raise VerdictError(wrong, found.path.name)
    paired = ProjectorPairing(found.projector) if found.projector else beside(found.path)
    paired, projector = usable(paired, whole, opening)
    quant, doubt = label(found, whole)
    newer = types_note(tensor.type for tensor in whole.tensors)
    notes = (arch_note(whole.arch), newer, doubt, paired.note)
    return ModelFile(
        name=found.name or receipt.name_of(found.path, receipt.read_of(found.path)),
        quant=quant,
        path=str(found.path),
        shards=tuple(str(shard) for shard in found.shards),
        bytes=found.bytes,
        fingerprint=fingerprint(found.shards),
        meta=whole,
        mmproj=str(paired.path) if paired.path else None,
        projector=projector if paired.path else None,
        notes=tuple(note for note in notes if note),
    )


def read_found(found: ModelCandidate, headers: Path | None = None, opening: Opening = open_by_name) -> ModelMeta:
    """Read the headers of all shards of a candidate as one, as `read_kept` does. Raises VerdictError."""
    if found.wrong:
        raise VerdictError(found.wrong, found.path.name)
    metas = [_header(shard, headers, opening) for shard in found.shards]
    # A lone file whose name merely looks like a shard's: the header decides.
    if found.missing and not (metas[0].split is None and len(metas) == 1):
        raise VerdictError(missing_shards(found.missing), found.path.name)
    for shard, meta in zip(found.shards, metas, strict=True):
        wrong = judge_shard(shard.stem, meta)
        if wrong:
            raise VerdictError(wrong, shard.name)
    whole = merge(metas)
    return replace(whole, quant=quant_of(whole.file_type, whole.tensors))


def label(found: ModelCandidate, meta: ModelMeta) -> tuple[str, str | None]:
    """Return the quantization to show, and a note where name and tensors disagree."""
    named = label_from_name(str(found.path) if len(found.shards) > 1 else found.path.name)
    if named == UNKNOWN or plain(named) == meta.quant:
        return (meta.quant if named == UNKNOWN else named), None
    if plain(named) not in FILE_TYPES.values() and confirms(named, weight_bytes(meta.tensors)):
        return named, None  # a tag of a publisher's own (Q4_K_XL, Q6_K_L) over the same types
    return meta.quant, f"its name has {named}, its tensors are {meta.quant}; memory is counted from the tensors"


def fingerprint(paths: Iterable[Path]) -> str:
    """Return a key that changes with a file's path, size or mtime; no content is read."""
    digest = sha256()
    for path in paths:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _found(path: Path) -> ModelCandidate:
    blob = ollama.of_blob(path)
    if blob is not None:
        return blob
    if path.is_dir():
        inside = scan(path)
        if len(inside) != 1:
            raise UsageError(f"{path} holds {len(inside)} models", "give the path of one .gguf file")
        return inside[0]
    beside = [found for found in scan(path.parent, depth=0, every_link=True) if path in found.shards]
    return beside[0] if beside else ModelCandidate(path, (path,), size_of(path) or 0, wrong=_by_name(path))


def _by_name(path: Path) -> HeaderVerdict | None:
    return unfinished(path.name) or bad_name(path.name)


def _header(path: Path, headers: Path | None, opening: Opening) -> ModelMeta:
    try:
        return read_kept(path, headers) if headers else read_header(path, opening=opening)
    except OSError as error:
        hint = "look at its permissions and those of its folders"
        raise VerdictError(HeaderVerdict("unreadable", f"cannot be read: {error.strerror}", hint), path.name) from error
