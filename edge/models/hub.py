"""List a repository of the Hugging Face hub, a mirror of it, or ModelScope, and choose the files to fetch.

Two HTTP requests do it, so the package huggingface_hub (28 MB with what it needs, a second httpx among it) is not used:
its own download starts again after a kill, and transfer.py checks the bytes against the hub's SHA-256.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as url_quote

from msgspec import Struct

from edge.errors import EdgeError, UnavailableError
from edge.linux.files import parse_foreign_json, read_bounded
from edge.models.header import peek_stream
from edge.models.job import ResumableError
from edge.models.pick import (
    Peek,
    QuantChoice,
    QuantOption,
    RemoteFile,
    by_model,
    choose,
    options,
    principal,
    projectors,
)
from edge.models.source import HubSource, is_relative
from edge.models.transfer import PullOptions, RemoteInfo, make_client
from edge.models.verdict import VerdictError

if TYPE_CHECKING:
    import httpx

_PAUSES_S = (1.0, 4.0)
# The largest listings on the hub (dataset-sized repositories) have some MB.
_LISTING_MAX_BYTES = 32 << 20
# Architecture and layers are among the first keys, before the vocabulary.
_PEEK_BYTES = 256 << 10
_PEEKS = 8  # a repository with more models than this is a collection: it is not looked through


class Listing(Struct, frozen=True):
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]


class HubPlan(Struct, frozen=True):
    """The files to fetch. `source` names the first file at its commit."""

    source: HubSource
    choice: QuantChoice
    remotes: tuple[RemoteInfo, ...]


class Site:
    """The addresses of one hub: of Hugging Face (or a mirror, HF_ENDPOINT), or of ModelScope."""

    def __init__(self, scheme: str, endpoint: str | None, env: Mapping[str, str]) -> None:
        self.scheme = scheme
        self.variable = "HF_ENDPOINT" if scheme == "hf" else "MODELSCOPE_ENDPOINT"
        usual = "https://huggingface.co" if scheme == "hf" else "https://modelscope.cn"
        self.endpoint = (endpoint or env.get(self.variable) or usual).rstrip("/")
        self.network_hint = (
            f"look at the network, {self.variable} and the proxy settings, then run the same command again"
        )
        token = _token(env) if scheme == "hf" else None
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    def listing_url(self, wanted: HubSource) -> str:
        if self.scheme == "modelscope":
            # As in modelscope's own client, HubApi.get_model_files.
            at = url_quote(wanted.revision or "master", safe="")
            return f"{self.endpoint}/api/v1/models/{wanted.repo}/repo/files?Revision={at}&Recursive=true"
        # blobs=true adds size and SHA-256 of each file, so that a choice by size needs no further request.
        at = f"/revision/{url_quote(wanted.revision, safe='')}" if wanted.revision else ""
        return f"{self.endpoint}/api/models/{wanted.repo}{at}?blobs=true"

    def file_url(self, repo: str, commit: str, path: str) -> str:
        folder = "models/" if self.scheme == "modelscope" else ""
        return f"{self.endpoint}/{folder}{repo}/resolve/{url_quote(commit, safe='')}/{url_quote(path)}"

    def read(self, wanted: HubSource, document: Any) -> Listing:
        """Read a listing; entries that are not plain files are left out."""
        rows = document.get("Data") if self.scheme == "modelscope" else document
        rows = rows.get("Files" if self.scheme == "modelscope" else "siblings") if isinstance(rows, dict) else None
        files = tuple(_files(rows if isinstance(rows, list) else []))
        sha = document.get("sha")
        return Listing(wanted.repo, sha if isinstance(sha, str) else wanted.revision or self._default, files)

    @property
    def _default(self) -> str:
        return "master" if self.scheme == "modelscope" else "main"


def _files(rows: list[Any]) -> Iterator[RemoteFile]:
    """Yield the files of either hub's rows: rfilename, size, lfs.sha256, or Path, Size, Sha256."""
    for row in rows:
        if not isinstance(row, dict):
            continue
        path, size, lfs = row.get("rfilename", row.get("Path")), row.get("size", row.get("Size")), row.get("lfs")
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else row.get("Sha256")
        if isinstance(path, str) and is_relative(path):
            # Only LFS files have one: a small file is stored in git, whose id is a SHA-1 of another form.
            known = isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256)
            yield RemoteFile(path, size if isinstance(size, int) and size > 0 else None, sha256 if known else None)


