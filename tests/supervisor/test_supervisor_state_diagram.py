"""ARCHITECTURE.md draws the machine; the drawing and the code show the same transitions."""

from __future__ import annotations

import re
from pathlib import Path

from tests.supervisor.transitions import Transition, explore

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
ARROW = re.compile(r"^\s*([A-Z]+) --> ([A-Z]+): (.+)$", re.MULTILINE)


def drawn() -> set[Transition]:
    drawing = ARCHITECTURE.read_text(encoding="utf-8").split("```mermaid")[1].split("```")[0]
    return {(a, event.strip(), b) for a, b, events in ARROW.findall(drawing) for event in events.split(",")}


def test_the_drawing_shows_what_the_code_does() -> None:
    real, shown = explore(), drawn()
    # A new child in STARTING is no change of state, but the drawing should show it.
    assert shown - real == {("STARTING", "Exited", "STARTING")}
    assert real - shown == set()
