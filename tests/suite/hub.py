"""A folder of repositories, served as llama.cpp asks Hugging Face's hub: refs, tree, resolve (HEAD, GET, Range).

python hub.py FOLDER PORT     FOLDER/<org>/<repository>/<file>
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(sys.argv[1]).resolve()


@cache
def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlparse(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 5:
            self.describe(ROOT / parts[2] / parts[3], parts[4])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self.resolve(ROOT.joinpath(parts[0], parts[1], *parts[4:]))
        else:
            self.document({"error": "not found"}, 404)

    def describe(self, repository: Path, what: str) -> None:
        if not repository.is_dir():
            self.document({"error": "Repository not found"}, 404)
            return
        if what == "refs":
            commit = hashlib.sha1(str(repository).encode()).hexdigest()
            self.document({"branches": [{"name": "main", "targetCommit": commit}]})
            return
        files = sorted(path for path in repository.rglob("*") if path.is_file())
        rows = [(str(path.relative_to(repository)), path.stat().st_size, sha256(path)) for path in files]
        self.document(
            [
                {"type": "file", "path": name, "size": size, "oid": oid[:40], "lfs": {"oid": oid, "size": size}}
                for name, size, oid in rows
            ]
        )

    def resolve(self, path: Path) -> None:
        if not path.is_file():
            self.document({"error": "Entry not found"}, 404)
            return
        size = path.stat().st_size
        begin, end, status = 0, size - 1, 200
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes="):
            first, _, last = asked[6:].partition("-")
            begin, end, status = int(first or 0), int(last) if last else size - 1, 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
        self.send_header("ETag", f'"{sha256(path)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin + 1))
        self.end_headers()
        if self.command != "HEAD":
            with path.open("rb") as file:
                file.seek(begin)
                self.wfile.write(file.read(end - begin + 1))

    def document(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Hub).serve_forever()