def list_repo(
    wanted: HubSource, site: Site, client: httpx.Client, sleep: Callable[[float], None] = time.sleep
) -> Listing:
    """List a repository. Raises UnavailableError (absent or closed) or ResumableError (network)."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise UnavailableError("HF_HUB_OFFLINE forbids the hub", "unset HF_HUB_OFFLINE")
    # Two more tries: a 5xx of the hub or of a proxy often passes.
    pauses = list(_PAUSES_S)
    while True:
        try:
            return site.read(wanted, _json(client, site, wanted))
        except ResumableError:
            if not pauses:
                raise
            sleep(pauses.pop(0))


def _json(client: httpx.Client, site: Site, wanted: HubSource) -> dict[str, Any]:
    import httpx

    body = bytearray()
    try:
        with client.stream("GET", site.listing_url(wanted), headers=site.headers, follow_redirects=True) as response:
            if response.status_code != 200:
                raise _refused(response, site, wanted)
            for chunk in response.iter_bytes():
                body += chunk
                # Counted while it arrives: Content-Length is a claim, and the body may be compressed.
                if len(body) > _LISTING_MAX_BYTES:
                    hint = f"name the file: {site.scheme}://repo/file"
                    raise UnavailableError(f"the list of {wanted.repo} is too long", hint)
        document = parse_foreign_json(bytes(body))
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        return document
    except httpx.TransportError as error:
        raise ResumableError(f"the hub cannot be reached ({type(error).__name__})", site.network_hint) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"the hub's answer leads nowhere: {error}", f"look at {site.variable}") from error
    except ValueError as error:
        raise ResumableError("the hub answers with something else than its list", site.network_hint) from error


def _refused(response: httpx.Response, site: Site, wanted: HubSource) -> EdgeError:
    code, kind = response.status_code, response.headers.get("X-Error-Code", "")
    if kind == "GatedRepo":
        hint = "accept its licence on the hub, then set HF_TOKEN or run: hf auth login"
        return UnavailableError(f"{wanted.repo} is gated", hint)
    if kind == "RevisionNotFound":
        return UnavailableError(
            f"{wanted.repo} has no revision {wanted.revision}", "leave @revision out, or correct it"
        )
    # The hub answers 401 for a repository that does not exist as well as for a private one.
    if code in (400, 401, 403, 404):
        private = (
            "a private one needs HF_TOKEN" if site.scheme == "hf" else "private ones of ModelScope are not supported"
        )
        hint = f"look at the spelling; {private}"
        return UnavailableError(f"the hub has no repository {wanted.repo}, or does not show it", hint)
    return ResumableError(f"the hub answers {code}", site.network_hint)


def _token(env: Mapping[str, str]) -> str | None:
    """Return the token that `hf auth login` keeps, under the variables of huggingface_hub."""
    named = (env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN") or "").strip()
    if named:
        return named
    cache = env.get("XDG_CACHE_HOME") or f"{env.get('HOME') or '/nonexistent'}/.cache"
    home = env.get("HF_HOME") or f"{cache}/huggingface"
    try:
        text = read_bounded(Path(env.get("HF_TOKEN_PATH") or f"{home}/token"), 4096).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return text if text.isprintable() and text else None


def plan(wanted: HubSource, options: PullOptions, projector: str | None = None) -> HubPlan:
    """Choose the files and their URLs. `projector` is a file name, or `*` for any."""
    site = Site(wanted.site, options.endpoint, os.environ)
    client = options.client or make_client()
    try:
        listing = list_repo(wanted, site, client, options.sleep)
        choice = _choice(wanted, listing, options, _Peeker(client, site, listing))
    finally:
        if options.client is None:
            client.close()
    files = [*choice.option.files]
    if projector:
        files.append(_projector(listing, projector))
    remotes = tuple(_remote(site, listing, file) for file in files)
    first = HubSource(wanted.repo, choice.option.files[0].path, None, listing.commit, wanted.site)
    return HubPlan(first, choice, remotes)


def _remote(site: Site, listing: Listing, file: RemoteFile) -> RemoteInfo:
    url = site.file_url(listing.repo, listing.commit, file.path)
    shown = f"{site.scheme}://{listing.repo}/{file.path}"
    return RemoteInfo(url, file.path.rpartition("/")[2], shown, file.bytes, file.sha256, site.headers)


class _Peeker:
    """Reads the first keys of a repository's files, one of each model."""

    def __init__(self, client: httpx.Client, site: Site, listing: Listing) -> None:
        self._client, self._site, self._listing = client, site, listing

    def peek(self, groups: Mapping[str, Sequence[QuantOption]]) -> dict[str, Peek]:
        # One model needs no decision, and each peek is a request.
        if not 1 < len(groups) <= _PEEKS:
            return {}
        found = {name: self._one(group[0].files[0]) for name, group in groups.items()}
        return {name: one for name, one in found.items() if one is not None}

    def _one(self, file: RemoteFile) -> Peek | None:
        """Return None where the first keys cannot be had: names decide then."""
        import httpx

        remote = _remote(self._site, self._listing, file)
        headers = {**remote.headers, "Range": f"bytes=0-{_PEEK_BYTES - 1}", "Accept-Encoding": "identity"}
        head = bytearray()
        try:
            with self._client.stream("GET", remote.url, headers=headers, follow_redirects=True) as response:
                for chunk in response.iter_raw():
                    head += chunk
                    # A server that ignores Range sends the whole file: stop after the part that was wanted.
                    if len(head) >= _PEEK_BYTES or response.status_code not in (200, 206):
                        break
            return Peek(*peek_stream(io.BytesIO(head), len(head), file.path))
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, VerdictError):
            return None


def _choice(wanted: HubSource, listing: Listing, how: PullOptions, peeker: _Peeker) -> QuantChoice:
    whole = options(listing.files)
    if wanted.file is None:
        groups = by_model(whole)
        own = principal(groups, peeker.peek(groups), wanted.repo, wanted.site) if len(groups) > 1 else whole
        return choose(own, wanted.repo, how.quant or wanted.quant, how.room_bytes, how.preference)
    found = [option for option in whole if any(file.path == wanted.file for file in option.files)]
    if not found:
        there = ", ".join(file.path for file in listing.files if file.path.lower().endswith(".gguf")) or "no GGUF file"
        raise UnavailableError(f"{wanted.repo} has no model {wanted.file}", f"it has {there[:400]}")
    return QuantChoice(found[0], f"{found[0].quant}: as requested")


def _projector(listing: Listing, name: str) -> RemoteFile:
    """Return the named projector, or the smallest."""
    found = [file for file in projectors(listing.files) if name in ("*", file.path)]
    if not found:
        raise UnavailableError(f"{listing.repo} has no projector {name}", "pull it without --projector")
    # Repositories offer one projector as f32, f16 and q8_0: the smallest leaves most memory to the model.
    return min(found, key=lambda file: file.bytes or 0)
