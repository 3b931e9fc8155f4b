"""Quantize an installed model with the engine's llama-quantize."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter, deque
from collections.abc import Mapping
from math import prod
from pathlib import Path

from msgspec import Struct

from edge.engine.engine import Engine
from edge.errors import BadDataError, EdgeError, EngineMissingError, UsageError
from edge.linux.files import sha256_file
from edge.models.disk import need_space, tied
from edge.models.header import read_header
from edge.models.job import Job, job
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile, open_model
from edge.models.progress import Report, TransferMeter
from edge.models.quant import FILE_TYPES, TENSOR_TYPES, base_types, canonical
from edge.models.receipt import InstalledFile, Receipt, now_utc

# What may be quantized without much loss. The first three are not quantized at all.
_WHOLE = ("F32", "F16", "BF16")
_GOOD = (*_WHOLE, "Q8_0")
# Lines of tools/quantize and src/llama-quant.cpp.
_STEP = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+(\S+)")
_FELL_BACK = re.compile(r"(\d+) of (\d+) tensor\(s\) required fallback")


class QuantizeResult(Struct, frozen=True):
    """The result. `mix` counts tensors by type; `fallbacks` is the tool's own count."""

    model: ModelFile
    mix: dict[str, int]
    fallbacks: int


def tool_of(engine: Engine) -> Path:
    """Return the llama-quantize beside the engine's llama-server. Raises EngineMissingError."""
    tool = Path(engine.path).parent / "llama-quantize"
    if engine.kind != "llama-server" or not os.access(tool, os.X_OK):
        raise EngineMissingError(
            f"engine {engine.id} has no llama-quantize beside it", "build one that has: edgellm build"
        )
    return tool


def will_fall_back(meta: ModelMeta, label: str) -> int:
    """Count tensors whose rows the type's blocks do not divide: llama-quantize gives them a larger type."""
    blocks = [kind.block for kind in TENSOR_TYPES.values() if kind.name in base_types(label)]
    block = max(blocks, default=1)
    return sum(1 for tensor in meta.tensors if len(tensor.shape) > 1 and tensor.shape[0] % block)


def quantize(
    model: ModelFile,
    to: str,
    models_dir: Path,
    tool: Path,
    *,
    force: bool = False,
    library_path: str | None = None,
    progress: Report | None = None,
) -> QuantizeResult:
    """Make a model `NAME:TO` in `models_dir`. A failed or killed try leaves nothing.

    Raises UsageError (unknown quant, lossy input without `force`), DoesNotFitError, EdgeError with the tool's words.
    """
    label = _wanted(to, model, force)
    name = f"{model.name}-{label}"
    with job(models_dir, name, f"{model.fingerprint} {label} {tool}", "quantize", model.path) as work:
        if work.present([f"{name}.gguf"]):
            fallbacks = 0
        else:
            need_space(work.folder, _estimate(model.meta, label))
            target = work.payload / f"{name}.gguf"
            fallbacks = _run(tool, model, target, label, library_path, progress)
            _verify_and_install(work, target, model, label, progress)
    made = open_model(work.final / f"{name}.gguf")
    return QuantizeResult(made, dict(Counter(tensor.type for tensor in made.meta.tensors)), fallbacks)


def _wanted(to: str, model: ModelFile, force: bool) -> str:
    label = canonical(to)
    if label not in FILE_TYPES.values():
        raise UsageError(f"no quantization is called {to}", f"known: {' '.join(FILE_TYPES.values())}")
    if model.meta.quant == label:
        raise UsageError(f"{model.name} is {label} already", "name another with --to")
    if model.meta.quant not in _GOOD and not force:
        raise UsageError(
            f"{model.name} is {model.meta.quant}: what it has lost does not come back, and more is lost",
            f"start from one of {', '.join(_GOOD)}, or insist with --force",
        )
    return label


def _estimate(meta: ModelMeta, label: str) -> int:
    """Estimate the bytes of the result, rather too high: the base type for all weights, plus a fifth."""
    kinds = [kind for kind in TENSOR_TYPES.values() if kind.name in base_types(label)]
    density = max(kind.bytes / kind.block for kind in kinds)
    count = sum(prod(tensor.shape) for tensor in meta.tensors)
    return meta.data_offset + int(count * density * 1.2)


def _run(
    tool: Path, model: ModelFile, target: Path, label: str, library_path: str | None, progress: Report | None
) -> int:
    """Run the tool to its end and return its count of fallbacks."""
    # llama-quantize refuses quantized input without it.
    again = [] if model.meta.quant in _WHOLE else ["--allow-requantize"]
    # The tool's name for this file type (tools/quantize/quantize.cpp).
    name = {"MXFP4": "MXFP4_MOE"}.get(label, label)
    threads = str(len(os.sched_getaffinity(0)))
    command = tied([str(tool), *again, model.path, str(target), name, threads])
    meter = TransferMeter("quantize", target.name, model.meta.tensor_bytes, progress)
    last: deque[str] = deque(maxlen=40)
    fallbacks = 0
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(library_path),
        text=True,
        errors="replace",
    ) as child:
        try:
            for line in child.stdout or ():
                last.append(line.rstrip())
                if step := _STEP.search(line):
                    meter.at(model.meta.tensor_bytes * int(step[1]) // max(1, int(step[2])))
                elif counted := _FELL_BACK.search(line):
                    fallbacks = int(counted[1])
        except BaseException:
            child.kill()
            raise
    code = child.returncode
    if code:
        raise EdgeError(f"llama-quantize failed: {_words(last, code)}", "nothing was installed; see its messages")
    meter.end()
    return fallbacks


def _environment(library_path: str | None) -> Mapping[str, str]:
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}
    return env | ({"LD_LIBRARY_PATH": library_path} if library_path else {})


def _words(lines: deque[str], code: int) -> str:
    """Return the lines that name the fault, else the last line, and how the tool ended."""
    said = [line.strip()[:300] for line in lines if line.strip()]
    named = [line for line in said if re.search(r"fail|error|disabled|unable|cannot|exception", line, re.IGNORECASE)]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{'; '.join(named[-2:] or said[-1:])} ({ended})".strip()


def _verify_and_install(work: Job, target: Path, model: ModelFile, label: str, progress: Report | None) -> None:
    """Check that the result is whole and has every tensor of its source: the exit code alone is not trusted."""
    meta = read_header(target)
    before, after = {t.name for t in model.meta.tensors}, {t.name for t in meta.tensors}
    if before != after:
        lost = sorted(before ^ after)
        raise BadDataError(f"the result differs in tensor {lost[0]}", "nothing was installed; report this engine")
    meter = TransferMeter("verify", target.name, meta.file_bytes, progress)
    file = InstalledFile(target.name, meta.file_bytes, sha256_file(target, meter.add))
    meter.end()
    note = f"quantized to {label} from {model.quant}"
    work.install(Receipt(f"file://{model.path}", (file,), None, now_utc(), (note,), model.name))
