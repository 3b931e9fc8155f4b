"""Configuration and profile can be read. Pure."""

from __future__ import annotations

from edge.doctor.check import Check, bad, ok
from edge.doctor.facts import Facts


def valid(facts: Facts) -> Check:
    serving = facts.serving
    if serving.config_problem is not None:
        return bad("config.valid", serving.config_problem, serving.config_hint or "correct it", "edgellm config show")
    return ok("config.valid", f"profile {serving.profile}, listening on {', '.join(serving.listen)}")


CHECKS = (valid,)
