"""Open one model, a file or all shards of a set, and judge it by name and header before an engine loads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from edge.errors import UsageError
from edge.model import arch, projector, receipt, splitset
from edge.model.file import ModelFile
from edge.model.header import quant_of, read_header
from edge.model.meta import ModelMeta
from edge.model.quant import FILE_TYPES, UNKNOWN, base_types, label_from_name, plain
from edge.model.scan import Found, scan, size_of, unfinished
from edge.model.verdict import Verdict, VerdictError, not_a_model


def open_model(path: Path) -> ModelFile:
    """Open the model at `path`: its file, any of its shards, or a folder that holds exactly one model.

    Raises BadModelError with the verdict, UsageError for a folder that holds more or none.
    """
    found = _found(path)
    whole = read_found(found)
    wrong = not_a_model(whole)
    if wrong:
        raise VerdictError(wrong, found.path.name)
    paired, mmproj_bytes = projector.usable(projector.beside(found.path))
    quant, doubt = label(found, whole)
    notes = (arch.note(whole.arch), doubt, paired.note)
    return ModelFile(
        name=receipt.name_of(found.path, receipt.read(found.path.parent)),
        quant=quant,
        path=str(found.path),
        shards=tuple(str(shard) for shard in found.shards),
        bytes=found.bytes,
        fingerprint=fingerprint(found.shards),
        meta=whole,
        mmproj=str(paired.path) if paired.path else None,
        mmproj_bytes=mmproj_bytes,
        notes=tuple(note for note in notes if note),
    )


def read_found(found: Found) -> ModelMeta:
    """Read the headers of all shards of a candidate as one. Raises VerdictError."""
    if found.wrong:
        raise VerdictError(found.wrong, found.path.name)
    metas = [_header(shard) for shard in found.shards]
    # A lone file whose name merely looks like a shard's: the header knows.
    if found.missing and not (metas[0].split is None and len(metas) == 1):
        raise VerdictError(splitset.missing_shards(found.missing), found.path.name)
    for shard, meta in zip(found.shards, metas, strict=True):
        wrong = splitset.judge_shard(shard.stem, meta)
        if wrong:
            raise VerdictError(wrong, shard.name)
    whole = splitset.merge(metas)
    return replace(whole, quant=quant_of(whole.file_type, whole.tensors))


def label(found: Found, meta: ModelMeta) -> tuple[str, str | None]:
    """Return the quantization to show, and a note where name and tensors disagree."""
    named = label_from_name(str(found.path) if len(found.shards) > 1 else found.path.name)
    if named == UNKNOWN or plain(named) == meta.quant:
        return (meta.quant if named == UNKNOWN else named), None
    types = {tensor.type for tensor in meta.tensors}
    if plain(named) not in FILE_TYPES.values() and base_types(named) & types:
        return named, None  # a tag of a publisher's own (Q4_K_XL, Q6_K_L) over the same types
    return meta.quant, f"its name has {named}, its tensors are {meta.quant}; memory is counted from the tensors"


def fingerprint(paths: Iterable[Path]) -> str:
    """Return a key that changes with a file's path, size or mtime; no content is read."""
    digest = sha256()
    for path in paths:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _found(path: Path) -> Found:
    if path.is_dir():
        inside = scan(path)
        if len(inside) != 1:
            raise UsageError(f"{path} holds {len(inside)} models", "give the path of one .gguf file")
        return inside[0]
    beside = [found for found in scan(path.parent, depth=0) if path in found.shards]
    return beside[0] if beside else Found(path, (path,), size_of(path) or 0, wrong=unfinished(path.name))


def _header(path: Path) -> ModelMeta:
    try:
        return read_header(path)
    except OSError as error:
        hint = "look at its permissions and those of its folders"
        raise VerdictError(Verdict("unreadable", f"cannot be read: {error.strerror}", hint), path.name) from error
