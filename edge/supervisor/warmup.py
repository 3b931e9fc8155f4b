"""Choose the requests of the first completion and of the idle warm-up. Pure: bodies only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edge.plan.plan import Settings

SPEED_TOKENS = 16  # enough for a rate, and about a second at 16 tokens/s
A_TOKEN = 5  # any id: only the kernels for this number of tokens matter


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the engine. `prompt_tokens`: length of its prompt. `copies`: how many are sent at once."""

    path: str
    body: dict[str, Any]
    name: str = "one token"
    prompt_tokens: int = 1
    copies: int = 1


def first(role: str, chat_template: bool) -> tuple[Request, ...]:
    """Return requests for one token, the chat template's first. If the engine refuses one, the next is sent."""
    if role == "embedding":
        return (Request("/v1/embeddings", {"input": "warm"}),)
    if role == "rerank":
        return (Request("/v1/rerank", {"query": "warm", "documents": ["up"]}),)
    completion = Request("/completion", {"prompt": "Hello", "n_predict": 1, "cache_prompt": False})
    if not chat_template:
        return (completion,)
    message = [{"role": "user", "content": "Hello"}]
    chat = Request("/v1/chat/completions", {"messages": message, "max_tokens": 1, "cache_prompt": False})
    return (chat, completion)


def idle(settings: Settings, lengths: tuple[int, ...], system_prompt: str) -> Iterator[Request]:
    """Yield the idle warm-up: speed, prompts that fill a batch, every slot, and the profile's system prompt.

    The system prompt comes last: its KV cells stay in a slot for the first client.
    """
    if settings.role != "chat":
        return
    speed = {"prompt": [A_TOKEN], "n_predict": SPEED_TOKENS, "ignore_eos": True, "cache_prompt": False}
    yield Request("/completion", speed, "speed")
    room = settings.n_ctx // max(1, settings.n_parallel) - 8
    for length in sorted({*lengths, settings.n_ubatch + 1}):
        if 1 < length <= room:
            body = {"prompt": [A_TOKEN] * length, "n_predict": 1, "cache_prompt": False}
            yield Request("/completion", body, f"a prompt of {length} tokens", length)
    if settings.n_parallel > 1:
        body = {"prompt": [A_TOKEN] * 4, "n_predict": 2, "ignore_eos": True, "cache_prompt": False}
        yield Request("/completion", body, "all slots", 4, settings.n_parallel)
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": "Hello"}]
        body = {"messages": messages, "max_tokens": 1, "cache_prompt": True}
        yield Request("/v1/chat/completions", body, "the system prompt", len(system_prompt) // 3)


def answered(request: Request, status: int, answer: Any) -> bool:
    """Return whether the answer holds at least one token, vector or score: a 200 alone is no proof."""
    if status != 200 or not isinstance(answer, dict):
        return False
    if request.path == "/completion":
        return int(answer.get("tokens_predicted", 0)) >= 1 or bool(answer.get("content"))
    if request.path == "/v1/chat/completions":
        return int(answer.get("usage", {}).get("completion_tokens", 0)) >= 1
    return bool(answer.get("data") or answer.get("results"))


def timing(answer: Any, name: str) -> float | None:
    """Return a positive number from llama-server's `timings`; None where it is absent or no number."""
    value = answer.get("timings", {}).get(name) if isinstance(answer, dict) else None
    return float(value) if isinstance(value, (int, float)) and value > 0 else None
