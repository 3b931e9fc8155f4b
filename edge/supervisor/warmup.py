"""Which requests prove that an engine serves. Pure: bodies only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    body: dict[str, Any]


def first(role: str, chat_template: bool) -> tuple[Request, ...]:
    """One token, through the chat template where there is one. The next is tried if the engine refuses the first."""
    if role == "embedding":
        return (Request("/v1/embeddings", {"input": "warm"}),)
    if role == "rerank":
        return (Request("/v1/rerank", {"query": "warm", "documents": ["up"]}),)
    plain = Request("/completion", {"prompt": "Hello", "n_predict": 1, "cache_prompt": False})
    if not chat_template:
        return (plain,)
    message = [{"role": "user", "content": "Hello"}]
    chat = Request("/v1/chat/completions", {"messages": message, "max_tokens": 1, "cache_prompt": False})
    return (chat, plain)


def answered(request: Request, status: int, answer: Any) -> bool:
    """A real result, not only a 200: at least one token, vector or score."""
    if status != 200 or not isinstance(answer, dict):
        return False
    if request.path == "/completion":
        return int(answer.get("tokens_predicted", 0)) >= 1 or bool(answer.get("content"))
    if request.path == "/v1/chat/completions":
        return int(answer.get("usage", {}).get("completion_tokens", 0)) >= 1
    return bool(answer.get("data") or answer.get("results"))
