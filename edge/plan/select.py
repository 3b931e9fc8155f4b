"""Select a model and its quantization from the store and the catalogue when the configuration names none. Pure.

The preset's quantization comes first. A smaller one of the same model comes before a smaller context, that before a
smaller model. Larger quantizations are taken when there is room and the preset prefers quality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from edge.config.values import Preset
from edge.errors import DoesNotFitError
from edge.models.quant import QuantPreference, bits, order, plain
from edge.plan.candidates import DownloadCandidate
from edge.plan.inputs import Candidate, PlanInputs, role_of
from edge.plan.ladder import Rung, rungs_at, walk_ladder
from edge.plan.ladder_steps import context_levels
from edge.plan.reasons import does_not_fit

# Part of the memory's bandwidth that llama.cpp reaches when it generates token by token.
_REACHED = 0.6
# What a token costs beside its weights (kernel launches, sampling), in bytes of the same bandwidth: wider memory comes
# with a faster GPU. Both figures are fitted to published llama.cpp runs on Orin Nano, Orin NX, AGX Orin and Thor
# (tests/plan/test_plan_select.py).
_EACH_TOKEN_BYTES = 370_000_000
# A selected model leaves this share of a unified memory to desktop, camera pipeline and page cache.
_REST = 0.3
# A prompt is computed many tokens at once, so cores bound it and not memory: bytes of weights times tokens a second
# that one core gets through, by its widest vectors. Measured on an EPYC with AVX-512 (0.1 GB, Q4_1, one thread: 125
# tokens/s); two thirds are taken for AVX2, whose cores run at higher clocks. Cores of other kinds are not judged.
_CORE_PROMPT_BYTES_S = {"avx512f": 12e9, "avx2": 8e9}
# Tokens read for each one written: a question with its history is several times as long as its answer.
_PROMPT_RATIO = 4
_CPU_BYTES_S = 30e9  # assumed for a CPU whose memory bandwidth is unknown: two channels of DDR4 give 40

_ANY_CONTEXT = 1 << 24  # the limit of the key n_ctx
_NEAREST_TRIED = 3  # of the smallest files: their headers are read only for the error

Load = Callable[[DownloadCandidate], Candidate | None]


class ModelSelection(Struct, frozen=True):
    """A selected model. `smaller`: files in the store for later rungs, another model where memory is tight.

    `tokens_s`: what the memory's bandwidth allows; `prompt_tokens_s`: what the cores allow, None on a GPU. `better`:
    not downloaded, but would fit too.
    """

    offer: DownloadCandidate
    candidate: Candidate
    because: str
    smaller: tuple[Candidate, ...] = ()
    tokens_s: float | None = None
    prompt_tokens_s: float | None = None
    better: DownloadCandidate | None = None


def select(offers: Sequence[DownloadCandidate], preset: Preset, inputs: PlanInputs, load: Load) -> ModelSelection:
    """Select from the store, then from the catalogue. `load` reads a header; None is a file that cannot be used.

    Raises DoesNotFitError with the nearest candidate when nothing fits.
    """
    here = _by_model(offer for offer in offers if offer.path)
    there = _by_model(offer for offer in offers if not offer.path)
    if not any(_fast(offer, preset, inputs) for group in there for offer in group):
        there.sort(key=lambda group: min(offer.bytes * offer.active for offer in group))
    for groups, strict in ((here, True), (here, False), (there, True), (there, False)):
        for index, group in enumerate(groups):
            chosen = pick(group, preset, inputs, load, strict=strict)
            if chosen is None:
                continue
            offer, candidate = chosen
            because, speed = _because(offer, group, preset, inputs), tokens_s(offer, preset, inputs)
            reads = prompt_tokens_s(offer, preset, inputs)
            if not offer.path:
                return ModelSelection(offer, candidate, because, tokens_s=speed, prompt_tokens_s=reads)
            smaller = smaller_quants(offer, group, load)
            if not walk_ladder(preset, [candidate], "chat", inputs)[0].fits:  # tight: another model may be needed
                smaller += _smaller_model(groups[index + 1 :], load)
            better = _better(offer, there, preset, inputs, load)
            return ModelSelection(offer, candidate, because, tuple(smaller), speed, reads, better)
    raise _nothing_fits(offers, preset, inputs, load)


def pick(
    group: Sequence[DownloadCandidate], preset: Preset, inputs: PlanInputs, load: Load, *, strict: bool = False
) -> tuple[DownloadCandidate, Candidate] | None:
    """Return the quantization of one chat model that fits with the largest context, or None.

    `strict`: with a chat template, fast enough, and with room left for the rest of the machine.
    """
    levels = context_levels(preset, _ANY_CONTEXT) if preset.n_ctx else [0]
    found = (_pick_at(context, group, preset, inputs, load, strict=strict) for context in levels)
    return next((chosen for chosen in found if chosen is not None), None)


def _pick_at(
    context: int, group: Sequence[DownloadCandidate], preset: Preset, inputs: PlanInputs, load: Load, *, strict: bool
) -> tuple[DownloadCandidate, Candidate] | None:
    """Pick with `context` tokens a slot; 0 stands for what the model was trained for, or less."""
    for offer in order(group, QuantPreference(preset.quant, preset.prefer)):
        if offer.bytes > _room(preset, inputs) or (strict and not _comfortable(offer, preset, inputs)):
            continue
        candidate = load(offer)
        if candidate is None or role_of(candidate.file.meta, "chat") != "chat":
            continue
        if strict and not candidate.file.meta.chat_template:
            continue
        if context:
            rungs = list(rungs_at(preset, candidate, "chat", inputs, context))
        else:
            rungs = walk_ladder(preset, [candidate], "chat", inputs)
        larger = preset.prefer == "quality" and bits(offer.quant) > bits(preset.quant)
        if rungs[0].fits if larger else any(_whole(rung) for rung in rungs):
            return offer, candidate
    return None


def _nothing_fits(
    offers: Sequence[DownloadCandidate], preset: Preset, inputs: PlanInputs, load: Load
) -> DoesNotFitError:
    """Build the error about the smallest offers: one of them lacks least."""
    smallest = sorted(offers, key=lambda offer: offer.bytes)[:_NEAREST_TRIED]
    loaded = [candidate for offer in smallest if (candidate := load(offer)) is not None]
    rungs = [rung for candidate in loaded for rung in walk_ladder(preset, [candidate], "chat", inputs)]
    if not rungs:
        return DoesNotFitError("no model is small enough for this machine", "name one with -m to see what is missing")
    nearest = max(rungs, key=lambda rung: rung.headroom_bytes)
    return does_not_fit(nearest.candidate.file.name, nearest, preset)


def smaller_quants(chosen: DownloadCandidate, group: Iterable[DownloadCandidate], load: Load) -> list[Candidate]:
    """Return the next two smaller files of the same model in the store, largest first."""
    files = sorted((o for o in group if o.path and o.bytes < chosen.bytes), key=lambda offer: -offer.bytes)
    loaded = (load(offer) for offer in files[:2])
    return [candidate for candidate in loaded if candidate is not None]


def tokens_s(offer: DownloadCandidate, preset: Preset, inputs: PlanInputs) -> float | None:
    """Return the tokens a second that the memory's bandwidth allows; None where it is unknown."""
    bandwidth = inputs.board.bandwidth_bytes_s
    if bandwidth is None and (preset.offload == "none" or not inputs.gpus):
        bandwidth = _CPU_BYTES_S
    return None if bandwidth is None else _REACHED * bandwidth / (offer.bytes * offer.active + _EACH_TOKEN_BYTES)


