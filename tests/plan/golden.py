"""Golden plans: what each board gets, in the command line of each era. `python -m tests.plan.golden` rewrites them."""

from __future__ import annotations

from pathlib import Path

from edge.board import memory as board_memory
from edge.board.board import Board
from edge.board.memory import MemorySnapshot, snapshot
from edge.board.named import board_by_id
from edge.board.probe import probe
from edge.cli.plan import command_lines, environment_lines, plan_lines
from edge.config import load, resolve_profile
from edge.models.store import Store
from edge.paths import Folders
from edge.plan.argv import EnvFacts
from edge.plan.choose import Chooser
from edge.plan.plan import Plan
from edge.plan.planner import Extras, make_plan, plan_inputs
from tests.plan import shapes
from tests.trees import trees

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

NOWHERE = Path("/nowhere")
FOLDERS = Folders(NOWHERE / "data", NOWHERE / "state", NOWHERE / "cache", NOWHERE / "run", NOWHERE / "config")
ERAS = ("load-mode", "both", "flash-value", "flash-bare")
BOARDS = (
    *(name for name in trees.NAMES if name != "tx2"),
    "cuda-2x24",
    "cpu-16",
)


def machine(name: str) -> tuple[Board, MemorySnapshot]:
    """A tree, or a board by name as it would be after a start."""
    if name in trees.NAMES:
        board = probe(trees.tree(name))
        return board, snapshot(trees.tree(name), board)
    board = board_by_id(name)
    return board, board_memory.assumed(board)


def planned(name: str, era: str) -> Plan:
    """As `edgellm plan` would: nothing configured, nothing in the store."""
    board, memory = machine(name)
    config = load(FOLDERS, {}, {}, NOWHERE)
    profile = resolve_profile(config, board, FOLDERS, NOWHERE)
    engine = shapes.engine(cuda=profile.preset.backend == "cuda", era=era)
    preset, where = plan_inputs(board, memory, profile, engine, {})
    chooser = Chooser(Store(FOLDERS.models), where)
    chosen = chooser.choose(config, preset)
    facts = EnvFacts("/var/cache/edgellm", "/var/cache/edgellm", wsl=board.container == "wsl2")
    return make_plan(board, memory, profile, engine, chosen.models, facts, Extras(chosen.smaller))


def text(name: str) -> str:
    """The whole plan for today's engines, then only the command for older ones."""
    first = planned(name, ERAS[0])
    lines = plan_lines(first)
    for model in first.models.values():
        lines += ["", *environment_lines(model.ladder.plans[model.ladder.chosen])]
    for era in ERAS:
        plan = planned(name, era)
        for model in plan.models.values():
            lines += ["", f"## {era}: {model.id}, rung {model.ladder.chosen}"]
            lines += command_lines(model.ladder.plans[model.ladder.chosen])
            lines += [f"left out: {warning}" for warning in model.warnings]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for board_name in BOARDS:
        (GOLDEN / f"{board_name}.txt").write_text(text(board_name), encoding="utf-8")
