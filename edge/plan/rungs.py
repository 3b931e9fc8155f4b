"""The ladder of one model: what is wished first, then what needs less and less of the deciding memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edge.plan.ladder import steps
from edge.plan.memory import budget, device_required
from edge.plan.plan import MemoryBudget, Settings
from edge.plan.settings import settings
from edge.plan.situation import Situation
from edge.plan.subject import Subject
from edge.profile.profile import Wishes

_MOST_RUNGS = 16


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to run, before it is rendered."""

    subject: Subject
    settings: Settings
    budget: MemoryBudget

    @property
    def fits(self) -> bool:
        return all(domain.fits for domain in self.budget.values())


def climb(wishes: Wishes, subjects: Sequence[Subject], role: str, place: Situation) -> list[Rung]:
    """Each rung needs less of the deciding memory than the one before. `subjects`: what is wanted, then smaller."""
    rungs: list[Rung] = []
    for rung in _candidates(wishes, subjects, role, place):
        if not rungs or device_required(rung.budget, place) < device_required(rungs[-1].budget, place):
            rungs.append(rung)
        if len(rungs) == _MOST_RUNGS:
            break
    if place.discrete and wishes.partial_offload and rungs[-1].settings.n_gpu_layers:
        rungs += _partial(rungs[-1], wishes, place)
    return rungs


def _candidates(wishes: Wishes, subjects: Sequence[Subject], role: str, place: Situation) -> Iterator[Rung]:
    for subject in subjects:
        for step in steps(wishes, subject.file.meta):
            chosen = settings(wishes, step, subject, role, place)
            yield Rung(subject, chosen, budget(subject, chosen, place))


def _partial(last: Rung, wishes: Wishes, place: Situation) -> Iterator[Rung]:
    """On discrete GPUs: as many layers as fit, half of them, none (where the profile allows the CPU)."""
    full, needed = last.settings.n_gpu_layers, device_required(last.budget, place)
    most = next((n for n in range(full - 1, 0, -1) if _with_layers(last, n, place).fits), full // 2)
    for count in dict.fromkeys((most, most // 2)):
        rung = _with_layers(last, count, place)
        if count and device_required(rung.budget, place) < needed:
            needed = device_required(rung.budget, place)
            yield rung
    if wishes.fallback == "cpu":
        yield _with_layers(last, 0, place)


def _with_layers(rung: Rung, n_gpu_layers: int, place: Situation) -> Rung:
    chosen = replace(rung.settings, n_gpu_layers=n_gpu_layers, load_mode="mmap")
    if n_gpu_layers == 0:
        chosen = replace(chosen, devices=(), split_mode=None, tensor_split=())
    return replace(rung, settings=chosen, budget=budget(rung.subject, chosen, place))
