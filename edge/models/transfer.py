"""Download one file over HTTP, resumed only if the server proves that it is still the same file.

A resume sends Range and If-Range and accepts only a 206 whose Content-Range starts where the part ends; everything
else starts again from byte 0. httpx follows the environment's proxies, netrc and certificates.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from msgspec import Struct, convert, field, to_builtins

from edge.errors import BadDataError, ConfigError, UnavailableError
from edge.linux.files import read_bounded, read_json, write_json
from edge.linux.procfs import read_boot_id
from edge.models.disk import Sink, need_space
from edge.models.job import ResumableError
from edge.models.progress import Report, TransferMeter
from edge.models.quant import QuantPreference
from edge.models.verdict import VerdictError, not_gguf
from edge.units import printable

if TYPE_CHECKING:
    import httpx


_CERTIFICATES_MAX_BYTES = 64 << 20  # ca-certificates of a distribution has 200 kB


class PullOptions(Struct, frozen=True):
    """How to fetch. `room_bytes`: for weights on this board; `preference`: the preset's; `python` runs pip."""

    quant: str | None = None
    room_bytes: int | None = None
    preference: QuantPreference | None = None
    with_projector: bool = False
    progress: Report | None = None
    python: str = sys.executable
    client: httpx.Client | None = None
    endpoint: str | None = None
    sleep: Callable[[float], None] = time.sleep


DEFAULTS = PullOptions()

# State of a partial download: `x.json` beside `x.part`, so that a later process can resume it.


class RemoteInfo(Struct, frozen=True):
    """One file to fetch. `path` is where it goes, relative to the model's folder; `shown` is free of secrets."""

    url: str
    path: str
    shown: str
    bytes: int | None = None
    sha256: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


class Known(Struct, frozen=True):
    """The remote file as the server described it. None: not sent."""

    etag: str | None = None  # strong ones only
    modified: str | None = None
    total: int | None = None
    sha256: str | None = None
    boot: str | None = None  # of the machine that wrote the bytes

    @property
    def validator(self) -> str | None:
        return self.etag or self.modified

    @property
    def may_resume(self) -> bool:
        """Return whether a part may be continued. A hash would reveal any mixture. Without one the server must give a
        validator and the boot must be the same: after a power cut a file may hold zeros in place of data."""
        return bool(self.sha256) or (bool(self.validator) and self.boot == read_boot_id())


def load(part: Path, remote: RemoteInfo) -> Known:
    """Read the state of a part; delete a part that has none, or one of another file than `remote`."""
    fresh = Known(sha256=remote.sha256, total=remote.bytes)
    try:
        saved = convert(read_json(part.with_suffix(".json")), Known)
        foreign = (remote.sha256 is not None and saved.sha256 != remote.sha256) or (
            remote.bytes is not None and saved.total not in (None, remote.bytes)
        )
    except (OSError, ValueError, TypeError):
        foreign = True
    if foreign:
        part.unlink(missing_ok=True)
        return fresh
    return saved


def save(part: Path, known: Known) -> None:
    write_json(part.with_suffix(".json"), to_builtins(known))


_TRIES = 6  # in a row without progress
# A longer Retry-After is left to the user: the same command resumes.
_LONGEST_PAUSE_S = 60.0
# The hub's delivery network gives no more than 50 GB in one answer.
PIECE_BYTES = 16 * 10**9
# Content-Range, RFC 9110 section 14.4.
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_NUMBER = re.compile(r"[0-9]{1,18}")
AGAIN = "run the same command again"
NOT_PUBLIC_HINT = "accept its licence on the hub and set HF_TOKEN, or look at user and password"
# Below this rate for that long a transfer is broken off: a 4 GB model would take six weeks at the floor.
_FLOOR_BYTES_S = 1024
_FLOOR_S = 60.0
# How often the space is looked at where the server names no length.
_SPACE_EVERY_BYTES = 64 << 20


class HashMismatchError(BadDataError):
    """All bytes arrived and their hash is not the expected one."""

    kind = "hash_mismatch"


class _Restart(Exception):
    """The part does not belong to the server's current file."""


class _Retry(Exception):
    def __init__(self, why: str, pause_s: float | None = None) -> None:
        super().__init__(why)
        self.pause_s = pause_s


def _drop_redirects_body(response: httpx.Response) -> None:
    """End it before httpx reads it whole, to follow the redirect: one without an end took 4 GB."""
    if response.has_redirect_location:
        response.close()
        response._content = b""  # what read() returns then


