"""List a Hugging Face repository with huggingface_hub (endpoint, token, revisions) and choose the files to fetch.

The library's own download starts again after a kill, so transfer.py fetches the bytes and checks them against the
hub's SHA-256.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge.errors import EdgeError, UnavailableError
from edge.model.partial import Resumable
from edge.model.pick import Choice, RemoteFile, choose, options, projectors
from edge.model.quant import QuantPreference
from edge.model.resume import Remote
from edge.model.source import HubSource

_NETWORK_HINT = "look at the network, HF_ENDPOINT and the proxy settings, then run the same command again"


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True, slots=True)
class HubPlan:
    """The files to fetch. `source` names the first file; `commit` pins it."""

    source: HubSource
    commit: str
    choice: Choice
    remotes: tuple[Remote, ...]


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
            if not pauses or not isinstance(failure, Resumable):
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
        remotes.append(Remote(url, file.path.rpartition("/")[2], shown, file.bytes, file.sha256, headers))
    first = HubSource(wanted.repo, choice.option.files[0].path, None, listing.commit)
    return HubPlan(first, listing.commit, choice, tuple(remotes))


def _choice(
    wanted: HubSource,
    listing: Listing,
    quant: str | None,
    room_bytes: int | None,
    preference: QuantPreference | None,
) -> Choice:
    if wanted.file is None:
        return choose(options(listing.files), wanted.repo, quant, room_bytes, preference)
    found = [option for option in options(listing.files) if any(file.path == wanted.file for file in option.files)]
    if not found:
        there = ", ".join(file.path for file in listing.files if file.path.lower().endswith(".gguf")) or "no GGUF file"
        raise UnavailableError(f"{wanted.repo} has no model {wanted.file}", f"it has {there[:400]}")
    return Choice(found[0], f"{found[0].quant}: as requested")


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
    return Resumable(f"the hub {what}", _NETWORK_HINT)
