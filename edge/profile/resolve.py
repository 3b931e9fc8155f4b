"""Selection of a profile and its tier for one board. Pure."""

from __future__ import annotations

from dataclasses import replace

from edge.board.board import Board
from edge.errors import ConfigError
from edge.profile.profile import Profile
from edge.units import format_bytes


def choose(profile: Profile, board: Board) -> str:
    """Return the profile name to use on this board: its own unless it is a list of choices. Raises ConfigError."""
    if not profile.choices:
        return profile.name
    discrete = sum(1 for gpu in board.gpus if gpu.uuid)
    for choice in profile.choices:
        soc = not choice.socs or board.soc in choice.socs
        container = not choice.containers or board.container in choice.containers
        if soc and container and discrete >= choice.gpus_min:
            return choice.profile
    raise ConfigError(f"profile {profile.name} has no row for {board.module}", "name a profile with -p")


def resolve_tier(profile: Profile, board: Board) -> Profile:
    """Lay the tier of the board's memory over the profile. A profile without tiers is returned as it is."""
    if not profile.tiers:
        return profile
    memory = model_memory_bytes(profile, board)
    tier = next((t for t in profile.tiers if t.memory_max_bytes is None or memory <= t.memory_max_bytes), None)
    notes = profile.notes
    if tier is None:
        tier = profile.tiers[-1]
        notes = (
            *notes,
            f"{format_bytes(memory)} is more than profile {profile.name} knows: its largest tier {tier.name} is used",
        )
    return replace(
        profile,
        wishes=replace(profile.wishes, **tier.values),  # type: ignore[arg-type]  # keys of SETTINGS
        tiers=(),
        tier=tier.name,
        origins=profile.origins | dict.fromkeys(tier.values, f"profile {profile.name}, tier {tier.name}"),
        notes=notes,
    )


def model_memory_bytes(profile: Profile, board: Board) -> int:
    """Return the memory that weights would live in: VRAM where discrete GPUs are used, else the board's."""
    vram = [gpu.memory_bytes or 0 for gpu in board.gpus if gpu.uuid]
    if board.unified_memory or profile.wishes.offload == "none" or not vram:
        return board.memory_bytes
    return max(vram) if profile.wishes.split_mode == "none" else sum(vram)
