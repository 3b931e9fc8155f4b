"""Describe a build plan and its result as JSON documents. Pure."""

from __future__ import annotations

import shlex
from typing import Any

from edge.engine.request import BuildPlan, Request, Result

SCHEMA = 1


def plan_document(request: Request, plan: BuildPlan) -> dict[str, Any]:
    recipe = plan.recipe
    return {
        "schema": SCHEMA,
        "board": {"id": request.board.id, "module": request.board.module, "stand_in": request.stand_in},
        "recipe": {"name": recipe.name, "script": recipe.script, "sha256": recipe.sha256, "trust": recipe.trust},
        "source": {
            "type": plan.source.type,
            "name": plan.source.name,
            "version": plan.source.version,
            "commit": plan.source.commit,
            "sha256": plan.source.sha256,
            "pinned": plan.source.pinned,
        },
        "cuda_arch": list(plan.arch),
        "fingerprint": plan.commands.fingerprint,
        "built": plan.built,
        "jobs": plan.inputs.jobs,
        "minutes": plan.minutes,
        "disk_bytes": recipe.disk_bytes,
        "findings": [
            {"name": f.name, "verdict": f.verdict, "sentence": f.sentence, "hint": f.hint}
            for f in plan.preflight.findings
        ],
        "options": [
            {"name": option.name, "value": option.value, "because": option.why}
            for option in (*recipe.options, *plan.commands.overrides)
        ],
        "commands": [list(plan.commands.configure), list(plan.commands.build)],
    }


def result_document(result: Result) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "engine": result.engine_id,
        "new": result.new,
        "previous": result.previous,
        "log": result.log,
        "took_s": round(result.took_s, 3),
        "unknown_options": list(result.notes),
    }


def shell(command: tuple[str, ...]) -> str:
    """Return a command as a shell line."""
    return shlex.join(command)
