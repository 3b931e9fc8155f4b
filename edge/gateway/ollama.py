"""Render the routes that Ollama's clients use to find models. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from edge.gateway.openai import HttpFault, ListedModel

# Ollama's clients compare versions before they send requests.
VERSION = "0.0.0-edgellm"


def version() -> dict[str, Any]:
    return {"version": VERSION}


def tags(models: Iterable[ListedModel], started: int) -> dict[str, Any]:
    return {"models": [_model(model, started) for model in models]}


def running(models: Iterable[ListedModel], started: int) -> dict[str, Any]:
    """Return the loaded models. `expires_at` is the time of unloading in Ollama; here models stay loaded."""
    never = "2318-01-01T00:00:00Z"
    return {"models": [{**_model(model, started), "expires_at": never, "size_vram": 0} for model in models]}


def not_ollama(path: str, base: str) -> HttpFault:
    hint = f"use an OpenAI client with the base URL {base}/v1"
    return HttpFault(404, "no_ollama_api", f"{path[:100]} is Ollama's API, which edgellm does not have", hint)


def _model(model: ListedModel, started: int) -> dict[str, Any]:
    size, parameters = model.meta.get("size"), model.meta.get("n_params")
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": datetime.fromtimestamp(started, timezone.utc).isoformat().replace("+00:00", "Z"),
        "size": size if isinstance(size, int) else 0,
        "digest": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": str(model.meta.get("arch") or "llama"),
            "families": None,
            "parameter_size": f"{parameters / 1e9:.1f}B" if isinstance(parameters, (int, float)) else "",
            "quantization_level": str(model.meta.get("ftype") or ""),
        },
    }
