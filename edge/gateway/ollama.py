"""Translate Ollama's chat, generate and embedding requests to llama-server's API, and the answers back. Pure.

Sources: docs/api.md of Ollama 0.12, and the requests of its Python and JavaScript clients.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec
from msgspec import Struct

from edge.gateway.accounting import count
from edge.gateway.openai import HttpFault, RejectedError

NDJSON = "application/x-ndjson"
# Options that llama-server takes under the same name in a request body (tools/server/README.md).
_SAME_OPTIONS = frozenset({"seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "stop"}) | {
    "repeat_last_n",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
}
_DURATION = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_YEAR_S = 365 * 86400.0
_IMAGES = ((b"\x89PNG", "png"), (b"GIF8", "gif"), (b"RIFF", "webp"))


class OllamaCall(Struct, frozen=True):
    """One request, translated. `only_loads`: it has no prompt, which in Ollama loads or unloads the model.

    `keep_alive_s`: None where it is absent; 0 unloads when idle, negative never.
    """

    route: str
    model: str
    target: str
    body: bytes
    stream: bool
    only_loads: bool = False
    keep_alive_s: float | None = None


def read_call(route: str, data: bytes | None) -> OllamaCall:
    """Translate a request for one of routes.OLLAMA. Raises RejectedError if it cannot be translated."""
    try:
        asked = msgspec.json.decode(data or b"")
        if not isinstance(asked, dict):
            raise ValueError("not an object")
        model = asked.get("model") or asked.get("name")
        if not isinstance(model, str):
            raise _bad("model is required")
        return _call(route, model, asked)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise _bad(f"the request cannot be read: {error}") from error


def _call(route: str, model: str, asked: dict[str, Any]) -> OllamaCall:
    keep_alive_s = _seconds(asked.get("keep_alive"))
    if route in ("/api/embed", "/api/embeddings"):
        words = asked.get("prompt" if route == "/api/embeddings" else "input") or ""
        body = {"model": model, "input": words, **_picked(asked, "dimensions")}
        return OllamaCall(route, model, "/v1/embeddings", _json(body), False, not words, keep_alive_s)
    stream = asked.get("stream") is not False
    common = {"model": model, "stream": stream, **_options(asked)}
    # Without it the engine sends no prompt_tokens in a stream.
    if stream:
        common["stream_options"] = {"include_usage": True}
    if route == "/api/chat":
        messages = asked.get("messages") or []
        body = {**common, "messages": _messages(messages), **_picked(asked, "tools")}
        return OllamaCall(route, model, "/v1/chat/completions", _json(body), stream, not messages, keep_alive_s)
    prompt, images = asked.get("prompt") or "", asked.get("images") or []
    if asked.get("suffix"):
        target, body = "/infill", {**common, "input_prefix": prompt, "input_suffix": asked["suffix"]}
        body["n_predict"] = body.pop("max_tokens", -1)
    elif asked.get("raw"):
        target, body = "/v1/completions", {**common, "prompt": prompt}
    else:
        messages = [{"role": "user", "content": prompt, "images": images}]
        if asked.get("system"):
            messages.insert(0, {"role": "system", "content": asked["system"]})
        target, body = "/v1/chat/completions", {**common, "messages": _messages(messages)}
    return OllamaCall(route, model, target, _json(body), stream, not (prompt or images), keep_alive_s)


def _options(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return llama-server's names of `options`, `format` and `think`. `num_ctx` is the plan's: it is not passed."""
    options = asked.get("options") or {}
    found = {name: options[name] for name in _SAME_OPTIONS if options.get(name) is not None}
    most = options.get("num_predict")
    if isinstance(most, int) and most >= 0:  # -1 and -2 are no limit
        found["max_tokens"] = most
    shape = asked.get("format")
    if shape == "json":
        found["response_format"] = {"type": "json_object"}
    elif isinstance(shape, dict):
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": shape}}
    think = asked.get("think")
    if isinstance(think, bool):
        found["chat_template_kwargs"] = {"enable_thinking": think}
    elif isinstance(think, str):
        found["chat_template_kwargs"] = {"enable_thinking": True, "reasoning_effort": think}
    return found


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI's messages. Ollama's tool calls have no ids: results belong to the calls in their order."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id and function
    count = 0
    for message in messages:
        role, content = message.get("role") or "user", message.get("content") or ""
        made: dict[str, Any] = {"role": role, "content": content}
        if message.get("images"):
            parts = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in message["images"]]
            made["content"] = [*parts, {"type": "text", "text": content}]  # in Ollama's order (server/prompt.go)
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        calls = []
        for call in message.get("tool_calls") or []:
            function, count = call["function"], count + 1
            arguments = function.get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            ident = str(call.get("id") or f"call_{count}")
            open_calls.append((ident, function["name"]))
            calls.append({"id": ident, "type": "function", "function": {"name": function["name"], "arguments": text}})
        if calls:
            made["tool_calls"], made["content"] = calls, made["content"] or None
        if role == "tool":
            made["tool_call_id"] = _answered(open_calls, message)
        found.append(made)
    return found


