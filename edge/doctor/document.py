"""The JSON document of `edgellm doctor --json`. Pure."""

from __future__ import annotations

from typing import Any

from edge.doctor.check import Check, Verdict, worst

SCHEMA = 1


def document(checks: tuple[Check, ...], fixed: tuple[str, ...]) -> dict[str, Any]:
    """Return the document: the worst verdict, counts by verdict, the checks, and what `--fix` changed."""
    return {
        "schema": SCHEMA,
        "verdict": worst(checks).value,
        "counts": {verdict.value: sum(check.verdict is verdict for check in checks) for verdict in Verdict},
        "checks": [
            {
                "name": check.name,
                "verdict": check.verdict.value,
                "says": check.says,
                "next": check.next_step,
                "command": check.command,
            }
            for check in checks
        ],
        "fixed": list(fixed),
    }
