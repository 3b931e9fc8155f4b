"""Choose the files to fetch from a repository's list, with the reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from edge.errors import DoesNotFitError, UnavailableError, UsageError
from edge.models.quant import QuantPreference, label_from_name, matching, public_name, select, shard_of
from edge.units import format_bytes

# Names of GGUF files that are no model: projectors, importance matrices, vocabularies, adapters.
_NOT_MODELS = ("mmproj", "imatrix", "-vocab", "lora", "adapter")
# A drafter predicts for a much larger model: the published ones have 1 to 6 layers beside 24 to 94.
_DRAFTER_LAYERS = 4


class RemoteFile(Struct, frozen=True):
    """One file of a repository. None: the hub does not state it."""

    path: str
    bytes: int | None = None
    sha256: str | None = None


class QuantOption(Struct, frozen=True):
    """One model of a repository: a file or a whole set of shards, in order."""

    quant: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes or 0 for file in self.files)

    @property
    def name(self) -> str:
        return public_name(self.files[0].path)


class Peek(Struct, frozen=True):
    """The first keys of a file. `n_layer` is 0 where it is not among them."""

    kind: str
    arch: str
    n_layer: int


class QuantChoice(Struct, frozen=True):
    """An option and the reason for it."""

    option: QuantOption
    because: str


def options(files: Iterable[RemoteFile]) -> list[QuantOption]:
    """Return the models among a repository's files, smallest first, without incomplete split sets."""
    sets: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    for file in files:
        lower = file.path.lower()
        if not lower.endswith(".gguf") or any(word in lower.rpartition("/")[2] for word in _NOT_MODELS):
            continue
        stem = file.path[: -len(".gguf")]
        number, count = shard_of(stem) or (1, 1)
        # The suffix of gguf-split (tools/gguf-split): two numbers of five digits.
        prefix = stem[: -len("-00001-of-00001")] if shard_of(stem) else stem
        sets.setdefault((prefix, count), {})[number] = file
    whole = [
        QuantOption(label_from_name(f"{prefix}.gguf"), tuple(members[number] for number in range(1, count + 1)))
        for (prefix, count), members in sets.items()
        if members.keys() == set(range(1, count + 1))
    ]
    return sorted(whole, key=lambda option: (option.bytes, option.files[0].path))


def by_model(found: Iterable[QuantOption]) -> dict[str, list[QuantOption]]:
    """Group the options by the name of their model: one repository may hold several, and drafters."""
    groups: dict[str, list[QuantOption]] = {}
    for option in found:
        groups.setdefault(option.name.lower(), []).append(option)
    return groups


def principal(
    groups: Mapping[str, list[QuantOption]], peeks: Mapping[str, Peek], repo: str, site: str = "hf"
) -> list[QuantOption]:
    """Return the options of the repository's model, without drafters, by the headers in `peeks`.

    Raises UsageError with the file names if several models remain: which one is meant is the user's choice.
    """
    most = max((peek.n_layer for peek in peeks.values() if peek.kind == "model"), default=0)
    models = {name: group for name, group in groups.items() if _is_model(peeks.get(name), most)} or dict(groups)
    title = _letters(re.sub(r"-gguf$", "", repo.rpartition("/")[2], flags=re.IGNORECASE))
    exact = [name for name in models if _letters(name) == title]
    # Publishers add words for variants (`-i1`, `-imat`): those are one model under its shortest name.
    shortest = min(models, key=len)
    family = [name for name in models if _letters(name).startswith(_letters(shortest))]
    if exact or len(family) == len(models):
        return [option for name in (exact or family) for option in models[name]]
    paths = sorted((group[0].files[0].path for group in models.values()), key=lambda path: (len(path), path))
    hint = f"name the file: {site}://{repo}/{paths[0]}"
    raise UsageError(f"{repo} holds {len(models)} models", hint, table="\n".join(f"  {path}" for path in paths))


def _is_model(peek: Peek | None, most_layers: int) -> bool:
    if peek is None:
        return True
    return peek.kind == "model" and not 0 < peek.n_layer * _DRAFTER_LAYERS <= most_layers


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def projectors(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    return [file for file in files if "mmproj" in file.path.lower() and file.path.lower().endswith(".gguf")]


def choose(
    found: Sequence[QuantOption],
    repo: str,
    wanted: str | None = None,
    room_bytes: int | None = None,
    preference: QuantPreference | None = None,
) -> QuantChoice:
    """Return the option that `wanted` names, else the preferred one that takes at most `room_bytes`.

    Raises UnavailableError with a table of the options, DoesNotFitError when even the smallest is too large.
    """
    if not found:
        raise UnavailableError(f"{repo} holds no GGUF model", "look for a repository whose name ends in -GGUF")
    if wanted:
        return _wanted(found, repo, wanted)
    best = select(found, preference, room_bytes)
    if best is None:
        least = found[0]
        raise DoesNotFitError(
            f"the smallest of {repo} is {least.quant} with {format_bytes(least.bytes)}, "
            f"{format_bytes(room_bytes or 0)} are free for weights",
            "take a smaller model: edgellm model list --catalogue",
            table=table(found),
        )
    if room_bytes is None:
        return QuantChoice(best, f"{best.quant}: the preferred one of this repository")
    room = f"{format_bytes(best.bytes)} of the {format_bytes(room_bytes)} available for weights"
    return QuantChoice(best, f"{best.quant}: the preferred one that fits, {room}")


def table(found: Sequence[QuantOption]) -> str:
    return "\n".join(
        f"  {option.quant:<12} {format_bytes(option.bytes):>10}  {option.files[0].path}" for option in found
    )


def _wanted(found: Sequence[QuantOption], repo: str, wanted: str) -> QuantChoice:
    same = matching(found, wanted)
    if not same:
        raise UnavailableError(f"{repo} has no {wanted}; it has", "name one of these with --quant", table=table(found))
    # Of equal labels the shortest file name: publishers add words for variants (`-imat`, `-MTP`).
    best = min(same, key=lambda option: (option.quant != same[0].quant, len(option.files[0].path)))
    return QuantChoice(best, f"{best.quant}: as requested")
