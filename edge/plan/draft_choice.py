"""The drafting that `edgellm bench draft` found fastest for an engine and a model: what `speculation = "auto"` uses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge.config.values import Preset
from edge.models.open import ModelFile
from edge.paths import Folders

NOT_MEASURED = "speculation = auto drafts nothing: this model is not measured yet (edgellm bench draft --apply)"


class DraftChoice(Struct, frozen=True):
    """The winner of one measurement. `model`: as of `model_key`; `without_tokens_s`: the speed with no drafts."""

    board: str
    engine: str
    model: str
    speculation: str  # off | ngram | mtp
    tokens_s: float
    without_tokens_s: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.board, self.engine, self.model


def drafts_path(folders: Folders) -> Path:
    return folders.data / "drafting.json"


def model_key(file: ModelFile) -> str:
    """Return what tells one model from another on this machine: a file may be moved, or linked from another store."""
    return f"{file.name} {file.quant} {file.bytes}"


def measured_drafts(preset: Preset, file: ModelFile, choices: Iterable[DraftChoice]) -> tuple[Preset, tuple[str, ...]]:
    """Return the preset with `auto` replaced by what was measured for this model, and a note where nothing was."""
    if preset.speculation != "auto":
        return preset, ()
    found = next((choice for choice in choices if choice.model == model_key(file)), None)
    # A kept value of a later version may be unknown here.
    if found is not None and found.speculation in ("ngram", "mtp"):
        return replace(preset, speculation=found.speculation), ()
    return replace(preset, speculation="off"), () if found else (NOT_MEASURED,)
