"""Deep check of a model: read every byte once, hash it and test every scale, in constant memory.

The scan needs numpy, which the package gguf (extra `tools`) brings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.errors import UnavailableError
from edge.models import receipt
from edge.models.header import read_header
from edge.models.meta import ModelMeta, Tensor
from edge.models.open import ModelFile
from edge.models.progress import Report, TransferMeter
from edge.models.quant import TENSOR_TYPES

# Positions of the floating-point scales in ggml's blocks: a NaN there spoils every answer. Data only.

# Types by the (offset in the block, format) of each of their scales.
_LAYOUTS: dict[tuple[tuple[int, str], ...], str] = {
    ((0, "f16"),): (
        "F16 Q1_0 Q2_0 Q4_0 Q5_0 Q8_0 IQ1_S IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS"  # the scale comes first
    ),
    ((0, "f16"), (2, "f16")): "Q4_1 Q5_1 Q8_1 Q4_K Q5_K",  # a scale and a minimum, or sum
    ((80, "f16"), (82, "f16")): "Q2_K",
    ((108, "f16"),): "Q3_K",
    ((208, "f16"),): "Q6_K",
    ((52, "f16"),): "TQ1_0",
    ((64, "f16"),): "TQ2_0",
    ((0, "bf16"),): "BF16",
    ((0, "f32"),): "F32 Q8_K",
    ((0, "f64"),): "F64",
    ((0, "e8m0"),): "MXFP4",
    # IQ1_M spreads its scale over four words and NVFP4's cannot be NaN: they are hashed, not scanned.
}
SCALES = {name: scales for scales, names in _LAYOUTS.items() for name in names.split()}

# Format -> (numpy type, mask of what is looked at, value from which it is infinite or no number).
FORMATS: dict[str, tuple[str, int, int]] = {
    "f16": ("<u2", 0x7FFF, 0x7C00),
    "bf16": ("<u2", 0x7FFF, 0x7F80),
    "f32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "f64": ("<u8", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "e8m0": ("u1", 0xFF, 0xFF),
}


# A multiple of every block's bytes fits, and numpy's temporaries stay in the L2 cache.
_PIECE_BYTES = 2 * 1024 * 1024


class FileReport(Struct, frozen=True):
    """One file. `expected` is the hash of its source, `recorded` the one on arrival; None is unknown."""

    path: str
    bytes: int
    sha256: str
    expected: str | None
    recorded: str | None = None

    @property
    def matches(self) -> bool:
        return {self.expected, self.recorded} <= {None, self.sha256}


class BadTensor(Struct, frozen=True):
    """A tensor with infinite or NaN scales."""

    name: str
    type: str
    scales: int


class DeepReport(Struct, frozen=True):
    """The result of a deep check. `unscanned`: tensors of types whose block layout is not listed in SCALES.

    `differences`: where the package gguf reads another header than we do; None where it could not read it.
    """

    files: tuple[FileReport, ...]
    tensors: int
    bad: tuple[BadTensor, ...]
    unscanned: int
    differences: tuple[str, ...] | None = ()

    @property
    def healthy(self) -> bool:
        return not self.bad and not self.differences and all(file.matches for file in self.files)


class _Piece(Struct, frozen=True):
    """A run of bytes of the file: whole blocks of one tensor, or bytes of none."""

    bytes: int
    tensor: Tensor | None


def check_deep(model: ModelFile, progress: Report | None = None, *, stores: Sequence[Path] = ()) -> DeepReport:
    """Check all files of a model. Raises UnavailableError without the extra `tools`, BadModelError, OSError.

    `stores`: in these a receipt's hash of the source was given by the source.
    """
    numpy = _numpy()
    folder = Path(model.path).parent
    note = receipt.as_trusted(receipt.read(folder), folder, stores)
    meter = TransferMeter("check", Path(model.path).name, model.bytes, progress)
    files, bad = [], []
    differences: list[str] | None = []
    tensors = unscanned = 0
    for shard in map(Path, model.shards):
        meta = read_header(shard)
        meter.what = shard.name
        scan = _Scan(numpy)
        digest = _stream(shard, meta, scan, meter)
        known = note.file(shard.name) if note else None
        expected, recorded = (known.expected, known.sha256) if known else (receipt.address(shard), None)
        files.append(FileReport(str(shard), meta.file_bytes, digest, expected, recorded))
        compared = compare_headers(shard, meta)
        differences = None if differences is None or compared is None else [*differences, *compared]
        bad += [BadTensor(name, kind, count) for (name, kind), count in scan.found.items()]
        tensors += len(meta.tensors)
        unscanned += sum(1 for tensor in meta.tensors if tensor.type not in SCALES and not tensor.type.startswith("I"))
    meter.end()
    return DeepReport(tuple(files), tensors, tuple(bad), unscanned, None if differences is None else tuple(differences))


def compare_headers(path: Path, meta: ModelMeta) -> list[str] | None:
    """Return where llama.cpp's own Python reader finds other tensors; None where it cannot read the file.

    It maps the file and trusts it, so it runs only here, after our reader has found every size within the file.
    """
    from gguf import GGUFReader

    try:
        theirs = {
            tensor.name: (
                tensor.tensor_type.name,
                tuple(map(int, tensor.shape)),
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in GGUFReader(path).tensors
        }
    except (ValueError, KeyError, IndexError, OSError, MemoryError):  # a type or version newer than the package
        return None
    ours = {
        tensor.name: (tensor.type, tensor.shape, meta.data_offset + tensor.offset, tensor.bytes)
        for tensor in meta.tensors
    }
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return [f"{path.name}: {name}: {ours.get(name)} here, {theirs.get(name)} in gguf" for name in names[:10]]


class _Scan:
    """Counts of scales that are not finite, by tensor."""

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy
        self.found: dict[tuple[str, str], int] = {}

    def look(self, tensor: Tensor, data: memoryview) -> None:
        block = _block_bytes(tensor.type)
        rows = self._numpy.frombuffer(data, "u1").reshape(-1, block)
        for offset, form in SCALES.get(tensor.type, ()):
            kind, mask, limit = FORMATS[form]
            width = self._numpy.dtype(kind).itemsize
            values = rows[:, offset : offset + width].view(kind)
            masked = values & self._numpy.array(mask, kind)
            # max() first: it makes no array, and almost every piece is fine.
            if int(masked.max(initial=0)) >= limit:
                key = (tensor.name, tensor.type)
                self.found[key] = self.found.get(key, 0) + int((masked >= limit).sum())


def _stream(path: Path, meta: ModelMeta, scan: _Scan, meter: TransferMeter) -> str:
    """Read the file once, in order, through one buffer. A hash thread would gain little: the scan takes a tenth."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        for piece in _pieces(meta):
            view = buffer[: piece.bytes]
            _read(file, view)
            digest.update(view)
            if piece.tensor is not None:
                scan.look(piece.tensor, view)
            meter.add(piece.bytes)
    return digest.hexdigest()


