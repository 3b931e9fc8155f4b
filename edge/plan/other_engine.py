"""Plan an engine beside llama.cpp: what its `[[model]]` table claims, corrected by what its last start took. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from edge.config.values import ModelConfig
from edge.errors import DoesNotFitError, UnavailableError
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile
from edge.plan.argv import EnvFacts, other_environment
from edge.plan.inputs import UNIFIED, PlanInputs
from edge.plan.plan import Ladder, LaunchPlan, ModelPlan, OtherEngine, Reason, Settings
from edge.plan.reasons import table
from edge.units import format_bytes

# Another engine has no header that edgellm reads.
_NO_HEADER = ModelMeta("", None, 0, 0, 0, (), 0, 0, 0, None, None, 0, "", (), 0, 0, 0, False, None, None)


def plan_other(
    config: ModelConfig,
    left: PlanInputs,
    whole: PlanInputs,
    others: tuple[str, ...],
    facts: EnvFacts,
    measured: Mapping[str, int],
) -> tuple[ModelPlan, PlanInputs]:
    """Return the plan of one engine, and the inputs with the memory that is left beside it.

    `measured`: bytes by domain of its last start, empty without one. Raises DoesNotFitError, UnavailableError.
    """
    engine = OtherEngine(config.ready, config.routes, _claim(config, whole))
    needs = engine.corrected(measured)
    turns: tuple[str, ...] = ()
    plan = _launch(config, engine, needs, left, facts, measured)
    # As for a model of llama.cpp: what fits alone is served in turns, not refused.
    if others and not plan.fits:
        plan = _launch(config, engine, needs, whole, facts, measured)
        turns = (f"fits only while {' and '.join(others)} sleep: they take turns",)
    if not plan.fits:
        raise _does_not_fit(config.id, plan)
    file = ModelFile(
        config.command[0].rpartition("/")[2], "", config.command[0], (), 0, fingerprint(config), _NO_HEADER
    )
    planned = ModelPlan(
        config.id, config.aliases, file, Ladder((plan,), 0), turns, takes_turns=bool(turns), other=engine
    )
    return planned, (left if turns else left.less(plan.budget))


def fingerprint(config: ModelConfig) -> str:
    """Return the identity of an engine's table: a measurement is valid for one command and environment."""
    stated = (config.command, sorted(config.env.items()), config.ready, config.routes, _slots(config))
    return sha256(msgspec.json.encode(stated)).hexdigest()[:32]


def _claim(config: ModelConfig, inputs: PlanInputs) -> dict[str, int]:
    """Return the claimed bytes by domain. Raises UnavailableError for memory of a GPU that is not there."""
    claim = {inputs.host: config.memory}
    if not config.gpu_memory:
        return claim
    if inputs.board.unified_memory:
        return {UNIFIED: config.memory + config.gpu_memory}
    gpu = next((str(gpu.uuid) for gpu in inputs.board.gpus if gpu.uuid and gpu.uuid in inputs.available_bytes), None)
    if gpu is None:
        hint = "leave gpu_memory out, and have the command use the CPU"
        raise UnavailableError(f"{config.id} claims memory of a GPU, and none whose memory is known is here", hint)
    return {**claim, gpu: config.gpu_memory}


def _launch(
    config: ModelConfig,
    engine: OtherEngine,
    needs: Mapping[str, int],
    inputs: PlanInputs,
    facts: EnvFacts,
    measured: Mapping[str, int],
) -> LaunchPlan:
    budget = {name: replace(inputs.domain(name), claim_bytes=size) for name, size in needs.items()}
    slots, serves = _slots(config), ", ".join(config.routes) or "every path"
    reasons = [
        Reason("command", shlex.join(config.command), f"serves {serves}", config.origin),
        Reason("ready", config.ready, "a 2xx answer to this path shows that it serves", config.origin),
        Reason("n_parallel", str(slots), "requests at once", config.origin),
    ]
    for name, size in needs.items():
        claimed = engine.claim_bytes[name]
        origin, because = config.origin, "as claimed, until it is measured"
        if name in measured and size != claimed:
            origin, because = "measured", f"what its last start took; {format_bytes(claimed)} were claimed"
        elif name in measured:
            because = f"as claimed; its last start took {format_bytes(measured[name])}"
        reasons.append(Reason(f"{name} memory", format_bytes(size), because, origin))
    gpus = None if inputs.board.unified_memory else tuple(name for name in needs if name != inputs.host)
    settings = Settings(0, slots, 0, "", "", "", "", 0, 0, 0, 0, role="other")
    env = other_environment(facts, config.env, gpus=gpus)
    return LaunchPlan(0, settings, budget, config.command, env, tuple(reasons))


def _slots(config: ModelConfig) -> int:
    """Return `n_parallel` of this model alone: that of a profile is meant for llama.cpp."""
    own = config.set.get("n_parallel", 1)
    return own if isinstance(own, int) else 1


def _does_not_fit(model_id: str, plan: LaunchPlan) -> DoesNotFitError:
    name, domain = min(plan.budget.items(), key=lambda item: item[1].headroom_bytes)
    missing = format_bytes(-domain.headroom_bytes)
    return DoesNotFitError(
        f"{model_id} does not fit: {missing} of {name} memory are missing for what it claims",
        "claim what it really takes (memory, gpu_memory), use a smaller model of it, or end other programs",
        table=table(plan.budget),
    )