def make_client() -> httpx.Client:
    """Return an HTTP client that follows the environment: proxies, certificates, netrc. Raises ConfigError."""
    import httpx

    named = os.environ.get("SSL_CERT_FILE")
    try:
        if named:  # OpenSSL would wait for a FIFO without end, and read a device until the memory is full
            read_bounded(Path(named), _CERTIFICATES_MAX_BYTES)
        return httpx.Client(
            timeout=httpx.Timeout(60.0, connect=20.0),
            headers={"User-Agent": "edgellm"},
            event_hooks={"response": [_drop_redirects_body]},
        )
    except OSError as error:
        why = printable(error.strerror or str(error))
        raise ConfigError(
            f"the certificates of {printable(named or 'certifi')} cannot be used: {why}", "look at SSL_CERT_FILE"
        ) from error
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        hint = "look at http_proxy, https_proxy and all_proxy; SOCKS needs: pip install 'httpx[socks]'"
        raise ConfigError(f"a proxy of the environment cannot be used: {printable(str(error))}", hint) from error


def download(
    remote: RemoteInfo,
    part: Path,
    client: httpx.Client,
    meter: TransferMeter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, str | None]:
    """Download into `part`, verify it; return its SHA-256 and the expected one, None where no hash is known.

    Raises ResumableError if it was interrupted, UnavailableError if the server refuses, HashMismatchError or
    BadDataError for other bytes than expected, VerdictError if it is no GGUF at all.
    """
    import httpx

    one = _Download(remote, part, client, meter)
    failures = 0
    while True:
        before = one.size
        try:
            return one.attempt(), one.expected
        except _Restart:
            one.forget()
            failures, why, pause = failures + 1, "the file keeps changing at its source", 0.0
        except (
            httpx.TooManyRedirects,
            httpx.InvalidURL,
            httpx.UnsupportedProtocol,
            httpx.DecodingError,
            UnicodeError,  # a host that is no name
        ) as error:
            why = str(error) or type(error).__name__
            raise UnavailableError(
                f"{remote.shown} leads nowhere: {why}", "look at the address, or try a mirror"
            ) from error
        except (httpx.TransportError, _Retry) as error:
            # A try that brought bytes starts a new series: a slow line may break off a hundred times.
            failures = 1 if one.size > before else failures + 1
            why = str(error) or type(error).__name__
            asked = error.pause_s if isinstance(error, _Retry) else None
            pause = min(_LONGEST_PAUSE_S, 2.0 ** (failures - 1) if asked is None else asked)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            hint = f"make room, then {one.again}"
            raise ResumableError(f"the disk is full, {remote.path} is not complete", hint) from error
        if failures >= _TRIES:
            ended = f"broke off after {one.size:,} bytes" if one.size else "could not be fetched"
            raise ResumableError(f"{remote.path} {ended}: {why}", one.again)
        sleep(pause)


class _Pace:
    """The floor of a transfer's rate, and the free space where no length was promised."""

    def __init__(self, size: int) -> None:
        self._since_s, self._from, self._checked = time.monotonic(), size, size

    def look(self, size: int, unbounded: Path | None) -> None:
        """Check rate and free space. Raises _Retry below the floor, DoesNotFitError at the free-space reserve."""
        if unbounded is not None and size - self._checked >= _SPACE_EVERY_BYTES:
            self._checked = size
            need_space(unbounded, _SPACE_EVERY_BYTES)
        now_s = time.monotonic()
        if now_s - self._since_s >= _FLOOR_S:
            if size - self._from < _FLOOR_BYTES_S * _FLOOR_S:
                raise _Retry(f"under {_FLOOR_BYTES_S} bytes/s for {_FLOOR_S:.0f} s")
            self._since_s, self._from = now_s, size


