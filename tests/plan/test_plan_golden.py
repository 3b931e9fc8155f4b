"""Golden plans, boards by eras, reviewed like code: `python -m tests.plan.golden` rewrites them, then read the diff."""

from __future__ import annotations

import pytest

from tests.plan.golden import BOARDS, ERAS, GOLDEN, planned, text


@pytest.mark.parametrize("board", BOARDS)
def test_the_plan_of_this_board_is_the_one_that_was_reviewed(board: str) -> None:
    wanted = (GOLDEN / f"{board}.txt").read_text(encoding="utf-8")
    assert text(board) == wanted


def test_no_golden_file_is_left_without_a_board() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(BOARDS)


def test_boards_get_visibly_different_plans() -> None:
    """8 GB with a desktop, the same headless, 64 GB and a CPU box."""
    names = ("orin-nano-8-desktop", "orin-nano-8", "agx-orin-64", "cpu-16")
    plans = [planned(name, ERAS[0]) for name in names]
    chosen = [model.ladder.plans[model.ladder.chosen] for plan in plans for model in plan.models.values()]
    assert len({(rung.settings, tuple(rung.budget)) for rung in chosen}) == 4
    assert len({tuple(reason.because for reason in rung.reasons) for rung in chosen}) == 4