def _pieces(meta: ModelMeta) -> Iterator[_Piece]:
    """Yield the whole file as pieces: header, tensors in whole blocks, and the padding between."""
    at = 0
    for tensor in sorted(meta.tensors, key=lambda tensor: tensor.offset):
        begin = meta.data_offset + tensor.offset
        if begin < at or not tensor.bytes:
            continue  # tensors that share their bytes are read once
        yield from _plain(begin - at)
        known = tensor.type in SCALES
        block = _block_bytes(tensor.type) if known else 1
        step = _PIECE_BYTES // block * block
        for start in range(0, tensor.bytes, step):
            yield _Piece(min(step, tensor.bytes - start), tensor if known else None)
        at = begin + tensor.bytes
    yield from _plain(meta.file_bytes - at)


def _plain(count: int) -> Iterator[_Piece]:
    for start in range(0, count, _PIECE_BYTES):
        yield _Piece(min(_PIECE_BYTES, count - start), None)


def _block_bytes(name: str) -> int:
    return next((kind.bytes for kind in TENSOR_TYPES.values() if kind.name == name), 1)


def _read(file: FileIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError("the file became shorter while it was read")
        view = view[count:]


def _numpy() -> Any:
    try:
        import gguf  # noqa: F401
        import numpy
    except ImportError as error:
        raise UnavailableError(
            "check --deep needs the packages numpy and gguf", "install them: pip install 'edgellm[tools]'"
        ) from error
    return numpy
