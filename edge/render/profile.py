"""Text of `edgellm profile show`."""

from __future__ import annotations

from edge.config.show import toml_value
from edge.profile.profile import SETTINGS, Profile
from edge.render.plan import columns
from edge.units import format_bytes


def profile_lines(profile: Profile) -> list[str]:
    """Return the settings with their origin, then tiers and choices."""
    lines = [f"{profile.name}: {profile.summary}", f"from {profile.source}", ""]
    rows = [
        (f"{key} = {toml_value(getattr(profile.wishes, key))}", profile.origins.get(key, "default")) for key in SETTINGS
    ]
    lines += columns(rows)
    for key, value in profile.sections.items():
        lines.append(f"{key} = {toml_value(value)}  {profile.origins.get(key, 'default')}")
    for tier in profile.tiers:
        upto = format_bytes(tier.memory_max_bytes) if tier.memory_max_bytes else "any size"
        names = f" ({', '.join(tier.names)})" if tier.names else ""
        values = ", ".join(f"{key} = {toml_value(value)}" for key, value in tier.values.items())
        lines += ["", f"tier {tier.name}{names}, memory up to {upto}:", f"  {values}"]
    if profile.choices:
        lines.append("")
    for choice in profile.choices:
        conditions = [
            *choice.socs,
            *choice.containers,
            *([f"{choice.gpus_min} GPU or more"] if choice.gpus_min else []),
        ]
        lines.append(f"{' or '.join(conditions) or 'anything else'} → {choice.profile}")
    return lines
