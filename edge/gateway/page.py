"""Load the status page: one file, sent with a Content-Security-Policy that allows no other source."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from msgspec import Struct

_FILE = Path(__file__).with_name("status.html")
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page(Struct, frozen=True):
    """The page's bytes. `policy` allows exactly the inline scripts and styles that are in the file, by hash."""

    body: bytes
    etag: str
    policy: str

    @staticmethod
    def load(path: Path = _FILE) -> Page:
        body = path.read_bytes()
        # Hashes instead of unsafe-inline: text that a model writes can never run as a script.
        hashes: dict[str, list[str]] = {"script": [], "style": []}
        for tag, content in _INLINE.findall(body):
            digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
            hashes[tag.decode()].append(f"'sha256-{digest}'")
        policy = (
            "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            f"frame-ancestors 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}"
        )
        return Page(body, f'"{hashlib.sha256(body).hexdigest()[:16]}"', policy)

    def headers(self) -> dict[str, str]:
        return {
            "Content-Security-Policy": self.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            # Asked again each time, with the ETag: an update of edgellm shows at once.
            "Cache-Control": "no-cache",
            "ETag": self.etag,
        }
