"""Choose the requests of the first completion and of the idle warm-up. Pure: bodies only."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from edge.board.board import Board
from edge.models.meta import ModelMeta
from edge.plan.plan import WARMUP_IMAGE_TOKENS, Images, LaunchPlan, Settings
from edge.supervisor.policy import ExpectedSpeed

SPEED_TOKENS = 16  # enough for a rate, and about a second at 16 tokens/s
TEMPLATE_TOKENS = 32  # of one word in most chat templates, without a default system prompt
AN_IMAGE = "an image"
_MOST_TOKENS_S = 1e6  # llama-server states it where it made no token, and it would be the baseline of later starts
A_TOKEN = 5  # any id: only the kernels for this number of tokens matter


class WarmupRequest(Struct, frozen=True):
    """A request to the engine. `prompt_tokens`: length of its prompt. `copies`: how many are sent at once."""

    path: str
    body: dict[str, Any]
    name: str = "one token"
    prompt_tokens: int = 1
    copies: int = 1


def first(role: str, chat_template: bool) -> tuple[WarmupRequest, ...]:
    """Return requests for one token, the cheapest first. If the engine refuses one, the next is sent.

    A raw prompt of one word takes one decode. The words of a chat template are some thirty tokens: 0.8 s more before
    the first answer of a 4.5 GB model on 8 Xeon cores.
    """
    if role == "embedding":
        return (WarmupRequest("/v1/embeddings", {"input": "warm"}),)
    if role == "rerank":
        return (WarmupRequest("/v1/rerank", {"query": "warm", "documents": ["up"]}),)
    completion = WarmupRequest("/completion", {"prompt": "Hello", "n_predict": 1, "cache_prompt": False})
    return (completion, _chat()) if chat_template else (completion,)


def _chat() -> WarmupRequest:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "cache_prompt": False}
    return WarmupRequest("/v1/chat/completions", body, "the chat template", TEMPLATE_TOKENS)


def _image(images: Images) -> WarmupRequest:
    """Return a request with one grey image: the first one allocates the projector's compute buffers."""
    url = "data:image/png;base64," + b64encode(grey_png(images.warmup_px)).decode()
    # A prompt that ends with an image aborts llama.cpp 0c1e57098 (GGML_ASSERT(batch.size() > 0), server-context.cpp).
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Hello"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "cache_prompt": False}
    return WarmupRequest("/v1/chat/completions", body, AN_IMAGE, images.like_tokens)


def grey_png(side: int) -> bytes:
    """Return a square image of 8 bits a pixel (www.w3.org/TR/png): a megapixel is 1 kB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\x80" * side) * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def idle(
    settings: Settings, lengths: tuple[int, ...], system_prompt: str, *, chat_template: bool = False
) -> Iterator[WarmupRequest]:
    """Yield the idle warm-up: speed, the chat template, prompts that fill a batch, an image, slots, the system prompt.

    The system prompt comes last: its KV cells stay in a slot for the first client.
    """
    if settings.role != "chat":
        return
    speed = {"prompt": [A_TOKEN], "n_predict": SPEED_TOKENS, "ignore_eos": True, "cache_prompt": False}
    yield WarmupRequest("/completion", speed, "speed")
    if chat_template:
        yield _chat()
    room = settings.n_ctx // max(1, settings.n_parallel) - 8
    for length in sorted({*lengths, settings.n_ubatch + 1}):
        if 1 < length <= room:
            body = {"prompt": [A_TOKEN] * length, "n_predict": 1, "cache_prompt": False}
            yield WarmupRequest("/completion", body, f"a prompt of {length} tokens", length)
    if settings.images and chat_template and room >= WARMUP_IMAGE_TOKENS:
        yield _image(settings.images)
    if settings.n_parallel > 1:
        body = {"prompt": [A_TOKEN] * 4, "n_predict": 2, "ignore_eos": True, "cache_prompt": False}
        yield WarmupRequest("/completion", body, "all slots", 4, settings.n_parallel)
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": "Hello"}]
        body = {"messages": messages, "max_tokens": 1, "cache_prompt": True}
        yield WarmupRequest("/v1/chat/completions", body, "the system prompt", len(system_prompt) // 3)


def answered(request: WarmupRequest, status: int, answer: Any) -> bool:
    """Return whether the answer holds at least one token, vector or score: a 200 alone is no proof."""
    if status != 200 or not isinstance(answer, dict):
        return False
    if request.path == "/completion":
        return _number(answer, "tokens_predicted") >= 1 or bool(answer.get("content"))
    if request.path == "/v1/chat/completions":
        return _number(answer.get("usage"), "completion_tokens") >= 1
    return bool(answer.get("data") or answer.get("results"))


def error_message(answer: Any) -> str:
    """Return the message of an engine's error document, as far as it has one."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:300] if message else "no message"


def timing(answer: Any, name: str) -> float | None:
    """Return a positive number from llama-server's `timings`; None where it is absent or no number."""
    value = _number(answer.get("timings") if isinstance(answer, dict) else None, name)
    return float(value) if 0 < value < _MOST_TOKENS_S else None


def _number(table: Any, name: str) -> float:
    """Return a number of an engine's table; 0 where there is no table, or none in it."""
    value = table.get(name) if isinstance(table, dict) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0


# Estimate how fast a model should answer on a board: from its memory bandwidth, or from the last good start.
# Pure.

# A mixture of experts reads its active experts for each token, and the rest (attention, embeddings, router) always.
_ALWAYS_READ = 0.25


def bytes_per_token(meta: ModelMeta) -> float:
    """Return how many bytes of weights one generated token reads."""
    used = meta.extra.get(f"{meta.arch}.expert_used_count")
    if meta.n_expert <= 1 or isinstance(used, (str, bool)) or not used:
        return float(meta.tensor_bytes)
    return meta.tensor_bytes * min(1.0, float(used) / meta.n_expert + _ALWAYS_READ)


def expected_speed(
    board: Board, meta: ModelMeta, plan: LaunchPlan, last_good_tokens_s: float | None
) -> ExpectedSpeed | None:
    """Return the last good start's speed on this rung, else bandwidth over bytes per token; None if neither is known.

    Generation is bound by memory bandwidth on every Jetson; without offload the CPU is, and nothing is expected.
    """
    if last_good_tokens_s is not None:
        return ExpectedSpeed(last_good_tokens_s, f"the {last_good_tokens_s:.1f} tokens/s of the last good start")
    if board.bandwidth_bytes_s is None or plan.settings.n_gpu_layers <= 0 or not meta.tensor_bytes:
        return None
    tokens_s = board.bandwidth_bytes_s / bytes_per_token(meta)
    return ExpectedSpeed(tokens_s, f"the {tokens_s:.1f} tokens/s that this board's memory allows")
