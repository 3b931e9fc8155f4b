"""Render the access log: one line a request, as text or JSON; prompts only if they are turned on. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_PROMPT_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class AccessEntry:
    """One request. Times in seconds, None where unknown.

    `outcome`: ok, gone (the client left), cut (the engine died in mid-answer), error (the
    engine reported one, or its stream lacks its end), refused (by the gateway), bug.
    """

    method: str
    route: str
    code: int
    took_s: float
    outcome: str = "ok"
    key: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    retried: bool = False
    prompt: str | None = None
    joules: float | None = None  # estimated


def render_json(entry: AccessEntry) -> str:
    document: dict[str, Any] = {}
    for name in AccessEntry.__dataclass_fields__:
        value = getattr(entry, name)
        if value is not None:
            document[name] = round(value, 4) if isinstance(value, float) else value
    return json.dumps(document, ensure_ascii=True)


def render_text(entry: AccessEntry) -> str:
    """Return `POST /v1/chat/completions 200 ok 1.52s key=laptop model=chat tokens=31+120 first=0.08s 41.3 tok/s`."""
    parts = [entry.method, entry.route, str(entry.code), entry.outcome, f"{entry.took_s:.3f}s"]
    if entry.key is not None:
        parts.append(f"key={_plain(entry.key)}")
    if entry.model is not None:
        parts.append(f"model={_plain(entry.model)}")
    if entry.prompt_tokens is not None or entry.completion_tokens is not None:
        parts.append(f"tokens={_count(entry.prompt_tokens)}+{_count(entry.completion_tokens)}")
    if entry.first_token_s is not None:
        parts.append(f"first={entry.first_token_s:.3f}s")
    if entry.tokens_per_s is not None:
        parts.append(f"{entry.tokens_per_s:.1f} tok/s")
    if entry.joules is not None:
        parts.append(f"~{entry.joules:.1f} J")
    if entry.retried:
        parts.append("retried")
    if entry.prompt is not None:
        parts.append(f"prompt={json.dumps(entry.prompt)}")
    return " ".join(parts)


def prompt(body: bytes | None) -> str | None:
    """Return the first _PROMPT_CHARACTERS of a request's body, for `log_prompts`."""
    return None if body is None else body.decode("utf-8", "replace")[:_PROMPT_CHARACTERS]


def _plain(text: str) -> str:
    """Quote a name that could forge a second line or another field."""
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)
