"""Record one request for metrics and the access log."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter, deque

from msgspec import Struct, field

from edge.gateway import access_log
from edge.gateway.access_log import AccessEntry, AccessLog

# Keep the gateway's counters in plain Python: cheap to write, read by metrics.py on a scrape. Pure.

FIRST_TOKEN_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
BETWEEN_TOKENS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)
RECENT = 20  # requests on the status page
DURATION_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)


class Histogram:
    """`counts[i]` holds values ≤ bounds[i]; the last entry holds what is above all bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative buckets as prometheus_client takes them."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), total))
        return rows


class ModelStats(Struct):
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    between_tokens_s: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_S))
    duration_s: Histogram = field(default_factory=lambda: Histogram(DURATION_S))
    in_flight: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_per_s: float | None = None
    retries: int = 0  # sent once more, because the engine died before it answered
    cut: int = 0  # answers that broke off
    errors: int = 0  # answers that report an error of the engine, or lack their end
    gone: int = 0  # clients that left before the end of their answer


class Stats(Struct):
    """All counters, and the last requests to engines.

    `requests` is by (route, code, model), with "" as the model of the gateway's own routes. Routes are a closed set of
    names, so that the number of series is bounded.
    """

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    models: dict[str, ModelStats] = field(default_factory=dict)
    keys: Counter[str] = field(default_factory=Counter)  # requests by the name of their key
    recent: deque[AccessEntry] = field(default_factory=lambda: deque(maxlen=RECENT))

    def model(self, model: str) -> ModelStats:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelStats()
        return found


# Count tokens and times of one answer: tokens from its last bytes, times from its chunks. Pure.

# llama-server writes `usage` and `timings` at the end of an answer and of a stream; both fit into 1 KiB.
TAIL_BYTES = 4096

# Generated text that quotes such a key has its quotes escaped in JSON, so it does not match.
_NUMBER = re.compile(
    rb'[{,]\s*"(prompt_tokens|completion_tokens|input_tokens|output_tokens|prompt_n|predicted_n|cache_n'
    rb'|predicted_per_second|prompt_ms|tokens_evaluated|tokens_predicted)"\s*:\s*(-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)'
)


_USAGE = re.compile(rb'"usage"\s*:\s*\{')
# How an error begins that is too long to be kept: OpenAI's, Anthropic's, vLLM's.
_ERROR_HEAD = re.compile(rb'\s*\{\s*(?:"error"\s*:\s*[^\sn]|"(?:type|object)"\s*:\s*"error")')
_HEAD_BYTES = 64
# A piece of generated text that is not empty, in the streams of all APIs. Chunks without one are no tokens: the role,
# the progress of the prompt, comments that keep a connection open.
_TEXT = re.compile(rb'"(?:content|reasoning_content|text|thinking|delta|arguments)"\s*:\s*"[^"]')
# What the stream of a whole answer holds, by route. Quotes and line ends of generated text are escaped in JSON.
_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]")
# llama-server's own last event holds the whole prompt between `stop` and `stop_type` (to_json_non_oaicompat).
_STOP = re.compile(rb'"stop"\s*:\s*true|"stop_type"\s*:\s*"(?:eos|limit|word)"')
_ENDS = {
    "/v1/chat/completions": _DONE,
    "/chat/completions": _DONE,
    "/v1/completions": _DONE,
    "/completions": re.compile(_DONE.pattern + b"|" + _STOP.pattern),  # llama-server's own format, without [DONE]
    "/completion": _STOP,
    "/infill": _STOP,
    "/v1/messages": re.compile(rb'(?:^|\n)event: ?message_stop\b|"type"\s*:\s*"message_stop"'),
    "/v1/responses": re.compile(rb"(?:^|\n)event: ?response\.(?:in)?complete"),
    "/api/chat": re.compile(_DONE.pattern + b"|" + _STOP.pattern),
    "/api/generate": re.compile(_DONE.pattern + b"|" + _STOP.pattern),
}
_COMPLETED = _ENDS["/v1/responses"]  # its event holds the whole answer, so that its beginning may leave the tail
_MOST_TOKENS = 1e12  # more is no count: an engine or a model can make such a number appear


class TokenUsage(Struct, frozen=True):
    """None where the answer has no figure. `per_s` is the engine's own: tokens generated per second."""

    prompt: int | None = None
    completion: int | None = None
    per_s: float | None = None
    prompt_ms: float | None = None


