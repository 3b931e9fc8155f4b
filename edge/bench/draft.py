"""Measure tokens per second without drafts and with each drafting that an engine and a model offer."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from edge.bench.load import EngineBench, running, wait_ready
from edge.builder.smoke import request
from edge.errors import EdgeError, UnavailableError
from edge.plan.choices import DraftChoice, model_key
from edge.plan.plan import LaunchPlan, ModelPlan, Plan
from edge.supervisor.process import Child

WAYS = ("off", "ngram", "mtp")
# Less is within the noise between two starts of one engine, and drafts cost memory and watts.
GAIN = 1.05
_ANSWER_LIMIT_S = 600.0  # a CPU that makes one token in four seconds still ends the default answer of 128
_TEXT = (
    "The controller reads the wheel encoders fifty times a second. It compares them with the map, corrects the drift, "
    "and sends the motors a new speed. When the battery is low it drives to the dock. Near an obstacle it stops."
)
# One text to edit, where drafts from the prompt are often right, and one to write, where they rarely are.
PROMPTS = (
    f"Copy this text, with `robot` in place of `controller`:\n\n{_TEXT}\n\nThe copy:",
    "Write a story about a lighthouse keeper who finds a message in a bottle.",
)


class DraftRow(Struct):
    """The answers of one way of drafting. `accepted` of `drafted` tokens; `note`: why it was not measured.

    `rounds`: tokens/s of each start.
    """

    way: str
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    by_prompt: dict[str, list[float]] = field(default_factory=dict)  # tokens/s: "edit", "write"
    rounds: list[float] = field(default_factory=list)
    note: str | None = None

    @property
    def tokens_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


class DraftBench(EngineBench):
    """Answers prompts with one model under several ways of drafting."""

    def measure(self, ways: Sequence[str], *, repeat: int, tokens: int) -> list[DraftRow]:
        """Measure the ways in turns, so that other load falls on all of them.

        A way that cannot be planned, started or drafted with has the reason as its note.
        """
        rows = [DraftRow(way) for way in ways]
        for row in rows:
            try:
                warnings = self._plan(row.way, row.way).warnings
            except EdgeError as error:
                row.note = str(error)
            else:
                row.note = next((note for note in warnings if note.startswith("speculation has no effect")), None)
        for number in range(repeat):
            for row in [each for each in rows if each.note is None]:
                try:
                    self._start(row, tokens)
                except EdgeError as error:
                    row.note = str(error)
                self._on_step(f"{row.way}: {number + 1} of {repeat}")
        return rows

    def _start(self, row: DraftRow, tokens: int) -> None:
        launch = self.plans[row.way][2]
        before = row.tokens, row.seconds
        with running(launch, self._socket_path) as child:
            wait_ready(child)
            with _drained(child):
                _answer(self._socket_path, PROMPTS[1], 4)  # buffers are allocated, pages of a mapping read
                for name, prompt in zip(("edit", "write"), PROMPTS, strict=True):
                    timings = _answer(self._socket_path, prompt, tokens)
                    count, seconds = int(timings["predicted_n"]), float(timings["predicted_ms"]) / 1000
                    row.tokens, row.seconds = row.tokens + count, row.seconds + seconds
                    row.drafted += int(timings.get("draft_n") or 0)
                    row.accepted += int(timings.get("draft_n_accepted") or 0)
                    row.by_prompt.setdefault(name, []).append(count / seconds)
        row.rounds.append((row.tokens - before[0]) / (row.seconds - before[1]))


@contextmanager
def _drained(child: Child) -> Iterator[None]:
    """Read the engine's log while the context lasts: a full pipe would stop it."""
    ended = threading.Event()
    pipes = [child.stdout.fileno(), child.stderr.fileno()]

    def read() -> None:
        while not ended.is_set():
            for descriptor in select.select(pipes, [], [], 0.05)[0]:
                if not os.read(descriptor, 1 << 16):
                    pipes.remove(descriptor)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _answer(path: Path, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the timings of one chat completion of that many tokens. Raises UnavailableError."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    text = json.dumps(body | {"ignore_eos": True, "cache_prompt": False})
    try:
        status, answer = request(path, "POST", "/v1/chat/completions", text, timeout_s=_ANSWER_LIMIT_S)
        document = json.loads(answer)
    except (OSError, ValueError, RecursionError, HTTPException) as error:
        raise UnavailableError(f"the engine ended the connection ({type(error).__name__})") from error
    if status != 200 or not isinstance(document, dict) or not isinstance(document.get("timings"), dict):
        raise UnavailableError(f"the engine answered {status} to a chat completion")
    timings: dict[str, Any] = document["timings"]
    return timings


def winner(rows: Sequence[DraftRow]) -> DraftRow | None:
    """Return the fastest way; `off` unless another is 5 % ahead of it, and in no round behind.

    A way without accepted tokens can only be ahead by chance. None where `off` was not measured.
    """
    measured = {row.way: row for row in rows if row.tokens_s is not None and row.note is None}
    without = measured.get("off")
    if without is None:
        return None
    ahead = [row for row in measured.values() if row.accepted and _ahead(row, without)]
    return max(ahead, key=lambda row: row.tokens_s or 0.0, default=without)


def _ahead(row: DraftRow, without: DraftRow) -> bool:
    pairs = zip(row.rounds, without.rounds, strict=True)
    return (row.tokens_s or 0.0) >= GAIN * (without.tokens_s or 0.0) and all(ours >= theirs for ours, theirs in pairs)


def choice_of(best: DraftRow, without: DraftRow, plan: Plan, model: ModelPlan, launch: LaunchPlan) -> DraftChoice:
    """Return the choice that `--apply` keeps for this board, engine and model."""
    speeds = round(best.tokens_s or 0.0, 2), round(without.tokens_s or 0.0, 2)
    return DraftChoice(plan.board.id, plan.engine.id, model_key(launch.model or model.model), best.way, *speeds)
