"""JSON documents of `edgellm model … --json`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from msgspec import to_builtins

from edge.cli.model_output import kv_bytes_per_token
from edge.models.catalogue import CatalogueRow
from edge.models.check import DeepReport
from edge.models.open import ModelFile
from edge.models.receipt import Receipt
from edge.models.survey import SurveyLine

# Raised when a field changes its meaning or goes; new fields do not raise it.
SCHEMA = 1


def dump(**document: Any) -> str:
    """Return a document with its schema number as JSON."""
    return json.dumps({"schema": SCHEMA, **document}, indent=2)


def line(one: SurveyLine) -> dict[str, Any]:
    """Return one line of the list."""
    header, verdict = one.summary, one.verdict
    return {
        "id": one.id,
        "usable": one.usable,
        "path": str(one.entry.path),
        "shards": [str(path) for path in one.entry.shards],
        "bytes": one.entry.bytes,
        "source": one.entry.source,
        "revision": one.entry.revision,
        "arch": header.arch if header else None,
        "parameters": header.parameters if header else None,
        "n_ctx_train": header.n_ctx_train if header else None,
        "tensor_bytes": header.tensor_bytes if header else None,
        "mmproj": str(one.mmproj) if one.mmproj else None,
        "verdict": {"kind": verdict.kind, "sentence": verdict.sentence, "hint": verdict.hint} if verdict else None,
        "notes": list(one.notes),
    }


def model(one: ModelFile, note: Receipt | None = None) -> dict[str, Any]:
    """Return one model without the names of its tensors."""
    meta = one.meta
    return {
        "id": f"{one.name}:{one.quant}",
        "name": one.name,
        "quant": one.quant,
        "path": one.path,
        "shards": list(one.shards),
        "bytes": one.bytes,
        "fingerprint": one.fingerprint,
        "mmproj": one.mmproj,
        "notes": list(one.notes),
        "source": note.to_json() if note else None,
        "arch": meta.arch,
        "n_layer": meta.n_layer,
        "n_embd": meta.n_embd,
        "n_head": meta.n_head,
        "n_head_kv": list(meta.n_head_kv),
        "key_length": meta.key_length,
        "value_length": meta.value_length,
        "sliding_window": meta.sliding_window,
        "n_expert": meta.n_expert,
        "n_ctx_train": meta.n_ctx_train,
        "n_vocab": meta.n_vocab,
        "chat_template": meta.chat_template,
        "tensor_bytes": meta.tensor_bytes,
        "tensors": dict(Counter(tensor.type for tensor in meta.tensors)),
        "kv_bytes_per_token": kv_bytes_per_token(meta),
    }


def checked(model: ModelFile, template_fault: str | None) -> dict[str, Any]:
    """Return one model of `model check`; `template_fault` is the engine's reason to refuse its chat template."""
    return {
        "id": f"{model.name}:{model.quant}",
        "path": model.path,
        "notes": list(model.notes),
        "template_fault": template_fault,
    }


def deep(report: DeepReport) -> dict[str, Any]:
    files = [to_builtins(file) for file in report.files]
    return {
        "healthy": report.healthy,
        "tensors": report.tensors,
        "unscanned": report.unscanned,
        "files": files,
        "bad": [{"tensor": bad.name, "type": bad.type, "scales": bad.scales} for bad in report.bad],
    }


def catalogue_row(one: CatalogueRow) -> dict[str, Any]:
    """Return a row of the catalogue."""
    quants = [
        {"quant": q.quant, "bytes": q.bytes, "exact": q.exact, "source": q.source, "sha256": list(q.sha256)}
        for q in one.quants
    ]
    return {
        "name": one.name,
        "family": one.family,
        "role": one.role,
        "licence": one.licence,
        "checked": one.checked,
        "read_on": one.read_on,
        "n_ctx_train": one.n_ctx_train,
        "kv_bytes_per_token": one.kv_bytes_per_token,
        "notes": list(one.notes),
        "quants": quants,
    }
