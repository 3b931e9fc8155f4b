"""A local server that behaves like the model hub, and misbehaves on demand.

    with Hub(folder) as hub:               folder/<owner>/<repo>/<file> are its repositories
        hub.url                            endpoint for HF_ENDPOINT
        hub.faults.append(Fault("503"))    each fault is used once, in order, by the next request for a file

It serves /api/models/R[/revision/V], /R/resolve/V/F (redirects to /cdn/…, as the real one does) and plain /files/F.
Every request is kept in `requests`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HTML = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>login</body></html>"


@dataclass
class Fault:
    """One way to go wrong. `after` bytes of the body are sent first where that makes sense.

    cut: the connection ends · reset: it dies, and what was on its way is lost · 503, 429, 500, 404, 401: that status
    html: 200 with a page · login: redirect to a page
    ignore_range: 200 with everything · wrong_206: another range than was asked · wrong_total: another length
    gzip: claims compression · short: says a smaller Content-Length · long: sends more than promised
    corrupt: one byte is flipped · no_length: chunked · slow: small chunks, or one and the rest after `event`
    """

    kind: str
    after: int = 0
    event: threading.Event | None = None
    retry_after: int | None = None


@dataclass
class Seen:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Hub:
    """The server; a context manager."""

    root: Path
    token: str | None = None  # demanded for every repository
    gated: bool = False
    gated_files: bool = False  # the list is open, as the real hub's of a gated repository is
    ranges: bool = True
    etags: bool = True
    dates: bool = False  # Last-Modified is sent, and If-Range ignored
    linked: bool = True  # X-Linked-Etag in redirects, LFS hashes in listings
    commit: str = COMMIT
    faults: list[Fault] = field(default_factory=list)
    api_faults: list[Fault] = field(default_factory=list)
    api_bodies: list[bytes] = field(default_factory=list)  # answers in place of a listing
    listed: list[object] = field(default_factory=list)  # rows added to every listing
    requests: list[Seen] = field(default_factory=list)

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def files_asked(self) -> list[Seen]:
        """Requests for bytes, after redirects."""
        return [seen for seen in self.requests if seen.path.startswith(("/cdn/", "/files/"))]


def sha256(path: Path) -> str:
    """Of a file as it is now; the real hub knows them too."""
    stat = path.stat()
    return _sha256(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache
def _sha256(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        parts = path.strip("/").split("/")
        if parts[0] == "login":
            self.reply(200, HTML, "text/html")
        elif parts[0] in ("loop", "nowhere"):
            self.reply(302, b"", headers={"Location": self.path if parts[0] == "loop" else "gopher://x/y"})
        elif parts[0] == "to":
            self.reply(302, b"", headers={"Location": unquote(self.path.split("/")[2])})
        elif parts[:2] == ["api", "v1"]:
            self.modelscope(parts[3:5])
        elif parts[0] == "api":
            self.api(parts[2:])
        elif parts[0] == "models" and len(parts) > 5:
            self.resolve(parts[1:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self.resolve(parts)
        elif parts[0] in ("cdn", "files"):
            self.send_bytes(self.hub.root.joinpath(*parts[1:]))
        else:
            self.reply(404, b"{}")

    def allowed(self) -> bool:
        if self.hub.gated:
            self.reply(403, b'{"error":"gated"}', headers={"X-Error-Code": "GatedRepo"})
            return False
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.reply(401, b'{"error":"no"}', headers={"X-Error-Code": "RepoNotFound"})
            return False
        return True

    def api(self, parts: list[str]) -> None:
        if self.hub.api_faults:
            self.reply(int(self.hub.api_faults.pop(0).kind), b"{}")
            return
        if self.hub.api_bodies:
            self.reply(200, self.hub.api_bodies.pop(0))
            return
        folder = self.hub.root.joinpath(*parts[:2])
        if not self.allowed():
            return
        if not folder.is_dir():
            self.reply(404, b'{"error":"Repository not found"}', headers={"X-Error-Code": "RepoNotFound"})
            return
        if parts[2:3] == ["revision"] and parts[3] not in ("main", self.hub.commit):
            self.reply(404, b'{"error":"Revision not found"}', headers={"X-Error-Code": "RevisionNotFound"})
            return
        siblings: list[object] = [self.sibling(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        siblings += self.hub.listed
        told = {"_id": "1", "id": "/".join(parts[:2]), "modelId": "/".join(parts[:2]), "sha": self.hub.commit}
        self.reply(
            200, json.dumps({**told, "private": False, "siblings": siblings, "tags": [], "downloads": 0}).encode()
        )

    def modelscope(self, repo: list[str]) -> None:
        """ModelScope's list: no commit, and its own names."""
        folder = self.hub.root.joinpath(*repo)
        files = [
            {"Path": str(path.relative_to(folder)), "Type": "blob", "Size": path.stat().st_size, "Sha256": sha256(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        self.reply(200 if files else 404, json.dumps({"Code": 200, "Data": {"Files": files}}).encode())

    def sibling(self, path: Path, folder: Path) -> dict[str, object]:
        size = path.stat().st_size
        one: dict[str, object] = {"rfilename": str(path.relative_to(folder)), "size": size, "blobId": "b" * 40}
        if self.hub.linked:
            one["lfs"] = {"sha256": sha256(path), "size": size, "pointerSize": 134}
        return one

    def resolve(self, parts: list[str]) -> None:
        if not self.allowed():
            return
        if self.hub.gated_files and "Authorization" not in self.headers:
            self.reply(401, b'{"error":"gated"}', headers={"X-Error-Code": "GatedRepo"})
            return
        path = self.hub.root.joinpath(*parts[:2], *parts[4:])
        if not path.is_file():
            self.reply(404, b"Entry not found", headers={"X-Error-Code": "EntryNotFound"})
            return
        linked = {"X-Linked-Etag": f'"{sha256(path)}"', "X-Linked-Size": str(path.stat().st_size)}
        where = quote(f"/cdn/{'/'.join(parts[:2])}/{'/'.join(parts[4:])}")
        self.reply(
            302,
            b"",
            headers={"Location": where, "X-Repo-Commit": self.hub.commit, **(linked if self.hub.linked else {})},
        )

    def send_bytes(self, path: Path) -> None:
        fault = self.hub.faults.pop(0) if self.hub.faults else Fault("none")
        kind = fault.kind
        if kind.isdigit():
            after = {"Retry-After": str(fault.retry_after)} if fault.retry_after is not None else {}
            self.reply(int(kind), b"{}", headers=after)
            return
        if kind in ("html", "login"):
            if kind == "html":
                self.reply(200, HTML, "text/html; charset=utf-8")
            else:
                self.reply(302, b"", headers={"Location": "/login"})
            return
        if not path.is_file():
            self.reply(404, b"nothing here", "text/plain")
            return
        self.body(path, fault)

    def body(self, path: Path, fault: Fault) -> None:
        size = path.stat().st_size
        etag = f'"{size:x}-{path.stat().st_mtime_ns:x}"'
        start, end, ranged = 0, size - 1, False
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        guard = self.headers.get("If-Range")
        if asked and self.hub.ranges and fault.kind != "ignore_range" and (guard in (None, etag) or self.hub.dates):
            start, end, ranged = int(asked[1]), min(size - 1, int(asked[2] or size - 1)), True
            if start >= size:
                self.reply(416, b"", headers={"Content-Range": f"bytes */{size}"})
                return
        if fault.kind == "wrong_206" and ranged:
            start = max(0, start - 7)
        told = size + 1 if fault.kind == "wrong_total" else size
        length = end - start + 1 + (told - size)
        self.send_response(206 if ranged else 200)
        if self.hub.etags:
            self.send_header("ETag", etag)
        if self.hub.dates:
            self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        if fault.kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        if fault.kind == "no_length":
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{end}/{told}")
        self.end_headers()
        if self.command != "HEAD":
            self.stream(path, start, end + 1, fault)

    def stream(self, path: Path, start: int, end: int, fault: Fault) -> None:
        self.wfile.flush()
        if fault.kind in ("cut", "reset"):
            end = min(end, start + fault.after)
        with path.open("rb") as file:
            try:
                if fault.kind == "corrupt":
                    data = bytearray(file.read())[start:end]
                    data[len(data) // 2] ^= 0xFF
                    self.wfile.write(data)
                elif fault.kind == "slow":
                    self.slowly(file.fileno(), start, end, fault)
                else:
                    while start < end:
                        start += os.sendfile(self.connection.fileno(), file.fileno(), start, min(end - start, 8 << 20))
            except OSError:
                self.close_connection = True
                return
        if fault.kind in ("cut", "reset", "wrong_total"):
            if fault.kind == "reset":
                # A reset, as a dying peer sends it.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    def slowly(self, source: int, start: int, end: int, fault: Fault) -> None:
        pace = 4096
        while start < end:
            start += os.sendfile(self.connection.fileno(), source, start, min(end - start, pace))
            if fault.event is None:
                time.sleep(0.002)
            elif fault.event.wait(60):
                pace = 8 << 20

    def reply(
        self, code: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


if __name__ == "__main__":
    import sys

    with Hub(Path(sys.argv[1])) as running:
        print(running.url, flush=True)
        sys.stdin.read()