def _answered(open_calls: list[tuple[str, str]], message: Mapping[str, Any]) -> str:
    """Take the call that a tool's message answers: by its id or name, otherwise the oldest."""
    names = {message.get("tool_call_id"), message.get("tool_name"), message.get("name")} - {None}
    chosen = next((call for call in open_calls if names & set(call)), open_calls[0] if open_calls else ("call_0", ""))
    if chosen in open_calls:
        open_calls.remove(chosen)
    return chosen[0]


def _data_url(image: str) -> str:
    """Return a data: URL of an image in Base64; its type is in its first bytes."""
    try:
        head = base64.b64decode(image[:16], validate=True)
    except (binascii.Error, TypeError) as error:
        raise _bad("images must be Base64") from error
    kind = next((kind for magic, kind in _IMAGES if head.startswith(magic)), "jpeg")
    return f"data:image/{kind};base64,{image}"


def _seconds(keep_alive: object) -> float | None:
    """Return seconds of `keep_alive`: a number, or Go's notation such as `5m`; -1, never, for more than a year."""
    if keep_alive is None or isinstance(keep_alive, bool):
        return None
    seconds = _duration(str(keep_alive).strip())
    return seconds if seconds < _YEAR_S else -1.0  # `inf`, `nan` and 400 digits too


def _duration(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text.lstrip("+-"):
        raise _bad(f"keep_alive {text[:50]!r} is not a duration such as 5m")
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    return -seconds if text.startswith("-") else seconds


def _picked(asked: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: asked[name] for name in names if asked.get(name)}


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


def _bad(message: str) -> RejectedError:
    return RejectedError(HttpFault(400, "bad_request", message, None))


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


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
    timings: _Timings | None = None
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


class OllamaAnswer:
    """The answer of one call, translated as it arrives. `clock` in seconds, monotonic; `wall` for created_at."""

    def __init__(self, call: OllamaCall, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.call = call
        self._clock = clock
        self._wall = wall
        self._began_s = self._sent_s = clock()
        self._pending = b""
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
        *lines, self._pending = (self._pending + data).split(b"\n")
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
        """Return the answer that is not streamed. Raises ValueError."""
        chunk = _decoder.decode(data)
        if self.call.route == "/api/embed":
            return _json({**self._head(), "embeddings": [each.embedding for each in chunk.data], **self._embed(chunk)})
        if self.call.route == "/api/embeddings":
            return _json({"embedding": chunk.data[0].embedding if chunk.data else []})
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
            chunk = _decoder.decode(data)
        except (ValueError, RecursionError) as error:
            return self.failed(f"the engine's answer cannot be read: {error}")
        if chunk.error is not None:
            return self.failed(error_text(chunk.error))
        self._note(chunk)
        message = _text(chunk)
        if not message.content and not message.reasoning_content:
            return b""
        return _json({**self._said(message.content or "", message.reasoning_content), "done": False}) + b"\n"

    def _note(self, chunk: _Chunk) -> None:
        """Keep what the last line needs: tool calls come in pieces, figures in the last events."""
        self._timings = chunk.timings or self._timings
        if chunk.usage is not None:
            self._prompt_tokens = chunk.usage.prompt_tokens
        if chunk.stop_type not in (None, "none"):
            self._finish = "length" if chunk.stop_type == "limit" else "stop"
        for choice in chunk.choices[:1]:
            self._finish = choice.finish_reason or self._finish
            message = choice.delta or choice.message or _Message()
            for number, call in enumerate(message.tool_calls or []):
                at = call.index if choice.delta else number
                known = self._tools.setdefault(at, _Function(None, ""))
                known.name = call.function.name or known.name
                known.arguments = (known.arguments or "") + (call.function.arguments or "")

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
            "prompt_eval_count": self._prompt_tokens or count(timings.prompt_n + timings.cache_n),
            "prompt_eval_duration": count(timings.prompt_ms * 1e6),
            "eval_count": count(timings.predicted_n),
            "eval_duration": count(timings.predicted_ms * 1e6),
        }

    def _durations(self) -> dict[str, int]:
        now_s = self._clock()
        total_s, load_s = now_s - self._began_s, self._sent_s - self._began_s
        return {"total_duration": int(total_s * 1e9), "load_duration": int(load_s * 1e9)}

    def _embed(self, chunk: _Chunk) -> dict[str, int]:
        tokens = chunk.usage.prompt_tokens if chunk.usage is not None else None
        return {**self._durations(), "prompt_eval_count": tokens or 0}


def _text(chunk: _Chunk) -> _Message:
    if not chunk.choices:
        return _Message(chunk.content)
    first = chunk.choices[0]
    return first.delta or first.message or _Message(first.text)


def _tool(function: _Function) -> dict[str, Any]:
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = {}  # cut off by num_predict, or brackets without end
    return {"function": {"name": function.name or "", "arguments": arguments if isinstance(arguments, dict) else {}}}


def error_text(error: Any) -> str:
    """Return the message in an error of llama-server or of the gateway."""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