def parse_tokens(tail: bytes) -> TokenUsage:
    """Read the figures in the last bytes of an answer. The last occurrence of a key wins.

    Of Anthropic's answer only `usage`, its last member: arguments of a tool call are JSON before it, whose names a
    client or a model chooses.
    """
    if b'"tool_use"' in tail and (usages := list(_USAGE.finditer(tail))):
        tail = tail[usages[-1].end() - 1 :]
    found = {
        key.decode(): number for key, value in _NUMBER.findall(tail) if 0 <= (number := float(value)) < _MOST_TOKENS
    }

    def first(*keys: str) -> int | None:
        return next((int(found[key]) for key in keys if key in found), None)

    evaluated = None
    if "prompt_n" in found:
        evaluated = int(found["prompt_n"] + found.get("cache_n", 0.0))
    return TokenUsage(
        prompt=_or(first("prompt_tokens", "input_tokens", "tokens_evaluated"), evaluated),
        completion=first("completion_tokens", "output_tokens", "predicted_n", "tokens_predicted"),
        per_s=found.get("predicted_per_second"),
        prompt_ms=found.get("prompt_ms"),
    )


def count(value: float) -> int:
    """Return whole units of an engine's figure; 0 for what is no measurement."""
    return int(value) if 0 <= value < 1e18 else 0


def _or(value: int | None, other: int | None) -> int | None:
    return other if value is None else value


def _error_line(line: bytes) -> bool:
    """Return whether a line of a stream reports an error. Older llama.cpp sent `error: {`."""
    name, _, value = line.partition(b":")
    if name == b"event":
        return value.strip() in (b"error", b"response.failed")
    if name == b"error":
        return value.lstrip().startswith(b"{")
    return name == b"data" and (b'"error"' in value or b".failed" in value) and _error_document(value)


def _error_document(text: bytes) -> bool:
    """Return whether a document is an error: OpenAI's envelope, Anthropic's and vLLM's, a failed or broken answer."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    if found.get("error") or found.get("object") == "error" or found.get("type") in ("error", "response.failed"):
        return True
    choices = found.get("choices")
    rows = choices if isinstance(choices, list) else []
    return any(isinstance(row, dict) and row.get("finish_reason") == "error" for row in rows)


class UsageCounter(Struct):
    """The running count of one answer. All times are seconds of one monotonic clock."""

    began_s: float
    between_s: Histogram | None = None  # observes the pauses between chunks
    first_s: float | None = None
    last_s: float | None = None
    size_bytes: int = 0
    chunks: int = 0
    _head: bytes = b""
    _tail: bytes = b""
    _error: bool = False  # an error event passed
    _completed: bool = False  # the last event of /v1/responses began
    _tokens: TokenUsage | None = None

    def chunk(self, data: bytes, now_s: float) -> None:
        """Count one chunk. Runs for each token of each stream, so it keeps the tail and looks for errors, no more."""
        if self.last_s is None:
            self.first_s, self._head = now_s, data[:_HEAD_BYTES]
        elif self.between_s is not None:
            self.between_s.observe(now_s - self.last_s)
        self.last_s = now_s
        self.size_bytes += len(data)
        self.chunks += 1
        self._tokens = None
        # Of the tail only the line that this chunk goes on: the lines before it were looked at.
        at = self._tail.rfind(b"\n") + 1
        if b"error" in data or b"response." in data or self._tail.find(b"error", at) >= 0:
            self._look(self._tail[at:] + data, cut=at == 0 and self.size_bytes > len(self._tail) + len(data))
        # Only the tail: an answer of megabytes costs no more memory than one of 4 KiB.
        self._tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self._tail + data)[-TAIL_BYTES:]

    def _look(self, text: bytes, *, cut: bool) -> None:
        """Note an error event, or the last event of /v1/responses. `cut`: the first line has lost its beginning."""
        lines = text.split(b"\n")
        self._error = self._error or any(map(_error_line, lines[cut:]))
        self._completed = self._completed or _COMPLETED.search(text) is not None

    @property
    def to_first_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.began_s

    @property
    def has_text(self) -> bool:
        """Whether the last bytes of the answer hold generated text."""
        return _TEXT.search(self._tail) is not None

    def tokens(self) -> TokenUsage:
        if self._tokens is None:
            self._tokens = parse_tokens(self._tail)
        return self._tokens

    def failed(self, route: str, streamed: bool) -> bool:
        """Return whether the answer reports an error, or is a stream that ended too early."""
        if not streamed:
            if self.size_bytes > TAIL_BYTES:
                return _ERROR_HEAD.match(self._head) is not None
            return b'"error"' in self._tail and _error_document(self._tail)
        self._look(self._tail, cut=self.size_bytes > len(self._tail))  # an event whose parts came in several chunks
        if self._error:
            return True
        end = _ENDS.get(route)
        return end is not None and not self._completed and end.search(self._tail) is None

    def per_s(self) -> float | None:
        """Return tokens per second: the engine's figure, otherwise from the times of the chunks."""
        known = self.tokens()
        if known.per_s is not None or not known.completion or self.first_s is None or self.last_s is None:
            return known.per_s
        took_s = self.last_s - self.first_s
        return (known.completion - 1) / took_s if took_s > 0 and known.completion > 1 else None


