"""Decide which model is started, put to sleep or waited for, so that all residents fit into memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from msgspec import Struct, field
from msgspec.structs import replace

from edge.units import format_bytes

Bytes = Mapping[str, int]  # by memory domain: `unified`, `host` or a GPU's UUID

_EXACT_VICTIMS = 12  # 2^12 subsets are tried in about a millisecond; beyond that the cheapest first are taken


class Resident(Struct, frozen=True):
    """A model that holds memory, or is about to. `needs`: what its plan requires, without the reserve.

    Of one whose engine sleeps by itself `needs` is what it keeps; it is an Arrival too where requests wait for it.

    `loading` until its first READY; `leaving` while its engine ends; `open`: requests that it works on or that wait in
    its queue. `idle_s`: since its last request ended, or since it was READY. `load_s`: its last load, None if unknown.
    """

    id: str
    needs: Bytes
    loading: bool = False
    leaving: bool = False
    open: int = 0
    idle_s: float = 0.0
    load_s: float | None = None
    priority: int = 0
    pin: bool = False


class Arrival(Struct, frozen=True):
    """A model that requests wait for and whose weights are not loaded. `waited_s`: the oldest of these requests."""

    id: str
    needs: Bytes
    waited_s: float = 0.0
    priority: int = 0


class PoolPolicy(Struct, frozen=True):
    """Limits of the schedule.

    `turn_s`: for at most this long requests of a resident are served before those of a model that needs its memory;
    then its new requests wait, so that it becomes idle. `idle_s`: a model counts as idle only after this pause, in
    which the requests that waited for its READY reach it. `back_s`: how long the memory of an ended engine may take to
    be free again (the CUDA driver frees the memory of a dead process within a second).
    """

    turn_s: float = 10.0
    idle_s: float = 0.2
    back_s: float = 5.0


class PoolDecision(Struct, frozen=True):
    """What to do now. At most one of `start` and `refuse` is set.

    `sleep`: idle residents to put to sleep first. `hold`: residents whose new requests wait, so that they become idle.
    `again_s`: decide again after this time even if nothing happens.
    """

    start: str | None = None
    refuse: str | None = None
    sleep: tuple[str, ...] = ()
    hold: frozenset[str] = frozenset()
    again_s: float | None = None
    because: str = ""
    fits: bool = False  # it is started into memory that was measured to be free


def decide(
    residents: Sequence[Resident],
    arrivals: Sequence[Arrival],
    free: Bytes,
    whole: Bytes,
    policy: PoolPolicy | None = None,
    *,
    since_freed_s: float = float("inf"),
    evict: bool = True,
) -> PoolDecision:
    """Decide for the arrival of the highest priority that has waited longest.

    `free`: bytes that can be given away now, by domain, with the reserve and the claims of loading models taken off.
    `whole`: bytes that could be given away if no model of ours were resident. `since_freed_s`: since an engine of ours
    ended. `evict` False: start it into free memory or not at all. Later arrivals wait for the first one: a small model
    must not take the memory that a large one waits for.
    Where nothing of ours is resident the model is started in any case: its own ladder has rungs for less memory.
    """
    if not arrivals:
        return PoolDecision()
    policy = policy or PoolPolicy()
    # The id last: equal arrivals have to be decided in one order, or two runs of a history would differ.
    first = min(arrivals, key=lambda each: (-each.priority, -each.waited_s, each.id))
    own = [each for each in residents if each.id == first.id]
    first = replace(first, needs=_minus(first.needs, own))
    residents = [each for each in residents if each.id != first.id]
    if fits(free, first.needs):
        return PoolDecision(start=first.id, because="it fits", fits=True)
    if any(each.leaving for each in residents) or since_freed_s < policy.back_s:
        return PoolDecision(again_s=policy.idle_s, because="memory is being freed")
    if not residents:
        return PoolDecision(start=first.id, because="no other model is resident")
    if not evict:
        return PoolDecision(because="it does not fit beside the others")
    pinned = [each for each in residents if each.pin]
    if pinned and (missing := _missing(_minus(whole, pinned), first.needs)):
        names = ", ".join(each.id for each in pinned)
        return PoolDecision(refuse=first.id, because=f"it does not fit beside {names}, which is pinned: {missing}")
    idle = [each for each in residents if _may_leave(each) and each.idle_s >= policy.idle_s]
    victims = cheapest(idle, _lack(free, first.needs))
    if victims is None and idle and len(idle) == len(residents) - len(pinned):
        victims = tuple(each.id for each in idle)  # not enough, and nothing else can be done for it
    if victims is not None:
        return PoolDecision(sleep=victims, again_s=policy.idle_s, because=f"{first.id} needs their memory")
    return _wait_for_turn(residents, first, policy)


def cheapest(idle: Sequence[Resident], lack: Bytes) -> tuple[str, ...] | None:
    """Return the ids of the cheapest set of idle models whose memory covers `lack`; None where all of them do not.

    Cheap is, in this order: low priority, few seconds to load again, long idle, few models.
    """
    if not _enough(idle, lack):
        return None
    if len(idle) > _EXACT_VICTIMS:
        return _greedy(idle, lack)
    # Small sets first, but the cost decides: one slow model may cost more than two quick ones.
    sets = (each for size in range(1, len(idle) + 1) for each in combinations(idle, size))
    enough = (each for each in sets if _enough(each, lack))
    return tuple(victim.id for victim in min(enough, key=_cost))


def _wait_for_turn(residents: Sequence[Resident], first: Arrival, policy: PoolPolicy) -> PoolDecision:
    """Wait for busy models. After `turn_s` their new requests wait too; a loading model is waited for as it is."""
    left_s = policy.turn_s - first.waited_s
    busy = frozenset(each.id for each in residents if not each.pin and not each.leaving and not each.loading)
    if left_s <= 0:
        return PoolDecision(hold=busy, again_s=policy.idle_s, because=f"{first.id} has waited for its turn")
    # Without a request since less than `idle_s`: it counts as idle soon.
    pauses_s = [policy.idle_s - each.idle_s for each in residents if _may_leave(each) and each.idle_s < policy.idle_s]
    again_s = max(0.001, min([left_s, *pauses_s]))
    return PoolDecision(again_s=again_s, because="the models that hold its memory are busy")


def _may_leave(each: Resident) -> bool:
    return each.open == 0 and not (each.pin or each.loading or each.leaving)


def _cost(victims: Sequence[Resident]) -> tuple[int, float, float, int, tuple[str, ...]]:
    return (
        max(each.priority for each in victims),
        sum(_load_s(each) for each in victims),
        -min(each.idle_s for each in victims),
        len(victims),
        tuple(each.id for each in victims),
    )


def _load_s(each: Resident) -> float:
    """Estimate an unknown load at 1 GB/s, between an SD card (0.1) and NVMe (3)."""
    return each.load_s if each.load_s is not None else sum(each.needs.values()) / 1e9


def _greedy(idle: Sequence[Resident], lack: Bytes) -> tuple[str, ...]:
    taken: list[Resident] = []
    for each in sorted(idle, key=lambda one: _cost((one,))):
        if _enough(taken, lack):
            break
        if any(each.needs.get(domain, 0) for domain, bytes_ in lack.items() if bytes_ > 0):
            taken.append(each)
    return tuple(each.id for each in taken)


def fits(have: Bytes, needs: Bytes) -> bool:
    """Return whether `have` is enough. A domain that is not known cannot be judged and is not held against a model."""
    return all(domain not in have or have[domain] >= bytes_ for domain, bytes_ in needs.items() if bytes_ > 0)


def _missing(have: Bytes, needs: Bytes) -> str:
    """State needed and free bytes of each domain that is too small; "" where none is."""
    return ", ".join(
        f"{format_bytes(bytes_)} of {domain} memory are needed and {format_bytes(max(0, have[domain]))} free"
        for domain, bytes_ in needs.items()
        if not fits(have, {domain: bytes_})
    )


def _enough(victims: Iterable[Resident], lack: Bytes) -> bool:
    freed = _sum(victims)
    return all(freed.get(domain, 0) >= bytes_ for domain, bytes_ in lack.items())


def _lack(free: Bytes, needs: Bytes) -> dict[str, int]:
    return {d: bytes_ - free[d] for d, bytes_ in needs.items() if d in free and bytes_ > free[d]}


def _sum(residents: Iterable[Resident]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in residents:
        for domain, bytes_ in each.needs.items():
            total[domain] = total.get(domain, 0) + bytes_
    return total


def _minus(whole: Bytes, residents: Iterable[Resident]) -> dict[str, int]:
    taken = _sum(residents)
    return {domain: bytes_ - taken.get(domain, 0) for domain, bytes_ in whole.items()}


class Claims(Struct):
    """Memory that loading models will take: counted from their admission, not from the first page they touch.

    What a loading model has touched is missing from the measured memory too, so that its claim would count twice: the
    free memory at the time of the claim, less the claims, bounds what can be given away, and so does the measurement.
    A model that crashed and loads again claims anew.
    """

    before: dict[str, int] = field(default_factory=dict)  # free memory when the first of these claims was made
    needs: dict[str, Bytes] = field(default_factory=dict)
    present: dict[str, Bytes] = field(default_factory=dict)

    def left(self, residents: Iterable[Resident], measured: Bytes) -> dict[str, int]:
        """Follow the residents, and return what can still be given away of the measured free memory, by domain."""
        now = {each.id: each for each in residents}
        gone = _sum(
            Resident(name, needs)
            for name, needs in self.present.items()
            if name not in now and name not in self.needs  # a claim was never taken off `before`
        )
        loaded = _sum(now[name] for name in self.needs if name in now and not now[name].loading)
        self.before = {
            domain: bytes_ + gone.get(domain, 0) - loaded.get(domain, 0) for domain, bytes_ in self.before.items()
        }
        self.present = {each.id: each.needs for each in now.values()}
        self.needs = {name: needs for name, needs in self.needs.items() if name in now and now[name].loading}
        for each in now.values():
            if each.loading and each.id not in self.needs:
                if not self.needs:
                    self.before = dict(measured)
                self.needs[each.id] = each.needs
        if not self.needs:
            return dict(measured)
        taken = _sum(Resident(name, needs) for name, needs in self.needs.items())
        return {
            domain: min(bytes_, self.before.get(domain, bytes_) - taken.get(domain, 0))
            for domain, bytes_ in measured.items()
        }