def prompt_tokens_s(offer: DownloadCandidate, preset: Preset, inputs: PlanInputs) -> float | None:
    """Return the tokens of a prompt that the CPU reads a second; None on a GPU, and for cores of unknown speed."""
    if inputs.gpus and preset.offload != "none":
        return None
    cpu = inputs.board.cpu
    core = next((rate for feature, rate in _CORE_PROMPT_BYTES_S.items() if feature in cpu.isa), None)
    cores = cpu.usable_cores or cpu.physical_cores
    # A copy that was cut off at once has no bytes; its header is refused when it is read.
    return None if core is None else cores * core / max(1.0, offer.bytes * offer.active)


def _fast(offer: DownloadCandidate, preset: Preset, inputs: PlanInputs) -> bool:
    """Return whether it writes, and reads prompts, as fast as the preset asks for; True where that is unknown."""
    speed, prompt = tokens_s(offer, preset, inputs), prompt_tokens_s(offer, preset, inputs)
    writes = speed is None or speed >= preset.min_tokens_s
    return writes and (prompt is None or prompt >= _PROMPT_RATIO * preset.min_tokens_s)


def _comfortable(offer: DownloadCandidate, preset: Preset, inputs: PlanInputs) -> bool:
    shared = not inputs.gpus or not inputs.discrete or preset.offload == "none"
    roomy = not shared or offer.bytes <= inputs.board.memory_bytes * (1 - _REST)
    return roomy and _fast(offer, preset, inputs)


