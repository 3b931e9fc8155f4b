"""List a Hugging Face repository with huggingface_hub (endpoint, token, revisions) and choose the files to fetch.

The library's own download starts again after a kill, so transfer.py fetches the bytes and checks them against the
hub's SHA-256.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from edge.board.memory import reserve_bytes
from edge.errors import DoesNotFitError, EdgeError, UnavailableError
from edge.models.job import ResumableError
from edge.models.quant import QuantPreference, label_from_name, matching, public_name, select, shard_of
from edge.models.source import HubSource
from edge.models.transfer import RemoteInfo
from edge.units import GIB, format_bytes

# Choose the quantization to fetch from a repository's files, with the reason. Pure.

# A KV cache of some thousand tokens, compute buffers, the CUDA context.
_ALLOWANCE_BYTES = GIB
# Names of GGUF files that are no model: projectors, importance matrices, vocabularies, adapters.
_NOT_MODELS = ("mmproj", "imatrix", "-vocab", "lora", "adapter")


class RemoteFile(Struct, frozen=True):
    """One file of a repository. None: the hub does not tell."""

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
        prefix = stem[: -len("-00001-of-00001")] if shard_of(stem) else stem
        sets.setdefault((prefix, count), {})[number] = file
    whole = [
        QuantOption(label_from_name(f"{prefix}.gguf"), tuple(members[number] for number in range(1, count + 1)))
        for (prefix, count), members in sets.items()
        if members.keys() == set(range(1, count + 1))
    ]
    return sorted(whole, key=lambda option: (option.bytes, option.files[0].path))


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


def room_bytes(total: Mapping[str, int], available: Mapping[str, int], reserve: str) -> int:
    """Return the bytes available for weights in unified memory, else in the largest GPU, else in host memory.

    `reserve` is the configured formula. An allowance stands for KV cache and buffers, which only the header tells.
    """
    gpus = [domain for domain in available if domain not in ("unified", "host")]
    domain = "unified" if "unified" in available else max(gpus, key=lambda gpu: available[gpu], default="host")
    return max(0, available[domain] - reserve_bytes(reserve, total[domain]) - _ALLOWANCE_BYTES)


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


_NETWORK_HINT = "look at the network, HF_ENDPOINT and the proxy settings, then run the same command again"


class Listing(Struct, frozen=True):
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]


class HubPlan(Struct, frozen=True):
    """The files to fetch. `source` names the first file; `commit` pins it."""

    source: HubSource
    commit: str
    choice: QuantChoice
    remotes: tuple[RemoteInfo, ...]


def list_repo(wanted: HubSource, endpoint: str | None = None, sleep: Callable[[float], None] = time.sleep) -> Listing:
    """List a repository. Raises UnavailableError (absent or closed) or Resumable (network)."""
    api = _library().HfApi(endpoint=endpoint, library_name="edgellm")
    pauses = [1.0, 4.0]
    while True:
        try:
            info = api.model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=30)
            break
        except Exception as error:  # the library's exceptions changed their parents between its versions
            failure = _translated(error, wanted)
            if not pauses or not isinstance(failure, ResumableError):
                raise failure from error
            sleep(pauses.pop(0))
    files = tuple(_file(sibling) for sibling in info.siblings or ())
    return Listing(wanted.repo, info.sha or wanted.revision or "main", files)


def plan(
    wanted: HubSource,
    quant: str | None = None,
    room_bytes: int | None = None,
    projector: str | None = None,
    *,
    preference: QuantPreference | None = None,
    endpoint: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> HubPlan:
    """Choose the files and their URLs. `projector` is a file name, or `*` for any."""
    listing = list_repo(wanted, endpoint, sleep)
    choice = _choice(wanted, listing, quant or wanted.quant, room_bytes, preference)
    files = [*choice.option.files]
    if projector:
        files.append(_projector(listing, projector))
    hub = _library()
    headers = {key: value for key, value in hub.utils.build_hf_headers().items() if key.lower() == "authorization"}
    remotes = []
    for file in files:
        shown = f"hf://{wanted.repo}/{file.path}"
        url = hub.hf_hub_url(wanted.repo, file.path, revision=listing.commit, endpoint=endpoint)
        remotes.append(RemoteInfo(url, file.path.rpartition("/")[2], shown, file.bytes, file.sha256, headers))
    first = HubSource(wanted.repo, choice.option.files[0].path, None, listing.commit)
    return HubPlan(first, listing.commit, choice, tuple(remotes))


def _choice(
    wanted: HubSource,
    listing: Listing,
    quant: str | None,
    room_bytes: int | None,
    preference: QuantPreference | None,
) -> QuantChoice:
    if wanted.file is None:
        return choose(options(listing.files), wanted.repo, quant, room_bytes, preference)
    found = [option for option in options(listing.files) if any(file.path == wanted.file for file in option.files)]
    if not found:
        there = ", ".join(file.path for file in listing.files if file.path.lower().endswith(".gguf")) or "no GGUF file"
        raise UnavailableError(f"{wanted.repo} has no model {wanted.file}", f"it has {there[:400]}")
    return QuantChoice(found[0], f"{found[0].quant}: as requested")


def _projector(listing: Listing, name: str) -> RemoteFile:
    """Return the named projector, or the smallest."""
    found = [file for file in projectors(listing.files) if name in ("*", file.path)]
    if not found:
        raise UnavailableError(f"{listing.repo} has no projector {name}", "pull it without --projector")
    return min(found, key=lambda file: file.bytes or 0)


def _file(sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    sha256 = (lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)) if lfs else None
    return RemoteFile(sibling.rfilename, sibling.size, sha256)


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError as error:
        raise UnavailableError(
            "hf:// sources need the package huggingface_hub", "install it: pip install 'edgellm[hub]'"
        ) from error
    return huggingface_hub


def _translated(error: Exception, wanted: HubSource) -> EdgeError:
    names = {kind.__name__ for kind in type(error).__mro__}
    code = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in names:
        hint = "accept its licence on the hub, then set HF_TOKEN or run: hf auth login"
        return UnavailableError(f"{wanted.repo} is gated", hint)
    if "RevisionNotFoundError" in names:
        return UnavailableError(
            f"{wanted.repo} has no revision {wanted.revision}", "leave @revision out, or correct it"
        )
    if "RepositoryNotFoundError" in names or code in (401, 403, 404):
        hint = "look at the spelling; a private one needs HF_TOKEN"
        return UnavailableError(f"the hub has no repository {wanted.repo}, or does not show it", hint)
    if "HFValidationError" in names:
        return UnavailableError(f"{wanted.repo} is no name of a repository", "write hf://owner/repo")
    if "OfflineModeIsEnabled" in names:
        return UnavailableError("the hub library is set to offline (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE")
    what = f"answers {code}" if code else f"cannot be reached ({type(error).__name__})"
    return ResumableError(f"the hub {what}", _NETWORK_HINT)
