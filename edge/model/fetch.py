"""Fetch the files of one model over HTTP into a job, without those that a former try completed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge.linux.files import write_json
from edge.model.disk import need_space
from edge.model.meter import Meter
from edge.model.partial import Job
from edge.model.progress import Report
from edge.model.receipt import InstalledFile
from edge.model.resume import Remote
from edge.model.transfer import MismatchError, download

if TYPE_CHECKING:
    import httpx


def fetch_all(
    remotes: Sequence[Remote],
    job: Job,
    report: Report | None,
    client: httpx.Client | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[InstalledFile]:
    """Fetch and verify all of `remotes` into the payload. Raises what transfer.download raises."""
    done = [_finished(job, number, remote) for number, remote in enumerate(remotes)]
    sizes = [remote.bytes for remote in remotes]
    total = sum(size or 0 for size in sizes) if None not in sizes else None
    meter = Meter("fetch", remotes[0].path, total, report)
    if total is not None:
        parts = sum(path.stat().st_size for path in job.work.glob("*.part"))
        need_space(job.folder, total - sum(file.bytes for file in done if file) - parts)
    client = client or make_client()
    try:
        for number, remote in enumerate(remotes):
            file = done[number]
            if file is None:
                done[number] = _one(remote, number, job, client, meter, sleep)
            else:
                meter.add(file.bytes)
    finally:
        client.close()
    meter.end()
    return [file for file in done if file]


def make_client() -> httpx.Client:
    """Return an HTTP client that follows the environment: proxies, certificates, netrc."""
    import httpx

    return httpx.Client(timeout=httpx.Timeout(60.0, connect=20.0), headers={"User-Agent": "edgellm"})


def _one(
    remote: Remote, number: int, job: Job, client: httpx.Client, meter: Meter, sleep: Callable[[float], None]
) -> InstalledFile:
    part = job.work / f"{number}.part"
    meter.what = remote.path
    try:
        digest = download(remote, part, client, meter, sleep)
    except MismatchError:
        job.set_aside(part, Path(remote.path).name)
        raise
    file = InstalledFile(remote.path, part.stat().st_size, digest)
    # First what it is, then its place: a process that dies between the two finds it again.
    write_json(job.work / f"{number}.done", {"path": file.path, "bytes": file.bytes, "sha256": file.sha256})
    target = job.payload / remote.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part.rename(target)
    return file


def _finished(job: Job, number: int, remote: Remote) -> InstalledFile | None:
    """Return the path of a file that a former try completed and verified."""
    try:
        data = json.loads((job.work / f"{number}.done").read_bytes())
        file = InstalledFile(data["path"], data["bytes"], data["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if file.path != remote.path or remote.sha256 not in (None, file.sha256):
        return None
    target, part = job.payload / file.path, job.work / f"{number}.part"
    if not target.exists() and part.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part.rename(target)
    return file if target.exists() and target.stat().st_size == file.bytes else None
