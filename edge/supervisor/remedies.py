"""Remedies for failed starts, from build/llama-server.toml: which to try, and how each changes a plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from edge.engine.engine import Engine
from edge.models.open import ModelFile
from edge.plan.argv import render
from edge.plan.kv_cache import PLAIN_KV, row_bytes
from edge.plan.plan import LaunchPlan, Reason, SavedPrompts, Settings
from edge.supervisor.status import Degraded

_CELLS = 256  # llama.cpp pads a context to this many cells


class Remedy(Struct, frozen=True):
    """A change of a plan that may cure a cause. `when`: setting values that it needs; `settings`: what it sets.

    `args` and `environment` are for code paths without a setting; `environment` works only in engines with CUDA.
    """

    id: str
    subject: str  # of the degradation: a setting's name, or a code path
    got: str
    lost: str  # what it costs
    when: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Remedies:
    """The remedies of one model on one engine. `table`: build/llama-server.toml."""

    def __init__(self, table: Mapping[str, Any], engine: Engine, file: ModelFile, alias: str) -> None:
        rows = [replace(Remedy(**row), args=tuple(row.get("args", ()))) for row in table["remedies"]]
        self._known = {remedy.id: remedy for remedy in rows}
        self._causes: Mapping[str, Sequence[str]] = table["causes"]
        self._engine = engine
        self._file = file
        self._alias = alias

    def for_kind(self, kind: str, plan: LaunchPlan) -> tuple[str, ...]:
        """Return ids of the remedies for a failure's kind that would change this plan, in the order to try them."""
        # A kind of a later table, or of a signature without causes of its own.
        listed = self._causes.get(kind, self._causes["other"])
        return tuple(id for id in listed if self._applies(self._known[id], plan))

    def apply(self, plan: LaunchPlan, ids: Iterable[str]) -> LaunchPlan:
        """Return the plan with these remedies. It takes the same memory or less."""
        chosen = [self._known[id] for id in ids if id in self._known]
        if not chosen:
            return plan
        settings, environment, args = plan.settings, dict(plan.env), []
        for remedy in chosen:
            settings = replace(settings, **remedy.settings)
            args += [arg for arg in remedy.args if self._takes(remedy)]
            environment |= remedy.environment
        settings = consistent(settings, plan.settings)
        line = render(settings, self._engine, plan.model or self._file, self._alias, plan.options)
        reasons = [Reason(one.subject, one.got, "the engine failed to start otherwise", "supervisor") for one in chosen]
        return replace(
            plan,
            settings=settings,
            argv=(*line.args, *args),
            cold=None,
            env=environment,
            reasons=(*plan.reasons, *reasons),
            warnings=line.dropped,
            saved_prompts=_prompts_of(plan.saved_prompts, plan.settings, settings),
        )

    def degradations(self, planned: LaunchPlan, applied: Sequence[tuple[str, str]]) -> tuple[Degraded, ...]:
        """Return what remedies change and cost. `applied`: id, and the kind of the failure that led to it."""
        found = []
        for remedy, kind in [(self._known[id], kind) for id, kind in applied if id in self._known]:
            wanted = str(getattr(planned.settings, remedy.subject, "on"))
            found.append(
                Degraded(remedy.subject, wanted, remedy.got, f"it failed to start otherwise ({kind}); {remedy.lost}")
            )
        n_ctx, settings = planned.settings.n_ctx, self.apply(planned, [id for id, _ in applied]).settings
        if settings.n_ctx < n_ctx:
            because = f"the V cache is {settings.kv_type_v} now and needs the memory"
            found.append(Degraded("n_ctx", str(n_ctx), str(settings.n_ctx), because))
        return tuple(found)

    def _applies(self, remedy: Remedy, plan: LaunchPlan) -> bool:
        current = plan.settings
        if any(getattr(current, name) not in values for name, values in remedy.when.items()):
            return False
        if remedy.settings and all(getattr(current, name) == value for name, value in remedy.settings.items()):
            return False
        if remedy.environment:
            missing = any(plan.env.get(name) != value for name, value in remedy.environment.items())
            return self._engine.cuda and plan.settings.n_gpu_layers > 0 and missing
        return not remedy.args or (self._takes(remedy) and not set(remedy.args) <= set(plan.argv))

    def _takes(self, remedy: Remedy) -> bool:
        return self._engine.kind != "embedded" and self._engine.has(remedy.args[0])


def _prompts_of(saved: SavedPrompts | None, planned: Settings, settings: Settings) -> SavedPrompts | None:
    """Return where prompts are saved, under another key where the KV cache has another layout: see planner.py."""
    layouts = [(one.n_ctx, one.kv_type_k, one.kv_type_v, one.flash_attention) for one in (planned, settings)]
    if saved is None or layouts[0] == layouts[1]:
        return saved
    return replace(saved, key="|".join((saved.key, *map(str, layouts[1]))))


def consistent(settings: Settings, planned: Settings) -> Settings:
    """Return settings that the engine accepts together and that take no more memory than planned.

    llama.cpp refuses a quantized V cache without flash attention (llama-context.cpp, "V cache quantization requires
    flash_attn"): the V cache becomes f16, and the context smaller by as much.
    """
    if settings.flash_attention == "off" and settings.kv_type_v not in PLAIN_KV:
        settings = replace(settings, kv_type_v="f16")
    before = row_bytes(planned.kv_type_k, _CELLS) + row_bytes(planned.kv_type_v, _CELLS)
    after = row_bytes(settings.kv_type_k, _CELLS) + row_bytes(settings.kv_type_v, _CELLS)
    if after <= before:
        return settings
    step = _CELLS * max(1, settings.n_parallel)
    n_ctx = max(step, int(settings.n_ctx * before / after) // step * step)
    return replace(settings, n_ctx=min(settings.n_ctx, n_ctx))
