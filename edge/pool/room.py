"""Derive from the measured memory what models hold, and what another one can be given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge.board.memory import MemorySnapshot
from edge.linux.procfs import read_family_usage
from edge.pool.schedule import Resident
from edge.supervisor.supervisor import Supervisor


def room(
    snapshot: MemorySnapshot,
    residents: Sequence[Resident],
    supervisors: Sequence[Supervisor],
    more: Sequence[Supervisor],
    limit: int | None,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return what is free for another model now, and what would be without residents, by domain.

    The claims of loading models are not taken off yet. `more`: second engines, whose reserve counts too. `limit`: bytes
    of all models together in host memory.
    """
    loading = {each.id for each in residents if each.loading}
    present = {each.id for each in residents} - loading
    loaded = [each for each in supervisors if each.model_id in present]
    free, whole = {}, {}
    for domain, available in snapshot.available_bytes.items():
        held = sum(each.needs.get(domain, 0) for each in residents)
        rest = available - reserve_bytes((*supervisors, *more), domain) - mapped_bytes(loaded, domain)
        free[domain], whole[domain] = rest, rest + held
        if limit is not None and domain in ("unified", "host"):
            free[domain], whole[domain] = min(rest, limit - held), min(rest + held, limit)
    return free, whole


def reserve_bytes(supervisors: Iterable[Supervisor], domain: str) -> int:
    """Return what the plans leave to other processes: the largest reserve of them."""
    plans = (each.plan for each in supervisors)
    return max((plan.budget[domain].reserve_bytes for plan in plans if domain in plan.budget), default=0)


def held_bytes(supervisor: Supervisor) -> dict[str, int]:
    """Return what a model holds as long as it has an engine, by memory domain."""
    return kept_bytes(supervisor) if supervisor.asleep else supervisor.needs_bytes


def kept_bytes(supervisor: Supervisor) -> dict[str, int]:
    """Return what an engine that sleeps by itself keeps of host memory; that of a discrete GPU is not known here."""
    usage = read_family_usage(supervisor.watch.child.pid) if supervisor.watch is not None else None
    domain = next((name for name in ("unified", "host") if name in supervisor.plan.budget), None)
    return {domain: usage.rss_bytes} if usage is not None and domain is not None else {}


def mapped_bytes(loaded: Iterable[Supervisor], domain: str) -> int:
    """Return the bytes of mapped weights, which MemAvailable counts as free: they are page cache that must stay.

    On unified memory layers on the GPU are copied into CUDA's own memory, which MemAvailable lacks already.
    """
    total = 0
    for supervisor in loaded:
        plan = supervisor.plan
        if supervisor.asleep or domain not in plan.budget or plan.settings.load_mode != "mmap":
            continue
        if domain == "host" or (domain == "unified" and plan.settings.n_gpu_layers == 0):
            file = plan.model or supervisor.model.model  # its projector is read into memory of its own
            total += min(plan.budget[domain].weights_bytes, file.bytes)
    return total