def _whole(rung: Rung) -> bool:
    """Return whether it fits without leaving layers on the host: a model that does not is never selected."""
    return rung.fits and not 0 < rung.settings.n_gpu_layers <= rung.candidate.file.meta.n_layer


def _room(preset: Preset, inputs: PlanInputs) -> int:
    names = inputs.gpus if inputs.gpus and preset.offload == "full" else (inputs.host,)
    rooms = [inputs.room_bytes(name) for name in names]
    return max(rooms) if preset.split_mode == "none" else sum(rooms)


def _by_model(offers: Iterable[DownloadCandidate]) -> list[list[DownloadCandidate]]:
    """Group by model, best first: by rank, then by size."""
    groups: dict[str, list[DownloadCandidate]] = {}
    for offer in offers:
        groups.setdefault(offer.name.lower(), []).append(offer)
    return sorted(groups.values(), key=lambda group: (group[0].rank, -max(offer.bytes for offer in group)))


def _smaller_model(groups: Sequence[Sequence[DownloadCandidate]], load: Load) -> list[Candidate]:
    """Return the next model of the store, in its smallest file."""
    for group in groups:
        candidate = load(min(group, key=lambda offer: offer.bytes))
        if candidate is not None:
            return [candidate]
    return []


def _better(
    chosen: DownloadCandidate,
    there: Sequence[Sequence[DownloadCandidate]],
    preset: Preset,
    inputs: PlanInputs,
    load: Load,
) -> DownloadCandidate | None:
    """Return a better ranked model of the catalogue that would fit."""
    for group in there:
        if group[0].rank >= chosen.rank or group[0].name.lower() == chosen.name.lower():
            return None
        found = pick(group, preset, inputs, load, strict=True)
        if found is not None:
            return found[0]
    return None


def _because(offer: DownloadCandidate, group: Sequence[DownloadCandidate], preset: Preset, inputs: PlanInputs) -> str:
    where = "the best in the store that fits" if offer.path else "the best of the catalogue that fits"
    wanted = next((one for one in group if plain(one.quant) == plain(preset.quant)), None)
    if plain(offer.quant) == plain(preset.quant):
        return f"{where}, in the wanted {preset.quant}"
    if bits(offer.quant) > bits(preset.quant):
        return f"{where}; {offer.quant}, because {'there is room' if wanted else f'there is no {preset.quant} of it'}"
    slow = wanted is not None and not _fast(wanted, preset, inputs)
    why = "would be slow here" if slow else "does not fit" if wanted else "of it is not known"
    return f"{where}; {offer.quant}, because {preset.quant} {why}"
