"""Build the ladder of one model: as requested first, then with less and less of the deciding memory. Pure."""

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

_MOST_RUNGS = 16  # enough for three files; a longer ladder only costs planning time


@dataclass(frozen=True, slots=True)
class Rung:
    """Settings and memory of one candidate, before they are rendered."""

    candidate: Subject
    settings: Settings
    budget: MemoryBudget

    @property
    def fits(self) -> bool:
        return all(domain.fits for domain in self.budget.values())


def walk_ladder(preset: Wishes, candidates: Sequence[Subject], role: str, inputs: Situation) -> list[Rung]:
    """Return rungs that each need less of the deciding memory. `candidates`: the requested file, then smaller ones."""
    rungs: list[Rung] = []
    for rung in _candidates(preset, candidates, role, inputs):
        if not rungs or device_required(rung.budget, inputs) < device_required(rungs[-1].budget, inputs):
            rungs.append(rung)
        if len(rungs) == _MOST_RUNGS:
            break
    if inputs.discrete and preset.partial_offload and rungs[-1].settings.n_gpu_layers:
        rungs += _partial(rungs[-1], preset, inputs)
    return rungs


def _candidates(preset: Wishes, candidates: Sequence[Subject], role: str, inputs: Situation) -> Iterator[Rung]:
    for candidate in candidates:
        for step in steps(preset, candidate.file.meta):
            chosen = settings(preset, step, candidate, role, inputs)
            yield Rung(candidate, chosen, budget(candidate, chosen, inputs))


def _partial(last: Rung, preset: Wishes, inputs: Situation) -> Iterator[Rung]:
    """Yield rungs for discrete GPUs: as many layers as fit, half of them, none where the profile allows the CPU."""
    full, needed = last.settings.n_gpu_layers, device_required(last.budget, inputs)
    most = next((n for n in range(full - 1, 0, -1) if _with_layers(last, n, inputs).fits), full // 2)
    for count in dict.fromkeys((most, most // 2)):
        rung = _with_layers(last, count, inputs)
        if count and device_required(rung.budget, inputs) < needed:
            needed = device_required(rung.budget, inputs)
            yield rung
    if preset.fallback == "cpu":
        yield _with_layers(last, 0, inputs)


def _with_layers(rung: Rung, n_gpu_layers: int, inputs: Situation) -> Rung:
    chosen = replace(rung.settings, n_gpu_layers=n_gpu_layers, load_mode="mmap")
    if n_gpu_layers == 0:
        chosen = replace(chosen, devices=(), split_mode=None, tensor_split=())
    return replace(rung, settings=chosen, budget=budget(rung.candidate, chosen, inputs))
