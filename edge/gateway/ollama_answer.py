"""Translate llama-server's answers to Ollama's API, as they arrive. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, TypeVar

import msgspec

from edge.gateway.accounting import count
from edge.gateway.ollama import OllamaCall
from edge.linux.files import parse_foreign_json
from edge.units import MIB

NDJSON = "application/x-ndjson"
# Of a stream: a line that is not complete (the last one of /infill holds the prompt), and tool calls.
_MOST_KEPT_BYTES = 8 * MIB
_MOST_PARTS = 128  # of a line, before they are joined
_TOOL_BYTES = 500  # objects of one call


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None  # an object from engines beside llama.cpp


class _ToolCall(msgspec.Struct):
    index: int = 0
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Timings(msgspec.Struct):
    cache_n: float = 0.0
    prompt_n: float = 0.0
    prompt_ms: float = 0.0
    predicted_n: float = 0.0
    predicted_ms: float = 0.0


class _Embedding(msgspec.Struct):
    embedding: list[float]


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Chunk(msgspec.Struct):
    """An answer of llama-server, whole or one event of a stream. `content` and `stop_type` are of /infill."""

    choices: list[_Choice] = []
    data: list[_Embedding] = []
    content: str | None = None
    stop_type: str | None = None
    timings: msgspec.Raw = msgspec.Raw(b"null")
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)
_STRUCTS: dict[str, type[msgspec.Struct]] = {"delta": _Message, "message": _Message, "function": _Function}
_LISTS: dict[str, type[msgspec.Struct]] = {"choices": _Choice, "tool_calls": _ToolCall}
_TEXTS = frozenset({"content", "reasoning_content", "text"})
_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_Figures = TypeVar("_Figures", _Timings, _Usage)


def _read(data: bytes) -> _Chunk:
    """Return a chunk without its members of another type than llama-server's. Raises ValueError for no JSON object."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        return _salvaged(data, _Chunk)
    except msgspec.DecodeError:
        # Python's json writes NaN and half surrogates; msgspec reads neither.
        found = parse_foreign_json(data)
        return _salvaged(json.dumps(found, ensure_ascii=False).encode(errors="replace"), _Chunk)


def _salvaged(data: bytes | msgspec.Raw, kind: type[_Kind]) -> _Kind:
    found = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    values: dict[str, Any] = {}
    for each in msgspec.structs.fields(kind):
        with suppress(KeyError, ValueError, RecursionError):
            values[each.name] = _member(found[each.name], each.name, each.type)
    return kind(**values)


