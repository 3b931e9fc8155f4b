"""Build the JSON document of `edgellm plan --json`. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edge.model.file import ModelFile
from edge.plan.environment import redacted
from edge.plan.plan import DomainBudget, LaunchPlan, ModelPlan, Plan

SCHEMA = 1


def document(plan: Plan) -> dict[str, Any]:
    """Return the JSON-serialisable document; secrets of the environment are hidden."""
    engine = plan.engine
    return {
        "schema": SCHEMA,
        "board": asdict(plan.board),
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
        "model": _file(plan.model),
        "ladder": [_rung(rung) for rung in plan.ladder.plans],
        "chosen": plan.ladder.chosen,
        "warnings": list(plan.warnings),
        "measured": asdict(plan.measured) if plan.measured else None,
    }


def _file(file: ModelFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "path": file.path,
        "quant": file.quant,
        "bytes": file.bytes,
        "fingerprint": file.fingerprint,
    }


def _rung(rung: LaunchPlan) -> dict[str, Any]:
    return {
        "rung": rung.rung,
        "fits": rung.fits,
        **({"model": _file(rung.model)} if rung.model else {}),
        "settings": asdict(rung.settings),
        "memory": {name: _domain(domain) for name, domain in rung.budget.items()},
        "argv": list(rung.argv),
        "env": redacted(rung.env),
        "reasons": [asdict(reason) for reason in rung.reasons],
    }


def _domain(domain: DomainBudget) -> dict[str, int]:
    return {
        **asdict(domain),
        "required_bytes": domain.required_bytes,
        "headroom_bytes": domain.headroom_bytes,
    }
