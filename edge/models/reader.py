"""Read a GGUF header through a moving window, trusting no count, length or alignment in it.

Its cost is bounded for any file: memory by the window and `_KEPT_BYTES`, time by the budgets below.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import BinaryIO, NoReturn

from msgspec import Struct, field

from edge.models.verdict import HeaderVerdict, VerdictError, bad_version, damaged, ends_in_header, not_gguf

Scalar = int | float | str | bool

_WINDOW_BYTES = 256 * 1024
_KEPT_BYTES = 8 * 1024 * 1024  # of keys and values that are kept
_STRING_KEPT_BYTES = 4096  # longer values (chat templates) are skipped, their length is kept
DESCRIPTION, _DESCRIPTION_KEPT_BYTES = "general.description", 64 * 1024  # a page of its publisher
_TEXT_BYTES = 2 * 1024 * 1024  # of a key in `whole`; the longest published chat templates have 100 KB
_ARRAY_KEPT = 4096  # longer arrays are skipped, their length is kept
_KEY_BYTES = 65535  # the format's own limit
_NAME_BYTES = 127  # ggml itself allows 63
# Published files have under 100 keys.
_KEYS = 65536
_TENSORS = 65536  # the largest real ones have a few thousand
_STRINGS = 2_000_000  # in all arrays; vocabularies have 0.3 million tokens and 0.5 million merges

# gguf_type: 0 uint8, 1 int8, ... 6 float32, 10 uint64, 11 int64, 12 float64 (ggml/include/gguf.h).
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in zip((0, 1, 2, 3, 4, 5, 6, 10, 11, 12), "BbHhIifQqd", strict=True)
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


class RawTensor(Struct):
    """One tensor info as written."""

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int


class RawHeader(Struct):
    """A header as written. `lengths` holds the lengths of arrays, and of strings too long to keep, by key.

    `strings_at`: where in the file the strings of an array begin, by key.
    """

    version: int
    values: dict[str, Scalar] = field(default_factory=dict)
    arrays: dict[str, tuple[int | float | bool, ...]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    strings_at: dict[str, int] = field(default_factory=dict)
    tensors: list[RawTensor] = field(default_factory=list)
    end: int = 0  # where the header ends, before alignment


class GgufReader:
    """A cursor over `file`, which holds `size` bytes. Raises VerdictError for everything that exceeds them."""

    def __init__(self, file: BinaryIO, size: int, where: str, *, whole: str | None = None) -> None:
        """Start before the first byte. `whole`: a prefix of keys whose strings are kept at any length up to 2 MiB."""
        self._file = file
        self._whole = whole
        self._size = size
        self._where = where
        self._buffer = b""
        self._base = 0  # file offset of the buffer's first byte
        self._at = 0  # cursor within the buffer; may be past its end
        self._kept = 0
        self._strings = 0

    def header(self) -> RawHeader:
        """Read everything up to the tensor data."""
        raw, keys, tensors = self._start()
        for _ in range(keys):
            self._value(raw, self._key(raw))
        for _ in range(tensors):
            raw.tensors.append(self._tensor())
        raw.end = self._base + self._at
        return raw

    def strings(self, raw: RawHeader, key: str, numbers: Iterable[int]) -> list[str]:
        """Return some strings of an array after `header`; those beyond its end, or of no such array, are left out."""
        if key not in raw.strings_at:
            return []
        self._buffer, self._base, self._at = b"", raw.strings_at[key], 0
        found: list[str] = []
        at = 0
        for number in sorted({each for each in numbers if 0 <= each < raw.lengths[key]}):
            self._skip_strings(number - at)
            found.append(self._text(_STRING_KEPT_BYTES, f"string {number} of {key[:64]!r}"))
            at = number + 1
        return found

    def peek(self) -> RawHeader:
        """Read the first keys, up to the tokenizer's."""
        raw, keys, _ = self._start()
        for _ in range(min(keys, 64)):
            key = self._key(raw)
            if key.startswith("tokenizer."):
                break
            self._value(raw, key)
        return raw

    def _start(self) -> tuple[RawHeader, int, int]:
        if self._size:  # reading /proc/kmsg, whose size is 0, takes messages from its readers
            self._fill(32)
        # 512 bytes: enough to recognize web pages with a byte order mark or a comment before their first tag.
        wrong = not_gguf(self._buffer[:512], self._size)
        if wrong:
            self._fail(wrong)
        self._at = 4
        version = self._u32()
        wrong = bad_version(version)
        if wrong:
            self._fail(wrong)
        tensors, keys = self._u64(), self._u64()
        if tensors > _TENSORS or keys > _KEYS:
            self._fail(damaged(f"it claims {tensors:,} tensors and {keys:,} keys"))
        return RawHeader(version), keys, tensors

    def _key(self, raw: RawHeader) -> str:
        key = self._text(_KEY_BYTES, "a key")
        if not key or key in raw.values or key in raw.lengths:
            self._fail(damaged(f"key {key[:64]!r} is empty or occurs twice"))
        return key

    def _value(self, raw: RawHeader, key: str) -> None:
        kind = self._u32()
        if kind == _STRING:
            length = self._u64()
            wanted = self._whole is not None and key.startswith(self._whole) and length <= _TEXT_BYTES
            most = _DESCRIPTION_KEPT_BYTES if key == DESCRIPTION else _STRING_KEPT_BYTES
            if length <= most or wanted:
                raw.values[key] = self._take(length).decode("utf-8", "replace")
                self._keep(length)
            else:
                self._skip(length)
                raw.lengths[key] = length
        elif kind == _ARRAY:
            self._array(raw, key)
        elif kind == _BOOL:
            raw.values[key] = self._take(1) != b"\0"
        else:
            raw.values[key] = self._number(kind, key)

    def _array(self, raw: RawHeader, key: str) -> None:
        kind, count = self._u32(), self._u64()
        raw.lengths[key] = count
        if kind == _STRING:
            self._strings += count
            if self._strings > _STRINGS:
                self._fail(damaged(f"key {key[:64]!r} claims {count:,} strings"))
            raw.strings_at[key] = self._base + self._at
            self._skip_strings(count)
            return
        size = 1 if kind == _BOOL else self._layout(kind, key).size
        if count > _ARRAY_KEPT or key.startswith("tokenizer."):
            self._skip(count * size)
            return
        data = self._take(count * size)
        self._keep(count * 32)
        if kind == _BOOL:
            raw.arrays[key] = tuple(byte != 0 for byte in data)
        else:
            raw.arrays[key] = tuple(value for (value,) in self._layout(kind, key).iter_unpack(data))

    def _tensor(self) -> RawTensor:
        name = self._text(_NAME_BYTES, "a tensor name")
        count = self._u32()
        if count > 4:
            self._fail(damaged(f"tensor {name!r} has {count:,} dimensions"))
        dims = struct.unpack(f"<{count}Q", self._take(8 * count))
        return RawTensor(name, dims, self._u32(), self._u64())

    def _layout(self, kind: int, key: str) -> struct.Struct:
        layout = _SCALARS.get(kind)
        if layout is None:
            self._fail(damaged(f"key {key[:64]!r} has a value of unknown type {kind}"))
        return layout

    def _number(self, kind: int, key: str) -> int | float:
        layout = self._layout(kind, key)
        value: int | float = layout.unpack(self._take(layout.size))[0]
        self._keep(32)
        return value

    def _text(self, limit: int, what: str) -> str:
        length = self._u64()
        if length > limit:
            self._fail(damaged(f"{what} of {length:,} bytes"))
        self._keep(length + 64)
        return self._take(length).decode("utf-8", "replace")

    def _u32(self) -> int:
        self._fill(4)
        value: int = _U32(self._buffer, self._at)[0]
        self._at += 4
        return value

    def _u64(self) -> int:
        self._fill(8)
        value: int = _U64(self._buffer, self._at)[0]
        self._at += 8
        return value

    def _take(self, count: int) -> bytes:
        self._fill(count)
        data = self._buffer[self._at : self._at + count]
        self._at += count
        return data

    def _skip(self, count: int) -> None:
        self._at += count
        if self._base + self._at > self._size:
            self._fail(ends_in_header(self._size))

    def _skip_strings(self, count: int) -> None:
        """Skip `count` strings by their length fields: the hot loop, 0.5 million rounds for a large vocabulary."""
        while count:
            self._fill(8)
            buffer, at, last = self._buffer, self._at, len(self._buffer) - 8
            walked = 0
            for walked in range(1, count + 1):  # noqa: B007 (read after the loop)
                at += 8 + _U64(buffer, at)[0]
                if at > last:
                    break
            count -= walked
            self._at = at
            if self._base + at > self._size:
                self._fail(ends_in_header(self._size))

    def _fill(self, count: int) -> None:
        """Make `count` bytes readable at the cursor. Callers pass small counts, so the window stays small."""
        if self._at + count <= len(self._buffer):
            return
        position = self._base + self._at
        if position + count > self._size:
            if not self._buffer and self._size < count:
                count = self._size  # the very start of a tiny file: judged by its first bytes
            else:
                self._fail(ends_in_header(self._size))
        self._file.seek(position)
        self._buffer = self._file.read(max(count, _WINDOW_BYTES)) or b""  # None: a device with nothing to read now
        self._base, self._at = position, 0
        if len(self._buffer) < count:  # it shrank while we read
            self._fail(ends_in_header(position + len(self._buffer)))

    def _keep(self, count: int) -> None:
        self._kept += count
        if self._kept > _KEPT_BYTES:
            self._fail(damaged("its keys and values are larger than any real header"))

    def _fail(self, verdict: HeaderVerdict) -> NoReturn:
        raise VerdictError(verdict, self._where)
