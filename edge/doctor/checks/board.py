"""The board itself: can it be used, and is its system one of those with a known fault? Pure."""

from __future__ import annotations

from edge.board.lore import lore
from edge.doctor.check import Check, bad, ok, unknown, warn
from edge.doctor.facts import Facts


def supported(facts: Facts) -> Check:
    board = facts.board
    if board.refused:
        return bad("board.supported", board.refused, "serve from its CPU", "edgellm up --profile cpu")
    system = f", L4T {board.l4t} (JetPack {board.jetpack}, CUDA {board.cuda})" if board.l4t else ""
    cards = "".join(f", {gpu.name}" for gpu in board.gpus) if board.soc is None else ""
    return ok("board.supported", f"{board.module}{cards}{system}")


def release(facts: Facts) -> Check | None:
    """FC-64: a release that no table knows is taken as its neighbour, said, and never refused."""
    if facts.board.soc is None or facts.board.refused:
        return None
    guesses = [note for note in facts.board.notes if "L4T" in note]
    if guesses:
        return unknown("board.release", guesses[0], "nothing to do; a newer edgellm may know it")
    return ok("board.release", f"JetPack {facts.board.jetpack} is in our table")


def known_faults(facts: Facts) -> Check | None:
    """FC-16: one release refuses allocations that fit."""
    if facts.board.l4t is None:
        return None
    for issue in lore().issues:
        if facts.board.l4t in issue.l4t:
            return warn("board.faults", issue.says, f"{issue.next} ({issue.source})")
    return ok("board.faults", f"no known fault of L4T {facts.board.l4t}")


CHECKS = (supported, release, known_faults)
