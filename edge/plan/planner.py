"""(board, memory, profile, engine, models) → Plan. Pure: nothing is read, nothing is launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge.board.board import Board
from edge.board.memory import MemorySnapshot
from edge.config.values import ModelConfig
from edge.engine.engine import Engine
from edge.errors import EngineMissingError, ModelMissingError, UnavailableError
from edge.model.file import ModelFile
from edge.plan.argv import render
from edge.plan.calibration import Correction
from edge.plan.environment import EnvFacts, environment
from edge.plan.plan import Ladder, LaunchPlan, ModelPlan, Plan
from edge.plan.reasons import reasons
from edge.plan.refusal import does_not_fit
from edge.plan.role import role_of
from edge.plan.rungs import Rung, climb
from edge.plan.situation import Situation, situation
from edge.plan.subject import Subject
from edge.profile.profile import Profile, Wishes
from edge.units import GIB


@dataclass(frozen=True, slots=True)
class Extras:
    """What a plan may also know. `alternatives`: smaller files that are present, best first, by model id.

    `corrections`: what past starts of this engine taught, by architecture.
    """

    alternatives: Mapping[str, Sequence[Subject]] = field(default_factory=dict)
    corrections: Mapping[str, Correction] = field(default_factory=dict)


def make_plan(
    board: Board,
    memory: MemorySnapshot,
    profile: Profile,
    engine: Engine,
    models: Mapping[str, tuple[Subject, ModelConfig]],
    facts: EnvFacts,
    extras: Extras | None = None,
) -> Plan:
    """One plan for all models, which share the memory: by priority, then in their order.

    `profile` is settled (tier and overrides applied). A model that fits alone but not beside the others is planned
    alone and says so: it takes turns with them. Raises DoesNotFitError with the table and the cheapest ways out,
    EngineMissingError, ModelMissingError.
    """
    if not models:
        raise ModelMissingError("there is no model to plan", "fetch one with `edgellm model pull`, or name one with -m")
    extras = extras or Extras()
    wishes, whole = place(board, memory, profile, engine, extras.corrections)
    job = _Job(profile, wishes, facts, extras)
    plans: dict[str, ModelPlan] = {}
    left = whole
    for model_id in sorted(models, key=lambda name: -models[name][1].priority):
        wanted, config = models[model_id]
        plan, left = job.plan(model_id, wanted, config, left, whole, tuple(plans))
        plans[model_id] = plan
    notes = (*profile.notes, *_degraded(profile, engine, wishes), *_board_notes(board, wishes, plans), *memory.notes)
    return Plan(board, engine, {model_id: plans[model_id] for model_id in models}, notes)


@dataclass(frozen=True, slots=True)
class _Job:
    """What all models of one plan have in common."""

    profile: Profile
    wishes: Wishes
    facts: EnvFacts
    extras: Extras

    def plan(
        self,
        model_id: str,
        wanted: Subject,
        config: ModelConfig,
        left: Situation,
        whole: Situation,
        others: tuple[str, ...],
    ) -> tuple[ModelPlan, Situation]:
        """→ the plan, and what is left beside it."""
        own: dict[str, Any] = dict(config.set)
        wishes = without_crashes(replace(self.wishes, **own), left.engine)
        subjects = (wanted, *self.extras.alternatives.get(model_id, ()))
        file = wanted.file
        turns: tuple[str, ...] = ()
        place = left
        role = role_of(file.meta, config.role)
        rungs = climb(wishes, subjects, role, place)
        if others and not any(rung.fits for rung in rungs):
            place = whole
            rungs = climb(wishes, subjects, role, place)
            turns = (f"fits only while {' and '.join(others)} sleep: they take turns",)
        chosen = next((index for index, rung in enumerate(rungs) if rung.fits), None)
        if chosen is None:
            raise does_not_fit(model_id, rungs[-1], wishes)
        origins = self.profile.origins | dict.fromkeys(own, config.origin or f"model {model_id}")
        launches = tuple(
            self._launch(index, rung, wishes, config, file, place, origins) for index, rung in enumerate(rungs)
        )
        known = place.corrections.get(file.meta.arch)
        plan = ModelPlan(
            model_id,
            config.aliases,
            file,
            Ladder(launches, chosen),
            turns + _no_template(file, role) + launches[chosen].warnings,
            known.last if known else None,
        )
        return plan, (left if turns else place.less(rungs[chosen].budget))

    def _launch(
        self,
        index: int,
        rung: Rung,
        wishes: Wishes,
        config: ModelConfig,
        wanted: ModelFile,
        place: Situation,
        origins: Mapping[str, str],
    ) -> LaunchPlan:
        file = rung.subject.file
        gpus = None if place.board.unified_memory else place.gpus if rung.settings.n_gpu_layers else ()
        line = render(rung.settings, place.engine, file, config.id)
        return LaunchPlan(
            rung=index,
            settings=rung.settings,
            budget=rung.budget,
            argv=line.args,
            env=environment(place.engine, self.facts, gpus=gpus, managed_memory=wishes.managed_memory),
            reasons=reasons(rung.settings, wishes, config.role, rung.subject, wanted, place, origins),
            model=None if file is wanted else file,
            warnings=line.dropped,
        )


def place(
    board: Board, memory: MemorySnapshot, profile: Profile, engine: Engine, corrections: Mapping[str, Correction]
) -> tuple[Wishes, Situation]:
    """The wishes that this engine can serve, and where. Raises EngineMissingError; UnavailableError without a GPU."""
    wishes = without_crashes(_usable(profile, board, engine), engine)
    found = situation(board, memory, engine, wishes.reserve, corrections)
    if wishes.backend == "cuda" and wishes.offload == "full" and not found.gpus:
        if wishes.fallback != "cpu":
            raise _no_gpu(profile, board)
        wishes = replace(wishes, offload="none")
    return wishes, _one_gpu(found) if wishes.split_mode == "none" else found


def without_crashes(wishes: Wishes, engine: Engine) -> Wishes:
    """Leave out what this engine crashed with when it was proved; a quantized V cache needs flash attention."""
    if not any("--flash-attn" in off.args for off in engine.without):
        return wishes
    plain = wishes.kv_type_v if wishes.kv_type_v in ("f32", "f16", "bf16") else "f16"
    return replace(wishes, flash_attention="off", kv_type_v=plain)


def _usable(profile: Profile, board: Board, engine: Engine) -> Wishes:
    """The wishes, without the GPU where the profile allows that. Raises EngineMissingError (never a silent CPU)."""
    wishes = profile.wishes
    if wishes.backend == "cpu":
        return replace(wishes, offload="none")
    if wishes.backend != "cuda" or engine.cuda:
        return wishes
    if wishes.fallback == "cpu":
        return replace(wishes, offload="none")
    recipe = wishes.recipe or profile.name
    raise EngineMissingError(
        f"profile {profile.name} wants the GPU of {board.module}, and engine {engine.id} has no CUDA",
        f"`edgellm build -p {recipe}`, or serve from the CPU with --set fallback=cpu",
        recipe=recipe,
    )


def _no_gpu(profile: Profile, board: Board) -> UnavailableError:
    why = board.refused or ("its free memory is unknown" if any(gpu.uuid for gpu in board.gpus) else "there is none")
    return UnavailableError(
        f"profile {profile.name} wants a GPU of {board.module}: {why}",
        "`edgellm doctor` says more; serve from the CPU with -p cpu",
    )


def _degraded(profile: Profile, engine: Engine, wishes: Wishes) -> tuple[str, ...]:
    notes = [f"the engine runs without {off.id}, with which it crashed here: {off.lost}" for off in engine.without]
    if profile.wishes.backend == "cuda" and wishes.offload != profile.wishes.offload:
        why = "no GPU can be used" if engine.cuda else f"engine {engine.id} has no CUDA"
        notes.append(f"profile {profile.name} wants the GPU; {why}, so the CPU serves")
    return tuple(notes)


def _no_template(file: ModelFile, role: str) -> tuple[str, ...]:
    """FC-88: the engine falls back to a template of its own choosing, and answers look odd."""
    if role != "chat" or file.meta.chat_template:
        return ()
    return ("the file has no chat template: the engine takes a general one, and tools may not work",)


def _board_notes(board: Board, wishes: Wishes, plans: Mapping[str, ModelPlan]) -> tuple[str, ...]:
    """What a person should know before the start. NvMap of L4T 36.4.7 refuses single buffers above about 3 GiB."""
    if board.refused is not None:
        return (f"the CPU serves: {board.refused}",)
    if board.l4t != "36.4.7" or wishes.managed_memory:
        return ()
    chosen = (plan.ladder.plans[plan.ladder.chosen] for plan in plans.values())
    if not any(rung.settings.n_gpu_layers and rung.budget["unified"].weights_bytes > 3 * GIB for rung in chosen):
        return ()
    return ("L4T 36.4.7 may refuse buffers this large: update to 36.5 or later, or --set managed_memory=true",)


def _one_gpu(place: Situation) -> Situation:
    """The discrete GPU with the most free memory."""
    if len(place.gpus) < 2:
        return place
    return replace(place, gpus=(max(place.gpus, key=lambda gpu: place.available_bytes[gpu]),))
