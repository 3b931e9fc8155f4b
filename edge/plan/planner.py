"""(board, memory, profile, engine, models) → Plan. Pure: nothing is read, nothing is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edge.board.board import Board
from edge.board.memory import MemorySnapshot
from edge.config.values import ModelConfig
from edge.engine.engine import Engine
from edge.errors import EngineMissingError, ModelMissingError
from edge.model.file import ModelFile
from edge.plan.argv import render
from edge.plan.calibration import Correction
from edge.plan.environment import EnvFacts, environment
from edge.plan.ladder import steps
from edge.plan.memory import budget, device_required
from edge.plan.plan import Ladder, LaunchPlan, MemoryBudget, ModelPlan, Plan, Settings
from edge.plan.refusal import does_not_fit
from edge.plan.settings import reasons, settings
from edge.plan.situation import Situation, situation
from edge.plan.weights import Weights, weights
from edge.profile.profile import Profile, Wishes

_MOST_RUNGS = 16


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to run: before it is rendered."""

    file: ModelFile
    weights: Weights
    settings: Settings
    budget: MemoryBudget

    @property
    def fits(self) -> bool:
        return all(domain.fits for domain in self.budget.values())


def make_plan(
    board: Board,
    memory: MemorySnapshot,
    profile: Profile,
    engine: Engine,
    models: Mapping[str, tuple[ModelFile, ModelConfig]],
    facts: EnvFacts,
    *,
    alternatives: Mapping[str, Sequence[ModelFile]] | None = None,
    corrections: Mapping[str, Correction] | None = None,
) -> Plan:
    """One plan for all models, which share the memory in their order.

    `profile` is settled (tier and overrides applied). `alternatives` are smaller files that are present, best first.
    Raises DoesNotFitError with the table and the cheapest ways out, EngineMissingError, ModelMissingError.
    """
    if not models:
        raise ModelMissingError("there is no model to plan", "`edgellm model pull NAME`, or name one with -m")
    wishes = check_backend(profile, board, engine)
    place = situation(board, memory, engine, wishes.reserve, dict(corrections or {}))
    place = one_gpu(place) if wishes.split_mode == "none" else place
    plans: dict[str, ModelPlan] = {}
    for model_id, (file, config) in models.items():
        own = replace(wishes, **config.set)  # type: ignore[arg-type]  # read by SETTINGS
        origins = profile.origins | dict.fromkeys(config.set, config.origin or f"model {model_id}")
        rungs = climb(own, [file, *(alternatives or {}).get(model_id, ())], config, place)
        chosen = next((index for index, rung in enumerate(rungs) if rung.fits), None)
        if chosen is None:
            raise does_not_fit(model_id, rungs[-1].settings, rungs[-1].budget, own, place, tuple(plans))
        launch = tuple(_launch(i, r, own, config, place, facts, origins, file) for i, r in enumerate(rungs))
        plans[model_id] = ModelPlan(model_id, config.aliases, file, Ladder(launch, chosen), launch[chosen].warnings)
        place = place.less(rungs[chosen].budget)
    return Plan(board, engine, plans, (*profile.notes, *memory.notes))


def check_backend(profile: Profile, board: Board, engine: Engine) -> Wishes:
    """The wishes, without the GPU where the profile allows that. Raises EngineMissingError (never a silent CPU)."""
    wishes = profile.wishes
    if wishes.backend != "cuda" or engine.cuda:
        return wishes
    if wishes.fallback == "cpu":
        return replace(wishes, offload="none")
    recipe = wishes.recipe or profile.name
    raise EngineMissingError(
        f"profile {profile.name} wants the GPU of {board.module}, and engine {engine.id} has no CUDA",
        f"`edgellm build -p {recipe}`, or serve from the CPU with --set fallback=cpu",
    )


def one_gpu(place: Situation) -> Situation:
    """The discrete GPU with the most free memory."""
    if len(place.gpus) < 2:
        return place
    return replace(place, gpus=(max(place.gpus, key=lambda gpu: place.available_bytes[gpu]),))


def climb(wishes: Wishes, files: Sequence[ModelFile], config: ModelConfig, place: Situation) -> list[Rung]:
    """The ladder: what is wished first, then what needs less and less of the deciding memory."""
    rungs: list[Rung] = []
    for rung in _candidates(wishes, files, config, place):
        if not rungs or device_required(rung.budget, place) < device_required(rungs[-1].budget, place):
            rungs.append(rung)
        if len(rungs) == _MOST_RUNGS:
            break
    if place.discrete and wishes.partial_offload and rungs[-1].settings.n_gpu_layers:
        rungs += _partial(rungs[-1], wishes, place)
    return rungs


def _candidates(wishes: Wishes, files: Sequence[ModelFile], config: ModelConfig, place: Situation) -> Iterator[Rung]:
    for file in files:
        sizes = weights(file.meta)
        for step in steps(wishes, file.meta):
            chosen = settings(wishes, step, file, config, place)
            yield Rung(file, sizes, chosen, budget(file, sizes, chosen, place))


def _partial(last: Rung, wishes: Wishes, place: Situation) -> Iterator[Rung]:
    """On discrete GPUs: as many layers as fit, half of them, none (where the profile allows the CPU)."""
    full = last.settings.n_gpu_layers
    most = next((n for n in range(full - 1, 0, -1) if _with_layers(last, n, place).fits), full // 2)
    counts = [n for n in dict.fromkeys((most, most // 2)) if 0 < n < full]
    yield from (_with_layers(last, n, place) for n in counts)
    if wishes.fallback == "cpu":
        yield _with_layers(last, 0, place)


def _with_layers(rung: Rung, n_gpu_layers: int, place: Situation) -> Rung:
    chosen = replace(rung.settings, n_gpu_layers=n_gpu_layers, load_mode="mmap")
    if n_gpu_layers == 0:
        chosen = replace(chosen, devices=(), split_mode=None, tensor_split=())
    return replace(rung, settings=chosen, budget=budget(rung.file, rung.weights, chosen, place))


def _launch(
    index: int,
    rung: Rung,
    wishes: Wishes,
    config: ModelConfig,
    place: Situation,
    facts: EnvFacts,
    origins: dict[str, str],
    wanted: ModelFile,
) -> LaunchPlan:
    gpus = None if place.board.unified_memory else place.gpus if rung.settings.n_gpu_layers else ()
    line = render(rung.settings, place.engine, rung.file, config.id)
    return LaunchPlan(
        rung=index,
        settings=rung.settings,
        budget=rung.budget,
        argv=line.args,
        env=environment(place.engine, facts, gpus=gpus, managed_memory=wishes.managed_memory),
        reasons=tuple(reasons(rung.settings, wishes, rung.file, place, origins)),
        model=None if rung.file is wanted else rung.file,
        warnings=line.dropped,
    )
