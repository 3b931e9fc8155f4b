"""Build the error for a model that does not fit: the memory table and the three cheapest ways out. Pure."""

from __future__ import annotations

from edge.errors import DoesNotFitError
from edge.plan.kv import BLOCKS
from edge.plan.plan import DomainBudget, MemoryBudget
from edge.plan.rungs import Rung
from edge.profile.profile import Wishes
from edge.units import GIB, format_bytes

_PARTS = ("weights", "kv", "compute", "context", "prompt_cache", "page_cache")
_DESKTOP_BYTES = GIB  # an Orin Nano 8GB has 6.4 GB available headless, 5.2 GB with the desktop


def does_not_fit(model_id: str, rung: Rung, preset: Wishes) -> DoesNotFitError:
    """Return the error for `rung`, the smallest that the profile allows."""
    name, domain = min(rung.budget.items(), key=lambda item: item[1].headroom_bytes)
    missing = -domain.headroom_bytes
    file = rung.candidate.file
    message = (
        f"{model_id} ({file.name} {file.quant}) does not fit: even with {rung.settings.n_ctx} tokens of context "
        f"{format_bytes(missing)} of {name} memory are missing"
    )
    hint = "; or ".join(ways_out(rung, domain, preset)[:3])
    return DoesNotFitError(message, hint, table=table(rung.budget))


def ways_out(rung: Rung, domain: DomainBudget, preset: Wishes) -> list[str]:
    """Return what would help: first, cheapest first, what is enough by itself."""
    missing, settings = -domain.headroom_bytes, rung.settings
    ways: list[tuple[int, str]] = []
    if settings.cache_ram_bytes and domain.prompt_cache_bytes:
        ways.append((settings.cache_ram_bytes, "no prompt cache: --set cache_ram=0"))
    if preset.kv_type_min != "q4_0" and settings.flash_attention != "off" and domain.kv_bytes:
        now, least = (size / count for size, count in (BLOCKS[settings.kv_type_k], BLOCKS["q4_0"]))
        ways.append((int(domain.kv_bytes * (1 - least / now)), "a smaller KV cache: --set kv_type_min=q4_0"))
    slot = settings.n_ctx // settings.n_parallel
    if slot > 1024:
        ways.append((domain.kv_bytes * 3 // 4, f"a smaller context: --set n_ctx_min={slot // 4}"))
    reserve = domain.reserve_bytes // 2
    ways.append((reserve, f"a smaller reserve: --set reserve={reserve // 1024**2}MiB"))
    if missing <= _DESKTOP_BYTES:
        ways.append((missing, f"free {format_bytes(missing)}: end other programs, or boot without the desktop"))
    ways.append((missing, f"a model that is {format_bytes(missing)} smaller: `edgellm model list`"))
    enough = [text for saved, text in ways if saved >= missing]
    return enough + [f"{text} (saves {format_bytes(saved)})" for saved, text in ways if saved < missing]


def table(budget: MemoryBudget) -> str:
    """Return a text table: bytes by part, one column a domain."""
    rows = [["", *budget]]
    for part in (*_PARTS, "required", "reserve", "available", "headroom"):
        cells = [format_bytes(getattr(domain, f"{part}_bytes")) for domain in budget.values()]
        rows.append([part.replace("_", " "), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for label, *cells in rows:
        padded = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"  {label.ljust(widths[0])}  {padded}")
    return "\n".join(lines)