def _member(raw: msgspec.Raw, name: str, kind: Any) -> Any:
    """Return what can be read of a member: a number as text, of a list the good elements. Raises ValueError."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        if name in _STRUCTS:
            return _salvaged(raw, _STRUCTS[name])
        if name in _TEXTS and bytes(raw)[:1] in b"-0123456789":
            return bytes(raw).decode()
        if name not in _LISTS:
            raise
    good = []
    for each in msgspec.json.decode(raw, type=list[msgspec.Raw]):
        with suppress(ValueError, RecursionError):
            good.append(_salvaged(each, _LISTS[name]))
    return good


def _figures(raw: msgspec.Raw, kind: type[_Figures]) -> _Figures | None:
    """Return the figures that are numbers, None for no object: the text of the answer is good without them."""
    try:
        return msgspec.json.decode(raw, type=kind | None)
    except msgspec.ValidationError:
        with suppress(ValueError, RecursionError):
            return _salvaged(raw, kind)
    except (ValueError, RecursionError):
        pass
    return None


_json = msgspec.json.Encoder().encode


class OllamaAnswer:
    """The answer of one call, translated as it arrives. `clock` in seconds, monotonic; `wall` for created_at."""

    def __init__(self, call: OllamaCall, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.call = call
        self._clock = clock
        self._wall = wall
        self._began_s = self._sent_s = clock()
        self._pending: list[bytes] = []  # of a line that is not complete
        self._kept_bytes = 0  # of it and of the tool calls
        # Ollama sends a tool call whole, llama-server its arguments in pieces: they are collected until the end.
        self._tools: dict[int, _Function] = {}
        self._finish: str | None = None
        self._timings = _Timings()
        self._prompt_tokens: int | None = None
        self._ended = self.broken = False  # broken: with an error

    def sent(self) -> None:
        """Note that the engine gets the request now: the time before was spent waiting for it."""
        self._sent_s = self._clock()

    def feed(self, data: bytes) -> bytes:
        """Return the lines for the events in the next bytes of a stream."""
        # Chunks end anywhere, also within a character: only whole lines are decoded.
        first, *lines = data.split(b"\n")
        self._pending.append(first)
        self._kept_bytes += len(first)
        if lines:
            lines.insert(0, b"".join(self._pending))
            self._kept_bytes += len(lines[-1]) - len(lines[0])
            self._pending = [lines.pop()]
        elif self._kept_bytes > _MOST_KEPT_BYTES:
            return self._too_large()
        elif len(self._pending) > _MOST_PARTS:
            self._pending = [b"".join(self._pending)]
        found = []
        for line in lines:
            if line.startswith(b"data:") and not self._ended:
                event = line[5:].strip()
                found.append(self._end() if event == b"[DONE]" else self._event(event))
        return b"".join(found)

    def close(self) -> bytes:
        """Return what is missing at the end of the stream: /infill has no [DONE]."""
        if self._ended:
            return b""
        return self._end() if self._finish else self.failed("the engine ended the answer too early")

    def failed(self, message: str) -> bytes:
        """Return the line that ends a stream with an error."""
        self._ended = self.broken = True
        return _json({"error": message}) + b"\n"

    def whole(self, data: bytes) -> bytes:
        """Return the answer that is not streamed. Raises ValueError for an error, and for no JSON object."""
        if self.call.target == "/v1/embeddings":
            # Strict: without one of its vectors a list would name the wrong texts.
            return self._embeddings(_decoder.decode(data))
        chunk = _read(data)
        if chunk.error:
            raise ValueError(error_text(chunk.error))
        self._note(chunk)
        message = _text(chunk)
        return _json({**self._said(message.content or "", message.reasoning_content, self._tools), **self._final()})

    def loaded(self) -> bytes:
        """Return the answer to a request without a prompt."""
        reason = "unload" if self.call.keep_alive_s == 0 else "load"
        if self.call.target == "/v1/embeddings":
            return _json({**self._head(), "embeddings": []} if self.call.route == "/api/embed" else {"embedding": []})
        end = b"\n" if self.call.stream else b""
        return _json({**self._said("", None), "done": True, "done_reason": reason}) + end

    def _event(self, data: bytes) -> bytes:
        try:
            chunk = _read(data)
        except msgspec.ValidationError:
            return b""  # null, a number: JSON that says nothing
        except (ValueError, RecursionError) as error:
            return self.failed(f"the engine's answer cannot be read: {error}")
        if chunk.error:
            return self.failed(error_text(chunk.error))
        self._note(chunk, len(data))
        if self._kept_bytes > _MOST_KEPT_BYTES:
            return self._too_large()
        message = _text(chunk)
        if not message.content and not message.reasoning_content:
            return b""
        return _json({**self._said(message.content or "", message.reasoning_content), "done": False}) + b"\n"

    def _too_large(self) -> bytes:
        self._pending, self._tools, self._kept_bytes = [], {}, 0
        return b"" if self._ended else self.failed("a line or a tool call of the engine is too large")

    def _note(self, chunk: _Chunk, event_bytes: int = 0) -> None:
        """Keep what the last line needs: tool calls come in pieces, figures in the last events."""
        self._timings = _figures(chunk.timings, _Timings) or self._timings
        if (usage := _figures(chunk.usage, _Usage)) is not None:
            self._prompt_tokens = usage.prompt_tokens
        if chunk.stop_type not in (None, "none"):
            self._finish = "length" if chunk.stop_type == "limit" else "stop"
        for choice in chunk.choices[:1]:
            self._finish = choice.finish_reason or self._finish
            message = choice.delta or choice.message or _Message()
            for number, call in enumerate(message.tool_calls or []):
                at = call.index if choice.delta else number
                more = call.function.arguments
                self._kept_bytes += (at not in self._tools) * _TOOL_BYTES
                self._kept_bytes += len(more) if isinstance(more, str) else event_bytes if more else 0
                known = self._tools.setdefault(at, _Function(None, ""))
                known.name = call.function.name or known.name
                known.arguments = _joined(known.arguments, more)

    def _end(self) -> bytes:
        self._ended = True
        tools = _json({**self._said("", None, self._tools), "done": False}) + b"\n" if self._tools else b""
        return tools + _json({**self._said("", None), **self._final()}) + b"\n"

    def _head(self) -> dict[str, Any]:
        moment = datetime.fromtimestamp(self._wall(), timezone.utc).isoformat().replace("+00:00", "Z")
        return {"model": self.call.model, "created_at": moment}

    def _said(self, text: str, thinking: str | None, tools: Mapping[int, _Function] | None = None) -> dict[str, Any]:
        if self.call.route == "/api/generate":
            return {**self._head(), "response": text, **({"thinking": thinking} if thinking else {})}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if tools:
            message["tool_calls"] = [_tool(each) for each in tools.values()]
        return {**self._head(), "message": message}

    def _final(self) -> dict[str, Any]:
        timings = self._timings
        return {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "stop",
            **self._durations(),
            "prompt_eval_count": count(self._prompt_tokens or 0) or count(timings.prompt_n + timings.cache_n),
            "prompt_eval_duration": count(timings.prompt_ms * 1e6),
            "eval_count": count(timings.predicted_n),
            "eval_duration": count(timings.predicted_ms * 1e6),
        }

    def _durations(self) -> dict[str, int]:
        now_s = self._clock()
        total_s, load_s = now_s - self._began_s, self._sent_s - self._began_s
        return {"total_duration": int(total_s * 1e9), "load_duration": int(load_s * 1e9)}

    def _embeddings(self, chunk: _Chunk) -> bytes:
        if self.call.route == "/api/embeddings":
            return _json({"embedding": chunk.data[0].embedding if chunk.data else []})
        vectors = [_cut(each.embedding, self.call.dimensions) for each in chunk.data]
        usage = _figures(chunk.usage, _Usage)
        tokens = usage.prompt_tokens if usage is not None else None
        return _json(
            {**self._head(), "embeddings": vectors, **self._durations(), "prompt_eval_count": count(tokens or 0)}
        )


def _cut(vector: list[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` at length 1, as Ollama does; llama-server ignores them."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    length = math.hypot(*vector[:dimensions])
    return [value / length if length else 0.0 for value in vector[:dimensions]]


def _text(chunk: _Chunk) -> _Message:
    if not chunk.choices:
        return _Message(chunk.content)
    first = chunk.choices[0]
    return first.delta or first.message or _Message(first.text)


def _joined(known: str | dict[str, Any] | None, more: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Return arguments and their next piece; an object is whole."""
    if isinstance(known, str) and isinstance(more, str):
        return known + more
    return more or known or ""


def _tool(function: _Function) -> dict[str, Any]:
    arguments: Any = function.arguments or {}
    try:
        arguments = parse_foreign_json(arguments) if isinstance(arguments, str) else arguments
        # A model may write half of a surrogate pair, which no encoder takes.
        written = json.dumps(arguments, ensure_ascii=False).encode(errors="replace")
    except (ValueError, RecursionError):
        arguments = {}  # cut off by num_predict, or brackets without end
    return {
        "function": {
            "name": function.name or "",
            "arguments": msgspec.Raw(written) if arguments and isinstance(arguments, dict) else {},
        }
    }


def error_text(error: Any) -> str:
    """Return the message in an error of llama-server or of the gateway."""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