# nginx's code for a client that closed the connection before its answer.
GONE = 499


class RequestRecord(Struct):
    """One request, filled in while it is answered. `usage` is set where an engine answered it."""

    method: str
    began_s: float
    route: str = "other"
    code: int = GONE
    outcome: str = "ok"
    key: str | None = None
    key_hash: str | None = None  # a name may be given again, to another client
    admin: bool = False
    model: str | None = None
    usage: UsageCounter | None = None
    streamed: bool = False
    retried: bool = False
    prompt: str | None = None
    joules: float | None = None  # estimated; None where too few samples fell inside

    def refused(self) -> None:
        """Mark it as rejected by the gateway, unless the engine's answer had begun: then it counts as cut."""
        if self.outcome == "ok":
            self.outcome = "refused"

    def failed(self) -> None:
        """Mark it as failed after the answer began: the client gets an error event in place of the rest."""
        if self.outcome in ("ok", "refused"):
            self.outcome = "error"

    def finish(self, stats: Stats, now_s: float, log: AccessLog) -> None:
        """Add it to `stats` and write it to `log`."""
        if self.outcome == "ok" and self._failed():
            self.outcome = "error"
        stats.requests[self.route, str(self.code), self.model or ""] += 1
        if self.key is not None:
            stats.keys[self.key] += 1
        if self.model is not None:
            self._count(stats, self.model, now_s)
        if self.model is None and not log.wanted:
            return
        entry = self._entry(now_s)
        if self.model is not None:
            stats.recent.append(entry)
        if log.wanted:
            log.write(entry)

    def _failed(self) -> bool:
        """Return whether the engine's answer reports a failure, whatever its status."""
        if self.usage is None or not (self.usage.chunks or self.streamed):
            return False
        return self.code >= 500 or (self.code == 200 and self.usage.failed(self.route, self.streamed))

    def _count(self, stats: Stats, model_id: str, now_s: float) -> None:
        model = stats.model(model_id)
        model.duration_s.observe(now_s - self.began_s)
        model.retries += self.retried
        model.cut += self.outcome == "cut"
        model.errors += self.outcome == "error"
        model.gone += self.outcome == "gone"
        if self.usage is None:
            return
        if self.streamed and self.usage.to_first_s is not None:
            model.first_token_s.observe(self.usage.to_first_s)
        tokens = self.usage.tokens()
        model.prompt_tokens += tokens.prompt or 0
        model.completion_tokens += tokens.completion or 0
        model.last_per_s = self.usage.per_s() or model.last_per_s

    def _entry(self, now_s: float) -> access_log.AccessEntry:
        usage = self.usage or UsageCounter(self.began_s)
        tokens = usage.tokens()
        first_s = usage.to_first_s
        if not self.streamed:
            first_s = None if tokens.prompt_ms is None else tokens.prompt_ms / 1000
        return access_log.AccessEntry(
            method=self.method,
            route=self.route,
            code=self.code,
            took_s=now_s - self.began_s,
            outcome=self.outcome,
            key=self.key,
            model=self.model,
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            first_token_s=first_s,
            tokens_per_s=usage.per_s(),
            retried=self.retried,
            prompt=self.prompt,
            joules=self.joules,
        )
