"""How an idle model gives its memory back, as `edgellm bench sleep` found: its engine ends, or sleeps by itself.

An engine that ends leaves nothing, and keeps prompts where they are saved. llama-server's own sleep frees model and
cache but keeps the process, which on a GPU saves the seconds in which CUDA makes a context.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from pathlib import Path
from typing import Literal

from msgspec import Struct

from edge.config.values import ModelConfig
from edge.engine.engine import Engine
from edge.paths import Folders
from edge.plan.load_choice import size_class
from edge.plan.plan import Reason, Settings

GAIN = 1.1  # the engine's own sleep has to be sooner by a tenth: it keeps memory, and prompts are lost in it
MOST_LEFT = 0.1  # of the file's size may stay in memory: 62 MB of a 1 GB model were measured, a CUDA context beside it
OPTION = "--sleep-idle-seconds"


class SleepChoice(Struct, frozen=True):
    """One measurement and its winner. Medians, to the first token: `stop_s` from the spawn of a new engine with the
    file in the page cache, `engine_s` from a request to a sleeping engine, which kept `left_bytes` in memory."""

    board: str
    engine: str
    size_class: int
    mode: Literal["stop", "engine"]
    stop_s: float
    engine_s: float
    left_bytes: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.board, self.engine, self.size_class


def sleeps_path(folders: Folders) -> Path:
    return folders.data / "sleep_modes.json"


def winner(stop_s: float, engine_s: float, left_bytes: int, file_bytes: int) -> Literal["stop", "engine"]:
    return "engine" if engine_s * GAIN <= stop_s and left_bytes <= MOST_LEFT * file_bytes else "stop"


def can_sleep(engine: Engine) -> bool:
    """Return whether an engine sleeps by itself and reports it, on its progress protocol."""
    return engine.kind == "embedded" or (engine.has(OPTION) and engine.progress_protocol)


def own_sleep_s(
    choices: Iterable[SleepChoice], engine: Engine, config: ModelConfig, file_bytes: int, settings: Settings
) -> int:
    """Return after how many idle seconds the engine is to sleep by itself; 0: it is ended, or never sleeps.

    An engine whose layers are on other boards ends: their rpc-servers then serve others. So does that of a model with
    `return_to`, since its end brings the other one back.
    """
    found = next((choice for choice in choices if choice.size_class == size_class(file_bytes)), None)
    if found is None or found.mode != "engine" or config.ttl_s <= 0 or settings.rpc or not can_sleep(engine):
        return 0
    if config.return_to:
        return 0
    return ceil(config.ttl_s)


def sleep_reasons(sleep_s: int) -> tuple[Reason, ...]:
    """Explain an engine that sleeps by itself; empty for 0."""
    because = "the engine sleeps by itself: it wakes sooner than a new one starts, as `edgellm bench sleep` measured"
    return (Reason("ttl_s", f"{sleep_s} s", because, "planner"),) if sleep_s else ()
