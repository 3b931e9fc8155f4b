"""Choose the quantization to fetch from a repository's files, with the reason. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edge.errors import DoesNotFitError, UnavailableError
from edge.model.quant import QuantPreference, label_from_name, matching, public_name, select, shard_of
from edge.profile.reserve import reserve_bytes
from edge.units import GIB, format_bytes

# A KV cache of some thousand tokens, compute buffers, the CUDA context.
_ALLOWANCE_BYTES = GIB
# Names of GGUF files that are no model: projectors, importance matrices, vocabularies, adapters.
_NOT_MODELS = ("mmproj", "imatrix", "-vocab", "lora", "adapter")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository. None: the hub does not tell."""

    path: str
    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """One model of a repository: a file or a whole set of shards, in order."""

    quant: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes or 0 for file in self.files)

    @property
    def name(self) -> str:
        return public_name(self.files[0].path)


@dataclass(frozen=True, slots=True)
class Choice:
    """An option and the reason for it."""

    option: Option
    because: str


def options(files: Iterable[RemoteFile]) -> list[Option]:
    """Return the models among a repository's files, smallest first, without incomplete split sets."""
    sets: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    for file in files:
        lower = file.path.lower()
        if not lower.endswith(".gguf") or any(word in lower.rpartition("/")[2] for word in _NOT_MODELS):
            continue
        stem = file.path[: -len(".gguf")]
        number, count = shard_of(stem) or (1, 1)
        prefix = stem[: -len("-00001-of-00001")] if shard_of(stem) else stem
        sets.setdefault((prefix, count), {})[number] = file
    whole = [
        Option(label_from_name(f"{prefix}.gguf"), tuple(members[number] for number in range(1, count + 1)))
        for (prefix, count), members in sets.items()
        if members.keys() == set(range(1, count + 1))
    ]
    return sorted(whole, key=lambda option: (option.bytes, option.files[0].path))


def projectors(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    return [file for file in files if "mmproj" in file.path.lower() and file.path.lower().endswith(".gguf")]


def choose(
    found: Sequence[Option],
    repo: str,
    wanted: str | None = None,
    room_bytes: int | None = None,
    preference: QuantPreference | None = None,
) -> Choice:
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
        return Choice(best, f"{best.quant}: the preferred one of this repository")
    room = f"{format_bytes(best.bytes)} of the {format_bytes(room_bytes)} available for weights"
    return Choice(best, f"{best.quant}: the preferred one that fits, {room}")


def room_bytes(total: Mapping[str, int], available: Mapping[str, int], reserve: str) -> int:
    """Return the bytes available for weights in unified memory, else in the largest GPU, else in host memory.

    `reserve` is the configured formula. An allowance stands for KV cache and buffers, which only the header tells.
    """
    gpus = [domain for domain in available if domain not in ("unified", "host")]
    domain = "unified" if "unified" in available else max(gpus, key=lambda gpu: available[gpu], default="host")
    return max(0, available[domain] - reserve_bytes(reserve, total[domain]) - _ALLOWANCE_BYTES)


def table(found: Sequence[Option]) -> str:
    return "\n".join(
        f"  {option.quant:<12} {format_bytes(option.bytes):>10}  {option.files[0].path}" for option in found
    )


def _wanted(found: Sequence[Option], repo: str, wanted: str) -> Choice:
    same = matching(found, wanted)
    if not same:
        raise UnavailableError(f"{repo} has no {wanted}; it has", "name one of these with --quant", table=table(found))
    # Of equal labels the shortest file name: publishers add words for variants (`-imat`, `-MTP`).
    best = min(same, key=lambda option: (option.quant != same[0].quant, len(option.files[0].path)))
    return Choice(best, f"{best.quant}: as requested")
