"""Verdicts on files that cannot be served: one sentence and one next step each. Pure."""

from __future__ import annotations

from msgspec import Struct

from edge.errors import BadModelError
from edge.models.meta import ModelMeta
from edge.models.quant import UNKNOWN
from edge.units import printable


class HeaderVerdict(Struct, frozen=True):
    """`kind` is stable, for programs: web_page, lfs_pointer, truncated, ..."""

    kind: str
    sentence: str
    hint: str


class VerdictError(BadModelError):
    """A file that cannot be served, with its verdict."""

    def __init__(self, verdict: HeaderVerdict, where: str) -> None:
        super().__init__(f"{printable(where)}: {verdict.sentence}", verdict.hint)
        self.verdict = verdict


PULL_AGAIN = "fetch it again: edgellm model pull REF"
_PULL_GGUF = "fetch the GGUF of this model instead: edgellm model pull REF"

# First bytes -> what the file really is.
_FORMATS: tuple[tuple[bytes, str, str], ...] = (
    (b"ggjt", "ggml", "a GGML file from before 2023 (ggjt)"),
    (b"tjgg", "ggml", "a GGML file from before 2023 (ggjt)"),
    (b"lmgg", "ggml", "a GGML file from before 2023 (ggml)"),
    (b"fmgg", "ggml", "a GGML file from before 2023 (ggmf)"),
    (b"algg", "ggml", "a GGLA adapter from before 2023"),
    (b"PK\x03\x04", "zip", "a ZIP archive (a PyTorch checkpoint or a wheel)"),
    (b"\x1f\x8b", "gzip", "gzip-compressed data"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd-compressed data"),
    (b"\xfd7zXZ\x00", "xz", "xz-compressed data"),
    (b"7z\xbc\xaf\x27\x1c", "7z", "a 7z archive"),
    (b"\x80\x02", "pickle", "a Python pickle (a PyTorch checkpoint)"),
    (b"\x89HDF", "hdf5", "an HDF5 file (a Keras model)"),
    (b"\x7fELF", "elf", "a Linux program"),
    (b"%PDF", "pdf", "a PDF document"),
    (b"version https://git-lfs", "lfs_pointer", "a Git LFS pointer, not the file it stands for"),
)
# First bytes of the pages that proxies and login forms answer with.
_HTML = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<script", b"<body", b"<!--")


def not_gguf(head: bytes, size: int) -> HeaderVerdict | None:
    """Judge a file by its first bytes (64 or more); None if they are `GGUF`."""
    if size == 0:
        return HeaderVerdict("empty", "the file is empty", PULL_AGAIN)
    if head[:4] == b"GGUF":
        return None
    if head[:4] == b"FUGG":
        return HeaderVerdict("big_endian", "is a big-endian GGUF written backwards, magic included", _PULL_GGUF)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(_HTML):
        hint = "use the file's download link (/resolve/, not /blob/) or: edgellm model pull hf://OWNER/REPO:QUANT"
        return HeaderVerdict("web_page", "is a web page, not a model: the link led to a page or a login", hint)
    for magic, kind, what in _FORMATS:
        if head.startswith(magic):
            hint = "git lfs pull, or: edgellm model pull REF" if kind == "lfs_pointer" else _PULL_GGUF
            return HeaderVerdict(kind, f"is {what}, not GGUF", hint)
    # safetensors: a 64-bit length of the JSON header, then its first brace.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return HeaderVerdict("safetensors", "is a safetensors file, not GGUF", _PULL_GGUF)
    if text.startswith((b"{", b"[")):
        return HeaderVerdict("json", "is JSON text (an error message of a server?), not GGUF", PULL_AGAIN)
    if not any(head):
        return HeaderVerdict("zeros", "begins with zeros: the download never wrote its start", PULL_AGAIN)
    shown = head[:4].hex()
    return HeaderVerdict("wrong_magic", f"is not GGUF: it begins with bytes {shown} instead of 47475546", _PULL_GGUF)


def bad_version(version: int) -> HeaderVerdict | None:
    """Return the verdict on a GGUF version other than 2 and 3; a byte-swapped small number is a big-endian file."""
    if version in (2, 3):
        return None
    # 3 written in the other byte order is 0x03000000: its low bytes are zero.
    if version & 0xFFFF == 0 and version != 0:
        sentence = "is big-endian GGUF, made for another kind of machine"
        return HeaderVerdict("big_endian", sentence, "fetch a little-endian file: edgellm model pull REF")
    return HeaderVerdict("version", f"is GGUF version {version}, which is not supported (2 and 3 are)", _PULL_GGUF)


def damaged(what: str) -> HeaderVerdict:
    return HeaderVerdict("damaged", f"has a damaged header: {what}", PULL_AGAIN)


def ends_in_header(size: int) -> HeaderVerdict:
    return HeaderVerdict("truncated", f"is truncated: it ends inside its header, after {size:,} bytes", PULL_AGAIN)


def truncated(tensor: str, expected_bytes: int, actual_bytes: int) -> HeaderVerdict:
    missing = expected_bytes - actual_bytes
    sentence = (
        f"is truncated: {actual_bytes:,} of {expected_bytes:,} bytes are present, {missing:,} are missing, "
        f"from tensor {tensor} on"
    )
    return HeaderVerdict("truncated", sentence, PULL_AGAIN)


_KINDS = {
    "mmproj": (
        "is a vision or audio projector, which goes beside a model",
        "give the model; a lone projector is paired with it, or: --set mmproj=PATH",
    ),
    "adapter": ("is an adapter (LoRA or control vector), not a whole model", "serve the model it was made for"),
    "drafter": ("is a drafter for speculative decoding, which goes beside a model", "give the model itself"),
    "imatrix": ("is an importance matrix, data for quantizing", "give the model itself"),
    "vocab": ("holds a vocabulary and no weights", "give the model itself"),
}


HEALTHY_KINDS = frozenset(_KINDS)


def not_a_model(meta: ModelMeta) -> HeaderVerdict | None:
    """Return the verdict on a GGUF of another kind than a language model; the engine judges unknown architectures."""
    if meta.kind != "model":
        return of_kind(meta.kind)
    if meta.arch == UNKNOWN:
        return HeaderVerdict(
            "no_architecture", "names no general.architecture, without which llama.cpp loads nothing", PULL_AGAIN
        )
    return None


def bad_name(name: str) -> HeaderVerdict | None:
    """Return the verdict on a name that is no UTF-8 text or holds control characters: no log or JSON can carry it."""
    if name.isprintable():
        return None
    what = "that is not UTF-8" if any("\udc80" <= c <= "\udcff" for c in name) else "with control characters"
    return HeaderVerdict("bad_name", f"has a name {what}", "rename the file")


def of_kind(kind: str) -> HeaderVerdict:
    sentence, hint = _KINDS.get(kind, (f"is of type {kind!r}, not a model", "give the model itself"))
    return HeaderVerdict(kind, sentence, hint)
