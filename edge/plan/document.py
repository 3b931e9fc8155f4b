"""Build the JSON document of `edgellm plan --json`. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from edge.models.open import ModelFile
from edge.plan.argv import redacted
from edge.plan.plan import DomainBudget, LaunchPlan, ModelPlan, Plan

SCHEMA = 1


def document(plan: Plan) -> dict[str, Any]:
    """Return the JSON-serialisable document; secrets of the environment are hidden."""
    engine = plan.engine
    return {
        "schema": SCHEMA,
        "board": to_builtins(plan.board, enc_hook=str),
        "engine": {
            "id": engine.id,
            "kind": engine.kind,
            "version": engine.version,
            "commit": engine.commit,
            "era": engine.era,
        },
        "models": {model_id: _model(model) for model_id, model in plan.models.items()},
        "notes": list(plan.notes),
    }


def _model(plan: ModelPlan) -> dict[str, Any]:
    return {
        "aliases": list(plan.aliases),
        "model": None if plan.other else _file(plan.model),
        **({"other_engine": to_builtins(plan.other)} if plan.other else {}),
        "ladder": [_rung(rung) for rung in plan.ladder.plans],
        "chosen": plan.ladder.chosen,
        "warnings": list(plan.warnings),
        "measured": to_builtins(plan.measured, enc_hook=str) if plan.measured else None,
    }


def _file(file: ModelFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "path": file.path,
        "quant": file.quant,
        "bytes": file.bytes,
        "mmproj_bytes": file.mmproj_bytes,
        "adapter_bytes": file.adapter_bytes,
        "drafter_bytes": file.drafter_bytes,
        "fingerprint": file.fingerprint,
    }


def _rung(rung: LaunchPlan) -> dict[str, Any]:
    return {
        "rung": rung.rung,
        "fits": rung.fits,
        **({"model": _file(rung.model)} if rung.model else {}),
        "settings": to_builtins(rung.settings, enc_hook=str),
        "memory": {name: _domain(domain) for name, domain in rung.budget.items()},
        "argv": list(rung.argv),
        "env": redacted(rung.env),
        "reasons": [to_builtins(reason, enc_hook=str) for reason in rung.reasons],
    }


def _domain(domain: DomainBudget) -> dict[str, int]:
    return {
        **to_builtins(domain, enc_hook=str),
        "required_bytes": domain.required_bytes,
        "headroom_bytes": domain.headroom_bytes,
    }
