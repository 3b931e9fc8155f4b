"""Render errors and model lists in OpenAI's and llama-server's shapes. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

# llama-server's names (format_error_response in tools/server); those that it lacks follow their form.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    502: "upstream_error",
    503: "unavailable_error",
}


class HttpFault(Struct, frozen=True):
    """An error answer of the gateway. `kind` is stable, for programs; `hint` is one next step."""

    status: int
    kind: str
    message: str
    hint: str | None = None
    retry_after_s: float | None = None
    param: str | None = None
    evidence: str | None = None  # log lines and paths, for an admin key only

    def document(self, admin: bool = False) -> dict[str, Any]:
        """Return OpenAI's envelope with llama-server's `code`; `src` separates it from the engine's own errors."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.status,
            "src": "edgellm",
            "kind": self.kind,
            "hint": self.hint,
        }
        if admin and self.evidence is not None:
            error["evidence"] = self.evidence
        return {"error": error}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": retry_after(self.retry_after_s)}


def is_json(text: bytes) -> bool:
    """Return whether a body is a JSON object or array."""
    try:
        return isinstance(json.loads(text), (dict, list))
    except (ValueError, RecursionError):
        return False


def engine_error(model_id: str, status: int, reason: str | None) -> HttpFault:
    """Return a fault in place of an engine's answer that no API client can read."""
    message = f"the engine of model {model_id!r} answered {status} {reason or ''}".rstrip()
    hint = "edgellm logs --engine shows the engine's last lines"
    return HttpFault(status if status >= 400 else 502, "engine_error", message, hint)


def retry_after(seconds: float) -> str:
    """Return whole seconds, at least 1: a client that obeys 0 would retry without a pause."""
    return str(max(1, math.ceil(seconds)))


class ListedModel(Struct, frozen=True):
    """One model as /v1/models lists it; `meta` is empty until it is known."""

    id: str
    aliases: tuple[str, ...]
    meta: Mapping[str, Any]


def models_document(models: Iterable[ListedModel], created: int) -> dict[str, Any]:
    """Return llama-server's /v1/models: OpenAI's list and the older `models` list in one document."""
    listed = list(models)
    return {
        "models": [_old_entry(model) for model in listed],
        "object": "list",
        "data": [model_document(model, created) for model in listed],
    }


def model_document(model: ListedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.id,
        "aliases": list(model.aliases),
        "tags": [],
        "object": "model",
        "created": created,
        "owned_by": "llamacpp",
        "meta": dict(model.meta) or None,
    }


# llama-server leaves these fields blank as well: clients of Ollama's form need them to be there.
def _old_entry(model: ListedModel) -> dict[str, Any]:
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def sse_error(target: str, fault: HttpFault) -> bytes:
    """Return the last event of a broken stream, in the format of the route's API.

    It starts with a blank line, which ends an event that was cut off.
    """
    return b"\n\n" + sse_document(target, fault.document())


def sse_document(target: str, document: Any) -> bytes:
    """Return a document as an event; an error's envelope in the format of the route's API."""
    path = target.split("?", 1)[0]
    error = document.get("error") if isinstance(document, dict) else None
    name = ""
    if isinstance(error, dict):
        message = str(error.get("message") or "")
        # The client of each API knows one shape of error: Anthropic's, the Responses API's, or OpenAI's.
        if path.endswith("/messages"):
            document = {"type": "error", "error": {"type": "api_error", "message": message}}
            name = "event: error\n"
        elif path.endswith("/responses"):
            code = error.get("kind") or error.get("type")
            document = {"type": "error", "code": code, "message": message, "param": None}
            name = "event: error\n"
    return f"{name}data: {json.dumps(document)}\n\n".encode()


LOADING = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}


# The exception that ends a request with an answer of the gateway's own.


class RejectedError(Exception):
    """Ends a request with `fault` as its answer; only the handler catches it."""

    def __init__(self, fault: HttpFault) -> None:
        super().__init__(fault.message)
        self.fault = fault
