"""Make the plan of board, memory, profile, engine and models. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from edge.board.board import Board
from edge.board.memory import MemorySnapshot
from edge.config.values import ModelConfig, Preset, Profile
from edge.engine.engine import Engine
from edge.errors import EngineMissingError, ModelMissingError, UnavailableError
from edge.models.open import ModelFile
from edge.plan.argv import EnvFacts, cold_start, environment, render
from edge.plan.calibration import Calibration, last_start
from edge.plan.choices import (
    SLEEP_OPTION,
    DraftChoice,
    LoadChoice,
    SleepChoice,
    measured_drafts,
    own_sleep_s,
    sleep_reasons,
)
from edge.plan.companions import with_mtp_layers
from edge.plan.engine_options import engine_options
from edge.plan.inputs import Candidate, PlanInputs, is_remote, restricted, role_of, situation, usable_gpus, with_hosted
from edge.plan.kv_cache import PLAIN_KV
from edge.plan.ladder import Rung, cold_choice, walk_ladder
from edge.plan.other_engine import fingerprint, plan_other
from edge.plan.plan import EngineOptions, Ladder, LaunchPlan, MemoryBudget, ModelPlan, Plan, SavedPrompts
from edge.plan.reasons import cold_reasons, does_not_fit, no_template, reasons, without_effect
from edge.plan.remotes import Remotes, with_remotes
from edge.units import GIB

Wanted = tuple[Candidate, ModelConfig]  # the file that a model's entry asks for, and the entry


class PromptFolder(Struct, frozen=True):
    """The folder for saved prompts. `durable`: its disk stands frequent writes, which `saved_prompts = auto` needs."""

    path: str
    durable: bool


class Extras(Struct, frozen=True):
    """Optional inputs. `alternatives`: smaller files in the store, best first, by model id.

    `calibrations`: from past starts of this engine, by calibration_key. `others`: models of engines beside llama.cpp;
    `claims`: memory of their last starts by fingerprint, then domain.
    """

    alternatives: Mapping[str, Sequence[Candidate]] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    load_choices: tuple[LoadChoice, ...] = ()
    busy_cores: int = 0
    draft_choices: tuple[DraftChoice, ...] = ()
    remotes: Remotes = Remotes()
    prompts: PromptFolder | None = None  # None: this plan is for another machine
    others: tuple[ModelConfig, ...] = ()
    claims: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sleep_choices: tuple[SleepChoice, ...] = ()


def make_plan(
    board: Board,
    memory: MemorySnapshot,
    profile: Profile,
    engine: Engine,
    models: Mapping[str, Wanted],
    facts: EnvFacts,
    extras: Extras | None = None,
) -> Plan:
    """Plan all models, which share the memory by priority, then in their order.

    `profile` is resolved (tier and overrides applied). One that fits alone but not beside the others is planned for
    what pinned models leave, or alone, with a warning that they take turns. Raises DoesNotFitError with the table and
    the cheapest ways out, EngineMissingError, ModelMissingError.
    """
    extras = extras or Extras()
    if not models and not extras.others:
        raise ModelMissingError("there is no model to plan", "fetch one with `edgellm model pull`, or name one with -m")
    preset, whole = plan_inputs(board, memory, profile, engine, extras.calibrations)
    whole = replace(whole, load_choices=extras.load_choices, busy_cores=extras.busy_cores)
    whole = with_remotes(whole, extras.remotes, preset.reserve)
    others = {config.id: config for config in extras.others}
    configs = {model_id: config for model_id, (_, config) in models.items()} | others
    plans = _Job(profile, preset, facts, extras).plans(models, others, whole)
    notes = (
        *profile.notes,
        *_degraded(profile, engine, preset),
        *_no_code(board, engine),
        *_board_notes(board, preset, plans),
        *memory.notes,
        *extras.remotes.all_notes,
    )
    return Plan(board, engine, {model_id: plans[model_id] for model_id in configs}, notes)


def _beside_pinned(plan: ModelPlan, pinned: Sequence[ModelPlan]) -> ModelPlan:
    """Warn of pinned models that leave no room for this one, in place of "they take turns": they never make room."""
    held = {each.id: _budget(each) for each in pinned if each.id != plan.id}
    for domain, budget in _budget(plan).items():
        taken = {name: other[domain].required_bytes for name, other in held.items() if domain in other}
        # What is free on a server of another board was counted beside the others already.
        if not is_remote(domain) and sum(taken.values()) > budget.headroom_bytes:
            beside = (
                f"does not fit beside {' and '.join(taken)} (pinned): its requests are refused while that is in memory"
            )
            return replace(plan, warnings=(beside, *plan.warnings[1:]))
    return plan


def _budget(plan: ModelPlan) -> MemoryBudget:
    return plan.ladder.plans[plan.ladder.chosen].budget


class _Job(Struct, frozen=True):
    """The inputs that all models of one plan share."""

    profile: Profile
    preset: Preset
    facts: EnvFacts
    extras: Extras

    def plans(
        self, models: Mapping[str, Wanted], others: Mapping[str, ModelConfig], whole: PlanInputs
    ) -> dict[str, ModelPlan]:
        """Plan each model beside those before it, then those that do not fit so: they take turns."""
        configs = {model_id: config for model_id, (_, config) in models.items()} | dict(others)
        plans: dict[str, ModelPlan] = {}
        turns: dict[str, tuple[str, ...]] = {}  # the models before each that does not fit beside them
        left = whole
        # sorted() is stable: equal priorities keep the order of the configuration.
        order = sorted(configs, key=lambda name: -configs[name].priority)
        for model_id in order:
            before = tuple(order[: order.index(model_id)])
            if model_id in others:
                measured = self.extras.claims.get(fingerprint(others[model_id]), {})
                plans[model_id], left = plan_other(others[model_id], left, whole, before, self.facts, measured)
            elif (plan := self._plan(models[model_id], left, last=not before)) is not None:
                plans[model_id], left = plan, left.less(_budget(plan))
            else:
                turns[model_id] = before
        # A server that another model uses serves no second engine, even while that model sleeps.
        alone = replace(whole, remotes=left.remotes)
        # Whatever the order of planning: a pinned model never makes room.
        pinned = [name for name in configs if configs[name].pin]
        for model_id in sorted(turns, key=lambda name: name not in pinned):
            held = [plans[name] for name in pinned if name in plans]
            plans[model_id] = self._in_turn(models[model_id], alone, turns[model_id], held)
        held = [plans[name] for name in pinned]
        late = {name: _beside_pinned(plans[name], held) for name in others if plans[name].takes_turns}
        return plans | late

    def _in_turn(
        self, model: Wanted, alone: PlanInputs, before: Sequence[str], pinned: Sequence[ModelPlan]
    ) -> ModelPlan:
        """Plan a model for the memory that others give back. Raises DoesNotFitError."""
        beside = alone
        for each in pinned:
            beside = replace(beside.less(_budget(each)), remotes=alone.remotes)
        sleepers = [name for name in before if name not in {each.id for each in pinned}]
        if pinned and (plan := self._plan(model, beside, sleepers)) is not None:
            return plan
        plan = self._plan(model, alone, before, last=True)
        assert plan is not None
        return _beside_pinned(plan, pinned)

    def _plan(
        self, model: Wanted, room: PlanInputs, sleepers: Sequence[str] = (), *, last: bool = False
    ) -> ModelPlan | None:
        """Return the plan of one model, None if no rung fits. `sleepers`: models that have to sleep for it.

        Raises DoesNotFitError if no rung fits and there is no other room to try (`last`).
        """
        wanted, config = model
        own: dict[str, Any] = dict(config.set)
        preset = without_crashes(replace(self.preset, **own), room.engine)
        preset, unmeasured = measured_drafts(preset, wanted.file, self.extras.draft_choices)
        smaller = self.extras.alternatives.get(config.id, ())
        candidates = tuple(with_hosted(with_mtp_layers(each, preset), preset) for each in (wanted, *smaller))
        file = candidates[0].file
        inputs = restricted(preset, room)
        role = role_of(file.meta, config.role)
        rungs = walk_ladder(preset, candidates, role, inputs)
        chosen = next((index for index, rung in enumerate(rungs) if rung.fits), None)
        if chosen is None:
            if last:
                raise does_not_fit(config.id, max(rungs, key=lambda rung: rung.headroom_bytes), preset)
            return None
        origins = self.profile.origins | dict.fromkeys(own, config.origin or f"model {config.id}")
        launches = tuple(
            self._launch(index, rung, preset, config, file, inputs, origins) for index, rung in enumerate(rungs)
        )
        turns = (f"fits only while {' and '.join(sleepers)} sleep: they take turns",) if sleepers else ()
        return ModelPlan(
            config.id,
            config.aliases,
            file,
            Ladder(launches, chosen),
            (
                *turns,
                *unmeasured,
                *no_template(file, role),
                *without_effect(own, config, preset, role, self.profile),
                *launches[chosen].warnings,
            ),
            last_start(inputs.calibrations, file.meta.arch, rungs[chosen].settings),
            takes_turns=bool(turns),
        )

    def _launch(
        self,
        index: int,
        rung: Rung,
        preset: Preset,
        config: ModelConfig,
        wanted: ModelFile,
        inputs: PlanInputs,
        origins: Mapping[str, str],
    ) -> LaunchPlan:
        file = rung.candidate.file
        # A Jetson's GPU has no UUID for CUDA_VISIBLE_DEVICES, and there is only one.
        gpus = None if inputs.board.unified_memory else rung.visible_gpus
        preset = replace(preset, draft=file.drafter or preset.draft)
        options = engine_options(preset, inputs.engine, origins, file.draft_type)
        saved = saved_prompts(preset, inputs.engine, rung, self.extras.prompts, options)
        if saved is not None:
            # CommonParams joins folder and name as they are, where llama-server's option adds the slash.
            params = {**options.params, "slot_save_path": f"{saved.folder}/"}
            options = replace(options, args=(*options.args, "--slot-save-path", saved.folder), params=params)
        # An engine that ends saves its prompts, which are restored when it is woken.
        sleep_s = own_sleep_s(self.extras.sleep_choices, inputs.engine, config, file.bytes, rung.settings)
        sleep_s = sleep_s if saved is None else 0
        if sleep_s:
            params = {**options.params, "sleep_idle_seconds": sleep_s}
            options = replace(options, args=(*options.args, SLEEP_OPTION, str(sleep_s)), params=params)
        line = render(rung.settings, inputs.engine, file, config.id, options)
        choice = cold_choice(preset, rung, inputs)
        cold = cold_start(choice, rung.settings, inputs.engine, file, config.id, options) if choice else None
        return LaunchPlan(
            rung=index,
            settings=rung.settings,
            budget=rung.budget,
            argv=line.args,
            env=environment(inputs.engine, self.facts, gpus=gpus, managed_memory=preset.managed_memory),
            reasons=(
                *reasons(rung, preset, config.role, wanted, inputs, origins),
                *cold_reasons(cold),
                *options.reasons,
                *sleep_reasons(sleep_s),
            ),
            model=None if file is wanted else file,
            warnings=line.dropped,
            saved_prompts=saved,
            args=preset.args,
            own_sleep_s=sleep_s,
            options=replace(options, reasons=()),
            cold=cold,
        )


def saved_prompts(
    preset: Preset, engine: Engine, rung: Rung, folder: PromptFolder | None, options: EngineOptions
) -> SavedPrompts | None:
    """Return where this engine keeps prompts across restarts, and what they are valid for; None where it does not."""
    able = engine.kind == "embedded" or engine.has("--slot-save-path")
    if folder is None or not able or rung.settings.role != "chat" or preset.saved_prompts == "off":
        return None
    if preset.saved_prompts == "auto" and not folder.durable:
        return None
    chosen = rung.settings
    # A saved state is bytes of the KV cache: any of these changes its layout or its meaning.
    identity = (
        rung.candidate.file.fingerprint,
        engine.id,
        engine.version,
        engine.commit,
        chosen.n_ctx,
        chosen.n_parallel,
        chosen.kv_type_k,
        chosen.kv_type_v,
        chosen.flash_attention,
        chosen.mmproj,
        *options.args,
        *sorted(options.params.items()),
    )
    return SavedPrompts(folder.path, "|".join(map(str, identity)), preset.saved_prompts_max)


def plan_inputs(
    board: Board, memory: MemorySnapshot, profile: Profile, engine: Engine, calibrations: Mapping[str, Calibration]
) -> tuple[Preset, PlanInputs]:
    """Return the preset that this engine can serve, and its inputs. Raises EngineMissingError, UnavailableError."""
    preset = without_crashes(_usable(profile, board, engine), engine)
    found = situation(board, memory, engine, preset.reserve, calibrations)
    if preset.backend == "cuda" and preset.offload == "full" and not found.gpus:
        if preset.fallback != "cpu":
            raise _no_gpu(profile, board)
        preset = replace(preset, offload="none")
    return preset, found


def without_crashes(preset: Preset, engine: Engine) -> Preset:
    """Leave out what this engine crashed with when it was proved; a quantized V cache needs flash attention."""
    if not any("--flash-attn" in off.args for off in engine.without):
        return preset
    plain = preset.kv_type_v if preset.kv_type_v in PLAIN_KV else "f16"
    return replace(preset, flash_attention="off", kv_type_v=plain)


def _usable(profile: Profile, board: Board, engine: Engine) -> Preset:
    """Return the preset, without the GPU where the profile allows that. Raises EngineMissingError (no silent CPU)."""
    preset = profile.preset
    if preset.backend == "cpu":
        return replace(preset, offload="none")
    if preset.backend != "cuda" or engine.cuda:
        return preset
    if preset.fallback == "cpu":
        return replace(preset, offload="none")
    recipe = preset.recipe or profile.name
    raise EngineMissingError(
        f"profile {profile.name} needs the GPU of {board.module}, and engine {engine.id} has no CUDA",
        f"`edgellm build -p {recipe}`, or serve from the CPU with --set fallback=cpu",
        recipe=recipe,
    )


def _no_gpu(profile: Profile, board: Board) -> UnavailableError:
    why = board.refused or ("its free memory is unknown" if any(gpu.uuid for gpu in board.gpus) else "there is none")
    return UnavailableError(
        f"profile {profile.name} needs a GPU of {board.module}: {why}",
        "`edgellm doctor` says more; serve from the CPU with -p cpu",
    )


def _degraded(profile: Profile, engine: Engine, preset: Preset) -> tuple[str, ...]:
    notes = [f"the engine runs without {off.id}, with which it crashed here: {off.lost}" for off in engine.without]
    if profile.preset.backend == "cuda" and preset.offload != profile.preset.offload:
        why = "no GPU can be used" if engine.cuda else f"engine {engine.id} has no CUDA"
        notes.append(f"profile {profile.name} asks for the GPU; {why}, so the CPU serves")
    return tuple(notes)


def _no_code(board: Board, engine: Engine) -> tuple[str, ...]:
    """Name discrete GPUs that this engine cannot run on, while it runs on others."""
    usable = usable_gpus(board, engine)
    if not engine.cuda or board.unified_memory or not usable:
        return ()
    return tuple(
        f"{gpu.name} is left out: engine {engine.id} has no code for compute capability {gpu.compute_capability}"
        for gpu in board.gpus
        if gpu not in usable
    )


def _board_notes(board: Board, preset: Preset, plans: Mapping[str, ModelPlan]) -> tuple[str, ...]:
    """Return notes on the board. NvMap of L4T 36.4.7 refuses single buffers above about 3 GiB (FC-16)."""
    if board.refused is not None:
        return (f"the CPU serves: {board.refused}",)
    if board.l4t != "36.4.7" or preset.managed_memory:
        return ()
    chosen = (plan.ladder.plans[plan.ladder.chosen] for plan in plans.values())
    if not any(rung.settings.n_gpu_layers and rung.budget["unified"].weights_bytes > 3 * GIB for rung in chosen):
        return ()
    return ("L4T 36.4.7 may refuse buffers this large: update to 36.5 or later, or --set managed_memory=true",)
