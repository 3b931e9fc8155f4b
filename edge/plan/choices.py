"""The winners that `edgellm bench` measured for one board and engine: load modes, ways of drafting, and of sleeping.

Each kind has a JSON file in the data folder; a plan reads the rows of its board and engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, TypeVar

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from edge.config.values import ModelConfig, Preset
from edge.engine.engine import Engine
from edge.linux.files import read_json, write_json
from edge.models.open import ModelFile
from edge.paths import Folders
from edge.plan.plan import Reason, Settings
from edge.units import GIB

SCHEMA = 1


class MeasuredChoice(Struct, frozen=True):
    """The winner of one measurement. A later one with the same values of `KEY` replaces it in `FILE`."""

    FILE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]

    board: str
    engine: str

    @property
    def key(self) -> tuple[Any, ...]:
        return self.board, self.engine, *(getattr(self, name) for name in self.KEY)


C = TypeVar("C", bound=MeasuredChoice)


def choices_path(folders: Folders, kind: type[MeasuredChoice]) -> Path:
    return folders.data / kind.FILE


def read_choices(path: Path, kind: type[C], board: str, engine: str) -> tuple[C, ...]:
    """Return the choices for this board and engine; none from a missing, damaged or newer file."""
    return tuple(row for row in _read_all(path, kind) if (row.board, row.engine) == (board, engine))


def _read_all(path: Path, kind: type[C]) -> list[C]:
    try:
        document = read_json(path)
        return convert(document["choices"], list[kind]) if document["schema"] == SCHEMA else []  # type: ignore[valid-type]
    except (OSError, ValueError, KeyError, TypeError):  # msgspec's ValidationError is a ValueError
        return []


def write_choice(path: Path, choice: MeasuredChoice) -> None:
    """Add or replace one choice. Raises OSError."""
    rows = [*(row for row in _read_all(path, type(choice)) if row.key != choice.key), choice]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"schema": SCHEMA, "choices": to_builtins(rows)})


# Load modes: which was soonest ready for an engine, a disk and a size class.

# Upper ends of the size classes: a winner for 1 GB says little about 30 GB, where memory is short.
_CLASSES_GIB = (1, 4, 16, 64)


class LoadChoice(MeasuredChoice, frozen=True):
    """The load mode that was soonest ready. `mount`: mount point of the disk; `offload`: full | partial | none.

    `prefetch`: it was sooner ready with the file read ahead of the engine. `cold_mode`: sooner than `mode` while less
    than `cold_below` (0…1) of the file is in the page cache; None: `mode` is the soonest then, too.
    """

    FILE = "load_modes.json"
    KEY = ("mount", "size_class", "offload")

    mount: str
    size_class: int
    offload: str
    mode: str
    seconds: float
    prefetch: bool = False
    cold_mode: str | None = None
    cold_below: float = 0.0


def size_class(file_bytes: int) -> int:
    return sum(file_bytes > limit * GIB for limit in _CLASSES_GIB)


def offload_of(n_gpu_layers: int, n_layer: int) -> str:
    """Return full | partial | none. Full includes the output layer, llama.cpp's layer n_layer + 1."""
    return "full" if n_gpu_layers > n_layer else "partial" if n_gpu_layers else "none"


def prefetch_helps(*paths: Path) -> bool:
    """Return whether a measurement in one of these files found that reading ahead of an engine helps."""
    return any(row.prefetch for path in paths for row in _read_all(path, LoadChoice))


def choice_for(choices: Iterable[LoadChoice], file: str, file_bytes: int, offload: str) -> LoadChoice | None:
    """Return the choice for a model file on the innermost mount, or None. Never dio for a partial offload."""
    wanted = (size_class(file_bytes), offload)
    path = PurePosixPath(file)
    found = [
        choice
        for choice in choices
        if (choice.size_class, choice.offload) == wanted and PurePosixPath(choice.mount) in path.parents
    ]
    # The longest mount point is the innermost.
    best = max(found, key=lambda choice: len(choice.mount), default=None)
    return None if best is not None and best.mode == "dio" and offload != "full" else best


def chosen_mode(choices: Iterable[LoadChoice], file: str, file_bytes: int, offload: str) -> str | None:
    choice = choice_for(choices, file, file_bytes, offload)
    return choice.mode if choice else None


# Drafting: the fastest way for an engine and a model, which `speculation = "auto"` uses.

NOT_MEASURED = "speculation = auto drafts nothing: this model is not measured yet (edgellm bench draft --apply)"


class DraftChoice(MeasuredChoice, frozen=True):
    """The fastest way of drafting. `model`: as of `model_key`; `without_tokens_s`: the speed with no drafts."""

    FILE = "drafting.json"
    KEY = ("model",)

    model: str
    speculation: str  # off | ngram | mtp
    tokens_s: float
    without_tokens_s: float


def model_key(file: ModelFile) -> str:
    """Return the key of a model on this machine, without its path: a file may be moved, or linked from elsewhere."""
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


# Sleep: an idle model's engine ends, or sleeps by itself. One that ends leaves nothing, and keeps prompts where they
# are saved. llama-server's own sleep frees model and cache but keeps the process, which on a GPU saves the seconds in
# which CUDA makes a context.

GAIN = 1.1  # the engine's own sleep has to be sooner by a tenth: it keeps memory, and prompts are lost in it
MOST_LEFT = 0.1  # of the file's size may stay in memory: 62 MB of a 1 GB model were measured, a CUDA context beside it
SLEEP_OPTION = "--sleep-idle-seconds"


class SleepChoice(MeasuredChoice, frozen=True):
    """The way to sleep that was sooner awake. Medians, to the first token: `stop_s` from the spawn of a new engine with
    the file in the page cache, `engine_s` from a request to a sleeping engine, which kept `left_bytes` in memory."""

    FILE = "sleep_modes.json"
    KEY = ("size_class",)

    size_class: int
    mode: Literal["stop", "engine"]
    stop_s: float
    engine_s: float
    left_bytes: int


def winner(stop_s: float, engine_s: float, left_bytes: int, file_bytes: int) -> Literal["stop", "engine"]:
    return "engine" if engine_s * GAIN <= stop_s and left_bytes <= MOST_LEFT * file_bytes else "stop"


def can_sleep(engine: Engine) -> bool:
    """Return whether an engine sleeps by itself and reports it, on its progress protocol."""
    return engine.kind == "embedded" or (engine.has(SLEEP_OPTION) and engine.progress_protocol)


def own_sleep_s(
    choices: Iterable[SleepChoice], engine: Engine, config: ModelConfig, file_bytes: int, settings: Settings
) -> int:
    """Return after how many idle seconds the engine is to sleep by itself; 0: it is ended, or never sleeps.

    An engine whose layers are on other boards ends: their rpc-servers then serve others. So does that of a model with
    `return_to`, since its end brings the other one back.
    """
    found = next((choice for choice in choices if choice.size_class == size_class(file_bytes)), None)
    if found is None or found.mode != "engine" or settings.rpc or config.return_to or not can_sleep(engine):
        return 0
    return ceil(max(0.0, config.ttl_s))


def sleep_reasons(sleep_s: int) -> tuple[Reason, ...]:
    """Explain an engine that sleeps by itself; empty for 0."""
    because = "the engine sleeps by itself: it wakes sooner than a new one starts, as `edgellm bench sleep` measured"
    return (Reason("ttl_s", f"{sleep_s} s", because),) if sleep_s else ()
