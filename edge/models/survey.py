"""List every entry of the store with its header's facts; headers are cached by file."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from edge.linux.files import read_json, write_json
from edge.models.meta import ModelMeta
from edge.models.open import ProjectorPairing, fingerprint, label, pair, read_found
from edge.models.quant import arch_note, types_note
from edge.models.scan import ModelCandidate
from edge.models.store import Store, StoreEntry
from edge.models.verdict import HeaderVerdict, VerdictError, not_a_model

# Increase it when a summary or a verdict changes its meaning: old entries are then read anew.
_SCHEMA = 3
_CACHE_NAME = "headers.json"
# 700 bytes a model: a store of a thousand files has under 1 MB.
_CACHE_MAX_BYTES = 32 << 20
_NO_PROJECTOR = ProjectorPairing()


class HeaderSummary(Struct, frozen=True):
    """Facts of one header. `quant` is confirmed by the tensors; `verdict` is None for a model that can be served."""

    arch: str
    kind: str
    quant: str
    n_layer: int
    n_ctx_train: int
    n_expert: int
    parameters: int
    tensor_bytes: int
    chat_template: bool
    notes: tuple[str, ...] = ()


class SurveyLine(Struct, frozen=True):
    """One judged entry. `summary` is None when the header cannot be read: then there is a verdict."""

    entry: StoreEntry
    summary: HeaderSummary | None
    verdict: HeaderVerdict | None
    mmproj: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.entry.name}:{self.summary.quant}" if self.summary else self.entry.id

    @property
    def usable(self) -> bool:
        return self.verdict is None


def survey(store: Store, cache_dir: Path | None = None) -> list[SurveyLine]:
    """Judge every entry, in the order of `Store.list`. Without a cache all headers are read."""
    cache = _Cache(cache_dir / _CACHE_NAME if cache_dir else None)
    lines = [SurveyLine(entry, *cache.judge(found)) for found, entry in store.entries()]
    cache.save()
    return sorted(_paired(lines), key=lambda line: line.entry.order)


def summarize(found: ModelCandidate, meta: ModelMeta) -> HeaderSummary:
    quant, doubt = label(found, meta)
    newer = types_note(tensor.type for tensor in meta.tensors)
    notes = (arch_note(meta.arch) if meta.kind == "model" else None, newer, doubt)
    return HeaderSummary(
        arch=meta.arch,
        kind=meta.kind,
        quant=quant,
        n_layer=meta.n_layer,
        n_ctx_train=meta.n_ctx_train,
        n_expert=meta.n_expert,
        parameters=sum(math.prod(tensor.shape) for tensor in meta.tensors),
        tensor_bytes=meta.tensor_bytes,
        chat_template=meta.chat_template,
        notes=tuple(note for note in notes if note),
    )


def _judge(found: ModelCandidate) -> tuple[HeaderSummary | None, HeaderVerdict | None]:
    try:
        meta = read_found(found)
    except VerdictError as error:
        return None, error.verdict
    return summarize(found, meta), not_a_model(meta)


class _Judged(Struct, frozen=True):
    summary: HeaderSummary | None
    verdict: HeaderVerdict | None


class _Cache:
    """Summaries by the fingerprint of a candidate's files. A cache that cannot be read or written is skipped."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._old: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
                data = read_json(path, _CACHE_MAX_BYTES)
                self._old = dict(data["files"]) if data["schema"] == _SCHEMA else {}

    def judge(self, found: ModelCandidate) -> tuple[HeaderSummary | None, HeaderVerdict | None]:
        if found.wrong:
            return None, found.wrong
        try:
            key = fingerprint(found.shards)
        except OSError:
            return _judge(found)
        # A set that lacks shards has the fingerprint of the present ones: its verdict changes when one arrives.
        if found.missing:
            key += "-" + str(len(found.missing))
        if key in self._old:
            with contextlib.suppress(ValueError):
                kept = convert(self._old[key], _Judged)
                self._new[key] = self._old[key]
                return kept.summary, kept.verdict
        summary, verdict = _judge(found)
        if verdict is None or verdict.kind != "unreadable":
            self._new[key] = to_builtins(_Judged(summary, verdict))
        return summary, verdict

    def save(self) -> None:
        # Written only when the store changed: a list must not wear out an SD card.
        if self._path is None or self._new.keys() == self._old.keys():
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {"schema": _SCHEMA, "files": self._new})


def _paired(lines: Sequence[SurveyLine]) -> Iterator[SurveyLine]:
    """Yield the lines with the projector of each model, by folder, and a note on an id that means another file."""
    projectors: dict[Path, list[Path]] = defaultdict(list)
    models: dict[Path, set[str]] = defaultdict(set)
    for line in lines:
        folder = line.entry.path.parent
        if line.verdict and line.verdict.kind == "mmproj":
            projectors[folder].append(line.entry.path)
        else:
            models[folder].add(line.entry.name)
    winners = _winners(lines)
    for line in lines:
        path, notes = line.entry.path, line.summary.notes if line.summary else ()
        pairing = pair(path, projectors[path.parent], models[path.parent]) if line.usable else _NO_PROJECTOR
        notes += (pairing.note,) if pairing.note else ()
        first = winners.get(line.id.lower()) if line.usable else None
        if first not in (None, path):
            notes += (f"its id means {first}; name this one by its path: {path}",)
        yield replace(line, mmproj=pairing.path, notes=notes)


def _winners(lines: Iterable[SurveyLine]) -> dict[str, Path]:
    """Return the file that each id means: on equal ids the one whose name contains the id, then the first."""
    found: dict[str, tuple[bool, Path]] = {}
    for line in lines:
        if line.usable and line.summary is not None:
            by_header_only = line.entry.quant != line.summary.quant
            name = line.id.lower()
            if name not in found or by_header_only < found[name][0]:
                found[name] = (by_header_only, line.entry.path)
    return {name: path for name, (_, path) in found.items()}
