"""Which requests prove that an engine serves, and which make its first answers fast. Pure: bodies only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edge.plan.plan import Settings

SPEED_TOKENS = 16  # enough for a rate, little enough for a slow board
A_TOKEN = 5  # any id: what is said does not matter, only that the kernels for this many tokens run


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt_tokens`: how long the prompt is, where that decides how long the answer takes. `copies`: at once."""

    path: str
    body: dict[str, Any]
    name: str = "one token"
    prompt_tokens: int = 1
    copies: int = 1


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


def idle(settings: Settings, lengths: tuple[int, ...], system_prompt: str) -> Iterator[Request]:
    """What is tried while nobody asks: speed, prompts that fill a batch, every slot, and the profile's system prompt.

    The system prompt comes last: its cells stay in a slot for the first user.
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
    """A real result, not only a 200: at least one token, vector or score."""
    if status != 200 or not isinstance(answer, dict):
        return False
    if request.path == "/completion":
        return int(answer.get("tokens_predicted", 0)) >= 1 or bool(answer.get("content"))
    if request.path == "/v1/chat/completions":
        return int(answer.get("usage", {}).get("completion_tokens", 0)) >= 1
    return bool(answer.get("data") or answer.get("results"))


def timing(answer: Any, name: str) -> float | None:
    """A figure of llama-server's `timings`, where it is one."""
    value = answer.get("timings", {}).get(name) if isinstance(answer, dict) else None
    return float(value) if isinstance(value, (int, float)) and value > 0 else None
