"""Models in an Ollama store, in place: manifests give names to blobs, which are GGUF files without that suffix.

models/manifests/<registry>/<namespace>/<name>/<tag>   JSON: layers with a media type, a digest and a size
models/blobs/sha256-<hex>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.linux.files import read_json
from edge.models.scan import ModelCandidate, size_of
from edge.models.source import is_plain

# github.com/ollama/ollama, server/manifest.go and server/layer.go.
_MODEL = "application/vnd.ollama.image.model"
_PROJECTOR = "application/vnd.ollama.image.projector"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")
SERVICE_MODELS = Path("/usr/share/ollama/.ollama/models")  # its installer's user `ollama` has this home
# Ollama's own namespace and tag, which its names leave out.
_LIBRARY, _LATEST = "library", "latest"


def stores(env: Mapping[str, str], *, named_only: bool = False) -> list[Path]:
    """Return the folders where Ollama keeps models: OLLAMA_MODELS, the user's, the service's. They need not exist."""
    if env.get("OLLAMA_MODELS"):
        return [Path(env["OLLAMA_MODELS"])]
    if named_only:
        return []
    own = [Path(env["HOME"]) / ".ollama/models"] if env.get("HOME", "").startswith("/") else []
    return [*own, SERVICE_MODELS]


def is_store(folder: Path) -> bool:
    """Return whether Ollama made this folder; False where this user may not look."""
    try:
        return (folder / "manifests").is_dir() and (folder / "blobs").is_dir()
    except OSError:
        # Path.is_dir() raises PermissionError before Python 3.14; ProtectHome= closes the user's home to a service.
        return False


def models(folder: Path) -> list[ModelCandidate]:
    """Return the models of a store, by name. What cannot be read or is no model of llama.cpp is left out."""
    found: dict[Path, ModelCandidate] = {}
    # Four levels: registry, namespace, name, tag.
    for manifest in sorted((folder / "manifests").glob("*/*/*/*")):
        candidate = _candidate(folder, manifest)
        if candidate is not None:
            found.setdefault(candidate.path, candidate)  # two tags of one blob are one model
    return list(found.values())


def of_blob(path: Path) -> ModelCandidate | None:
    """Return the model whose file is this blob; None for other files and blobs without a name."""
    if not _BLOB.fullmatch(path.name) or path.parent.name != "blobs":
        return None
    return next((one for one in models(path.parent.parent) if one.path == path), None)


def _candidate(folder: Path, manifest: Path) -> ModelCandidate | None:
    try:
        layers = read_json(manifest)["layers"]
        blobs = {str(layer["mediaType"]): blob for layer in reversed(layers) if (blob := _blob(folder, layer))}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    model = blobs.get(_MODEL)
    if model is None or size_of(model) is None:
        return None
    _, namespace, name, tag = manifest.parts[-4:]
    words = [*([] if namespace == _LIBRARY else [namespace]), name, *([] if tag == _LATEST else [tag])]
    title = "-".join(words)
    if not is_plain(title):
        return None
    return ModelCandidate(model, (model,), size_of(model) or 0, name=title, projector=blobs.get(_PROJECTOR))


def _blob(folder: Path, layer: Any) -> Path | None:
    match = _DIGEST.fullmatch(str(layer["digest"]))
    return folder / "blobs" / f"sha256-{match[1]}" if match else None
