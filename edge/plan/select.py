"""Which model, which quantization, which context: from what is here and what the catalogue knows. Pure.

Wanted is the profile's quantization. A smaller one of the same model comes before a context under the profile's
smallest, then a smaller model; larger ones only when there is room and the profile prefers quality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edge.errors import DoesNotFitError
from edge.model.quant import QuantPreference, bits, order, plain
from edge.plan.offer import Offer
from edge.plan.refusal import does_not_fit
from edge.plan.role import role_of
from edge.plan.rungs import Rung, climb
from edge.plan.situation import Situation
from edge.plan.subject import Subject
from edge.profile.profile import Wishes

# Part of the memory's bandwidth that llama.cpp reaches when it writes tokens one by one.
_REACHED = 0.6
# A model that is chosen by itself leaves this part of the memory to the rest of the machine.
_REST = 0.3
_CPU_BYTES_S = 30e9  # assumed for a CPU whose memory bandwidth is unknown: two channels of DDR4 give 40

Load = Callable[[Offer], Subject | None]


@dataclass(frozen=True, slots=True)
class Selection:
    """`smaller` are files that are here, for later rungs: other quantizations, and where it is tight another model.

    `tokens_s` is what the memory's bandwidth allows.
    """

    offer: Offer
    subject: Subject
    because: str
    smaller: tuple[Subject, ...] = ()
    tokens_s: float | None = None
    better: Offer | None = None  # not here, but would fit too


def select(offers: Sequence[Offer], wishes: Wishes, place: Situation, load: Load) -> Selection:
    """What is here first, then the catalogue. `load` reads a header; None is a file that cannot be used.

    Raises DoesNotFitError when nothing fits.
    """
    here = _by_model(offer for offer in offers if offer.path)
    there = _by_model(offer for offer in offers if not offer.path)
    last: Rung | None = None
    for groups, strict in ((here, True), (here, False), (there, True), (there, False)):
        for index, group in enumerate(groups):
            chosen, rung = pick(group, wishes, place, load, strict=strict)
            last = rung or last
            if chosen is None:
                continue
            offer, subject = chosen
            because, speed = _because(offer, group, wishes), tokens_s(offer, wishes, place)
            if not offer.path:
                return Selection(offer, subject, because, tokens_s=speed)
            smaller = smaller_quants(offer, group, load)
            if not climb(wishes, [subject], "chat", place)[0].fits:  # tight: another model may be needed
                smaller += _smaller_model(groups[index + 1 :], load)
            better = _better(offer, there, wishes, place, load)
            return Selection(offer, subject, because, tuple(smaller), speed, better)
    if last is None:
        raise DoesNotFitError("no model is small enough for this machine", "name one with -m to see what is missing")
    raise does_not_fit(last.subject.file.name, last, wishes)


def pick(
    group: Sequence[Offer], wishes: Wishes, place: Situation, load: Load, *, strict: bool = False
) -> tuple[tuple[Offer, Subject] | None, Rung | None]:
    """The quantization of one model. → what fits, or None; and the smallest way to run that was looked at.

    Only models that chat. `strict`: with a chat template, fast enough, and leaving room to the rest of the machine.
    """
    last: Rung | None = None
    for offer in order(group, QuantPreference(wishes.quant, wishes.prefer)):
        if offer.bytes > _room(wishes, place) or (strict and not _comfortable(offer, wishes, place)):
            continue
        subject = load(offer)
        if subject is None or role_of(subject.file.meta, "chat") != "chat":
            continue
        if strict and not subject.file.meta.chat_template:
            continue
        rungs = climb(wishes, [subject], "chat", place)
        last = rungs[-1]
        larger = wishes.prefer == "quality" and bits(offer.quant) > bits(wishes.quant)
        if rungs[0].fits if larger else any(_whole(rung) for rung in rungs):
            return (offer, subject), last
    return None, last


def smaller_quants(chosen: Offer, group: Iterable[Offer], load: Load, most: int = 2) -> list[Subject]:
    """Files of the same model that are here and smaller, largest first."""
    files = sorted((o for o in group if o.path and o.bytes < chosen.bytes), key=lambda offer: -offer.bytes)
    loaded = (load(offer) for offer in files[:most])
    return [subject for subject in loaded if subject is not None]


def tokens_s(offer: Offer, wishes: Wishes, place: Situation) -> float | None:
    """Tokens a second that the memory's bandwidth allows; None where it is unknown."""
    bandwidth = place.board.bandwidth_bytes_s
    if bandwidth is None and (wishes.offload == "none" or not place.gpus):
        bandwidth = _CPU_BYTES_S
    return None if bandwidth is None else _REACHED * bandwidth / max(1.0, offer.bytes * offer.active)


def _comfortable(offer: Offer, wishes: Wishes, place: Situation) -> bool:
    speed = tokens_s(offer, wishes, place)
    fast = speed is None or speed >= wishes.min_tokens_s
    shared = not place.gpus or not place.discrete or wishes.offload == "none"
    return fast and (not shared or offer.bytes <= place.board.memory_bytes * (1 - _REST))


def _whole(rung: Rung) -> bool:
    """It fits without leaving layers on the host: a model that only fits by halves is not chosen by itself."""
    return rung.fits and not 0 < rung.settings.n_gpu_layers <= rung.subject.file.meta.n_layer


def _room(wishes: Wishes, place: Situation) -> int:
    names = place.gpus if place.gpus and wishes.offload == "full" else (place.host,)
    return sum(place.available_bytes[name] - place.reserve_bytes[name] for name in names)


def _by_model(offers: Iterable[Offer]) -> list[list[Offer]]:
    """Best first: by rank, then by size."""
    groups: dict[str, list[Offer]] = {}
    for offer in offers:
        groups.setdefault(offer.name.lower(), []).append(offer)
    return sorted(groups.values(), key=lambda group: (group[0].rank, -max(offer.bytes for offer in group)))


def _smaller_model(groups: Sequence[Sequence[Offer]], load: Load) -> list[Subject]:
    """The next model that is here, in its smallest file."""
    for group in groups:
        subject = load(min(group, key=lambda offer: offer.bytes))
        if subject is not None:
            return [subject]
    return []


def _better(
    chosen: Offer, there: Sequence[Sequence[Offer]], wishes: Wishes, place: Situation, load: Load
) -> Offer | None:
    """A better ranked model of the catalogue that would fit."""
    for group in there:
        if group[0].rank >= chosen.rank or group[0].name.lower() == chosen.name.lower():
            return None
        found, _rung = pick(group, wishes, place, load, strict=True)
        if found is not None:
            return found[0]
    return None


def _because(offer: Offer, group: Sequence[Offer], wishes: Wishes) -> str:
    where = "the best that is here and fits" if offer.path else "the best of the catalogue that fits"
    there = any(plain(one.quant) == plain(wishes.quant) for one in group)
    if plain(offer.quant) == plain(wishes.quant):
        return f"{where}, in the wanted {wishes.quant}"
    if bits(offer.quant) > bits(wishes.quant):
        return f"{where}; {offer.quant}, because {'there is room' if there else f'there is no {wishes.quant} of it'}"
    return f"{where}; {offer.quant}, because {wishes.quant} {'does not fit' if there else 'of it is not known'}"
