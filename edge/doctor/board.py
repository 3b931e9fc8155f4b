"""Checks of the board and its JetPack release. Pure."""

from __future__ import annotations

from edge.board.tables import release_table
from edge.doctor.check import Check, bad, ok, unknown, warn
from edge.doctor.facts import DoctorFacts


def supported(facts: DoctorFacts) -> Check:
    """Check that the board has a GPU generation that llama.cpp can use."""
    board = facts.board
    if board.refused:
        return bad("board.supported", board.refused, "serve from its CPU", "edgellm up --profile cpu")
    system = f", L4T {board.l4t} (JetPack {board.jetpack}, CUDA {board.cuda})" if board.l4t else ""
    cards = "".join(f", {gpu.name}" for gpu in board.gpus) if board.soc is None else ""
    return ok("board.supported", f"{board.module}{cards}{system}")


def release(facts: DoctorFacts) -> Check | None:
    """Report an L4T release that the table lacks; the nearest known release is used, never refused (FC-64)."""
    if facts.board.soc is None or facts.board.refused:
        return None
    guesses = [note for note in facts.board.notes if "L4T" in note]
    if guesses:
        return unknown("board.release", guesses[0], "nothing to do; a newer edgellm may know it")
    return ok("board.release", f"JetPack {facts.board.jetpack} is in the table of releases")


def known_faults(facts: DoctorFacts) -> Check | None:
    """Warn of a release with a known fault: L4T 36.4.7 refuses allocations that fit (FC-16)."""
    if facts.board.l4t is None:
        return None
    for issue in release_table().issues:
        if facts.board.l4t in issue.l4t:
            return warn("board.faults", issue.says, f"{issue.next} ({issue.source})")
    return ok("board.faults", f"no known fault of L4T {facts.board.l4t}")


CHECKS = (supported, release, known_faults)
