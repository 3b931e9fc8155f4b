"""Count tokens and times of one answer: tokens from its last bytes, times from its chunks. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge.gateway.stats import Histogram

# llama-server writes `usage` and `timings` at the end of an answer and of a stream; both fit into 1 KiB.
TAIL_BYTES = 4096

# Generated text that quotes such a key has its quotes escaped in JSON, so it does not match.
_NUMBER = re.compile(
    rb'[{,]\s*"(prompt_tokens|completion_tokens|input_tokens|output_tokens|prompt_n|predicted_n|cache_n'
    rb'|predicted_per_second|prompt_ms|tokens_evaluated|tokens_predicted)"\s*:\s*(-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)'
)


# An error event starts a line; generated text cannot, since JSON escapes line ends. Older llama.cpp sent `error: {`.
_ERROR_EVENT = re.compile(rb'(?:^|\n)(?:event: (?:error|response\.failed)\b|data: \{\s*"error"\s*:|error: \{)')
_ERROR_DOCUMENT = re.compile(rb'\s*\{\s*"error"\s*:\s*[^\sn]')  # not null
# Streams of these routes end with `data: [DONE]`, of a whole answer only.
_DONE_ROUTES = frozenset({"/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions"})
_MOST_TOKENS = 1e12  # more is no count: an engine or a model can make such a number appear


@dataclass(frozen=True, slots=True)
class Tokens:
    """None where the answer has no figure. `per_s` is the engine's own: tokens generated per second."""

    prompt: int | None = None
    completion: int | None = None
    per_s: float | None = None
    prompt_ms: float | None = None


def parse_tokens(tail: bytes) -> Tokens:
    """Read the figures in the last bytes of an answer. The last occurrence of a key wins."""
    found = {
        key.decode(): number for key, value in _NUMBER.findall(tail) if 0 <= (number := float(value)) < _MOST_TOKENS
    }

    def first(*keys: str) -> int | None:
        return next((int(found[key]) for key in keys if key in found), None)

    evaluated = None
    if "prompt_n" in found:
        evaluated = int(found["prompt_n"] + found.get("cache_n", 0.0))
    return Tokens(
        prompt=_or(first("prompt_tokens", "input_tokens", "tokens_evaluated"), evaluated),
        completion=first("completion_tokens", "output_tokens", "predicted_n", "tokens_predicted"),
        per_s=found.get("predicted_per_second"),
        prompt_ms=found.get("prompt_ms"),
    )


def _or(value: int | None, other: int | None) -> int | None:
    return other if value is None else value


@dataclass(slots=True)
class Tally:
    """The running count of one answer. All times are seconds of one monotonic clock."""

    began_s: float
    between_s: Histogram | None = None  # observes the pauses between chunks
    first_s: float | None = None
    last_s: float | None = None
    size_bytes: int = 0
    chunks: int = 0
    _tail: bytes = b""
    _tokens: Tokens | None = None

    def chunk(self, data: bytes, now_s: float) -> None:
        """Count one chunk. Runs for each token of each stream, so it only keeps the tail."""
        if self.last_s is None:
            self.first_s = now_s
        elif self.between_s is not None:
            self.between_s.observe(now_s - self.last_s)
        self.last_s = now_s
        self.size_bytes += len(data)
        self.chunks += 1
        self._tokens = None
        self._tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self._tail + data)[-TAIL_BYTES:]

    @property
    def to_first_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.began_s

    def tokens(self) -> Tokens:
        if self._tokens is None:
            self._tokens = parse_tokens(self._tail)
        return self._tokens

    def failed(self, route: str, streamed: bool) -> bool:
        """Return whether the answer reports an error, or is a stream that ended too early."""
        if not streamed:
            return self.size_bytes <= TAIL_BYTES and _ERROR_DOCUMENT.match(self._tail) is not None
        if _ERROR_EVENT.search(self._tail):
            return True
        return route in _DONE_ROUTES and b"data: [DONE]" not in self._tail

    def per_s(self) -> float | None:
        """Return tokens per second: the engine's figure, otherwise from the times of the chunks."""
        known = self.tokens()
        if known.per_s is not None or not known.completion or self.first_s is None or self.last_s is None:
            return known.per_s
        took_s = self.last_s - self.first_s
        return (known.completion - 1) / took_s if took_s > 0 and known.completion > 1 else None