class _Download:
    """The part on disk and its state."""

    def __init__(self, remote: RemoteInfo, part: Path, client: httpx.Client, meter: TransferMeter) -> None:
        self._remote = remote
        self._part = part
        self._client = client
        self._meter = meter
        self._base = meter.done  # of the files before this one
        self._known = load(part, remote)

    @property
    def size(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    @property
    def again(self) -> str:
        """Return the hint after an interruption: the next try continues only if the server can prove the file."""
        if not self.size:
            return AGAIN
        return f"{AGAIN}: it {'continues from there' if self._known.may_resume else 'starts from the beginning'}"

    @property
    def expected(self) -> str | None:
        return self._known.sha256

    def forget(self) -> None:
        self._part.unlink(missing_ok=True)
        self._known = Known(sha256=self._remote.sha256, total=self._remote.bytes)

    def attempt(self) -> str:
        """Send one request and receive the file or the piece to its end. Raises _Restart or _Retry."""
        have = self.size if self._known.may_resume else 0
        total = self._known.total
        if total is not None and have > total:
            raise _Restart
        if have == total:
            with Sink(self._part, have) as sink:
                self._meter.at(self._base + have)
            return self._verified(sink.digest())
        piece = total is not None and total - have > PIECE_BYTES
        with self._client.stream(
            "GET", self._remote.url, headers=self._headers(have, piece), follow_redirects=True
        ) as response:
            sink = self._receive(response, have)
        total = self._known.total
        if total is not None and sink.size < total:
            raise _Retry("the connection ended too early", 0.0 if piece else None)
        return self._verified(sink.digest())

    def _headers(self, have: int, piece: bool) -> dict[str, str]:
        headers = {**self._remote.headers, "Accept-Encoding": "identity"}
        if have or piece:
            headers["Range"] = f"bytes={have}-" + (str(have + PIECE_BYTES - 1) if piece else "")
        if have and self._known.validator:
            headers["If-Range"] = self._known.validator
        return headers

    def _receive(self, response: httpx.Response, have: int) -> Sink:
        have = self._judge(response, have)
        save(self._part, self._known)
        if self._known.total is not None:
            need_space(self._part.parent, self._known.total - have)
        most = self._known.total
        with Sink(self._part, have) as sink:
            self._meter.at(self._base + have)
            pace = _Pace(have)
            for chunk in response.iter_raw():
                if not sink.size:
                    self._check_start(chunk)
                pace.look(sink.size, self._part.parent if most is None else None)
                if most is not None and sink.size + len(chunk) > most:
                    raise BadDataError(f"{self._remote.shown} is longer than the {most:,} bytes promised", AGAIN)
                sink.write(chunk)
                self._meter.add(len(chunk))
        return sink

    def _judge(self, response: httpx.Response, have: int) -> int:
        """Return how many bytes of the part may stay, by status and headers, and update its state."""
        # RFC 9110, 15.3.7: a 206 without the requested range is another file or a proxy's mistake.
        if response.status_code == 206:
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            total = int(match[3]) if match and match[3] != "*" else self._known.total
            if not match or int(match[1]) != have or self._changed(response, total):
                raise _Restart
        elif response.status_code == 200:
            have, length = 0, response.headers.get("Content-Length", "")
            total = int(length) if _NUMBER.fullmatch(length) else None
        else:
            _refused(response, self._remote.shown)
        if response.headers.get("Content-Type", "").startswith("text/html"):
            self._check_start(b"<html>")
        # Offsets of a resume count stored bytes; of a compressed body the position is unknown.
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise UnavailableError(f"{self._remote.shown} comes compressed: it cannot be resumed", "use a mirror")
        promised = self._remote.bytes
        if promised is not None and total not in (None, promised):
            raise BadDataError(
                f"{self._remote.shown} has {total:,} bytes, {promised:,} were promised",
                "the file was replaced at its source: pull it by its hub address to take what is there now",
            )
        etag = response.headers.get("ETag")
        self._known = Known(
            # A weak validator allows other bytes: RFC 9110, 13.1.5 forbids it in If-Range.
            etag=etag if etag and not etag.startswith("W/") else None,
            modified=response.headers.get("Last-Modified"),
            total=promised if total is None else total,
            sha256=self._remote.sha256 or _linked_sha256(response),
            boot=read_boot_id(),
        )
        return have

    def _changed(self, response: httpx.Response, total: int | None) -> bool:
        """Return whether the server has another file now. With a hash no validator counts: mirrors have their own."""
        now = response.headers.get("ETag" if self._known.etag else "Last-Modified")
        if not self._known.sha256 and self._known.validator and now and now != self._known.validator:
            return True
        return self._known.total is not None and total != self._known.total

    def _check_start(self, chunk: bytes) -> None:
        """Reject a web page by its first bytes, before it is fetched to the end."""
        wrong = not_gguf(chunk[:512], len(chunk))
        if wrong:
            self._part.unlink(missing_ok=True)
            raise VerdictError(wrong, self._remote.path)

    def _verified(self, digest: str) -> str:
        expected = self._known.sha256
        if expected is not None and digest != expected:
            raise HashMismatchError(
                f"{self._remote.path} has SHA-256 {digest[:16]}…, expected {expected[:16]}…: it is not installed",
                "pull it again; if it happens twice, the source or the way to it is at fault",
            )
        return digest


def _linked_sha256(response: httpx.Response) -> str | None:
    """Return the SHA-256 that a hub sends with its redirect; any other server could state that of what it sends."""
    hubs = {"huggingface.co", "hf.co", urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc}
    for answer in response.history:
        linked = answer.headers.get("X-Linked-Etag", "").strip('"')
        if answer.url.netloc.decode() in hubs and re.fullmatch(r"[0-9a-f]{64}", linked):
            return str(linked)
    return None


def _refused(response: httpx.Response, shown: str) -> NoReturn:
    code = response.status_code
    if code == 416:
        raise _Restart
    # Request Timeout, Too Early, Too Many Requests: RFC 9110 and 8470 let a client repeat these.
    if code in (408, 425, 429) or code >= 500:
        # Seconds only: a date needs a right clock, which a board without a battery lacks.
        after = response.headers.get("Retry-After", "")
        raise _Retry(f"the server answers {code}", float(after) if _NUMBER.fullmatch(after) else None)
    if code in (401, 403):
        raise UnavailableError(f"{shown} is not public ({code})", NOT_PUBLIC_HINT)
    if code in (404, 410):
        raise UnavailableError(f"{shown} does not exist ({code})", "look at the name and the revision")
    raise UnavailableError(f"{shown}: the server answers {code}", "look at the address, or try a mirror")
