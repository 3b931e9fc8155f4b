"""Nothing fits: the table of what is missing, and the three cheapest ways out. Pure."""

from __future__ import annotations

from edge.errors import DoesNotFitError
from edge.plan.plan import DomainBudget, MemoryBudget, Settings
from edge.plan.situation import Situation
from edge.profile.profile import Wishes
from edge.units import format_bytes

_PARTS = ("weights", "kv", "compute", "context", "prompt_cache", "page_cache")


def does_not_fit(
    model_id: str, settings: Settings, budget: MemoryBudget, wishes: Wishes, place: Situation, others: tuple[str, ...]
) -> DoesNotFitError:
    """About the smallest way to run that the profile allows."""
    name, domain = min(budget.items(), key=lambda item: item[1].headroom_bytes)
    missing = -domain.headroom_bytes
    beside = f" beside {', '.join(others)}" if others else ""
    message = f"{model_id} does not fit{beside}: {format_bytes(missing)} of {name} memory are missing"
    hint = "; or ".join(ways_out(settings, domain, wishes, missing, others)[:3])
    return DoesNotFitError(message, hint, table=table(budget))


def table(budget: MemoryBudget) -> str:
    """Bytes by part, one column a domain."""
    rows = [("", *budget)]
    for part in _PARTS:
        rows.append((part.replace("_", " "), *(format_bytes(getattr(d, f"{part}_bytes")) for d in budget.values())))
    for part in ("required", "reserve", "available", "headroom"):
        rows.append((part, *(format_bytes(getattr(d, f"{part}_bytes")) for d in budget.values())))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    )


def ways_out(
    settings: Settings, domain: DomainBudget, wishes: Wishes, missing: int, others: tuple[str, ...]
) -> list[str]:
    """What would help, cheapest for the user first; ways that are enough by themselves come first."""
    ways: list[tuple[int, str]] = []
    if settings.cache_ram_bytes:
        ways.append((domain.prompt_cache_bytes, "no prompt cache: --set cache_ram=0"))
    if settings.kv_type_k not in ("q4_0",) and domain.kv_bytes:
        ways.append((domain.kv_bytes * 15 // 32, "a smaller KV type: --set kv_type_min=q4_0"))
    if settings.n_ctx > 2048:
        quarter = settings.n_ctx // settings.n_parallel // 4
        ways.append(
            (
                domain.kv_bytes * 3 // 4,
                f"a smaller context: --set n_ctx_min={quarter}",
            )
        )
    ways.append((domain.weights_bytes // 3, "a smaller quantization or model: `edgellm model list`"))
    if others:
        ways.append((missing, f"do not serve {others[-1]} at the same time"))
    ways.append((missing, f"end programs that hold {format_bytes(missing)} (a desktop holds about 1 GiB)"))
    enough = [text for saved, text in ways if saved >= missing]
    return enough + [f"{text} (saves {format_bytes(saved)})" for saved, text in ways if saved < missing]
