"""Checks of the configuration, the profile and the configured models. Pure."""

from __future__ import annotations

from edge.doctor.check import Check, bad, ok, warn
from edge.doctor.facts import Facts


def valid(facts: Facts) -> Check:
    """Check that configuration and profile can be read."""
    serving = facts.serving
    if serving.config_problem is not None:
        return bad("config.valid", serving.config_problem, serving.config_hint or "correct it", "edgellm config show")
    return ok("config.valid", f"profile {serving.profile}, listening on {', '.join(serving.listen)}")


def models(facts: Facts) -> tuple[Check, ...]:
    """Check that every configured model resolves to a usable file; without any, name the model that `up` takes."""
    serving = facts.serving
    if not facts.live or serving.config_problem is not None:
        return ()
    missing = [model for model in serving.models if model.problem is not None]
    if missing:
        fetch = "fetch it with `edgellm model pull`"
        return tuple(bad("config.model", f"{m.id}: {m.problem}", m.hint or fetch) for m in missing)
    if serving.models:
        return (ok("config.model", f"found: {', '.join(model.id for model in serving.models)}"),)
    if serving.model_file is None:
        return (
            warn("config.model", "the store holds no model", "fetch one", "edgellm model pull SmolLM2-135M-Instruct"),
        )
    return (ok("config.model", f"none configured: {serving.model_file.name} is served"),)


CHECKS = (valid, models)
