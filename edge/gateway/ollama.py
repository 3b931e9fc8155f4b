"""Translate Ollama's chat, generate and embedding requests to llama-server's API. Pure.

Sources: docs/api.md of Ollama 0.12, and the requests of its Python and JavaScript clients.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from edge.gateway.openai import HttpFault, RejectedError

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
_json = msgspec.json.Encoder().encode
# Up to a kilobyte each once they are built: 60 MB of `{},` took 6 GB. Commas in strings are not counted.
_MOST_VALUES = 32_768
_STRING_OR_VALUE = re.compile(rb'"[^"]*"?|[,{\[]')
_DURATION = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_YEAR_S = 365 * 86400.0
_IMAGES = ((b"\x89PNG", "png"), (b"GIF8", "gif"), (b"RIFF", "webp"))


class OllamaCall(Struct, frozen=True):
    """One request, translated. `only_loads`: it has no prompt, which in Ollama loads or unloads the model.

    `keep_alive_s`: None where it is absent; 0 unloads when idle, negative never. `dimensions`: None keeps all.
    `cuts`: texts that exceed the context are cut.
    """

    route: str
    model: str
    target: str
    body: bytes
    stream: bool
    only_loads: bool = False
    keep_alive_s: float | None = None
    dimensions: int | None = None
    cuts: bool = False


def read_call(route: str, data: bytes | None) -> OllamaCall:
    """Translate a request for one of routes.OLLAMA. Raises RejectedError if it cannot be translated."""
    if _has_too_many_values(data or b""):
        raise _bad(f"more than {_MOST_VALUES} values in one request")
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


def _has_too_many_values(data: bytes) -> bool:
    """Return whether a document has more values than may be built; looks no further than the first too many."""
    if sum(map(data.count, (b",", b"{", b"["))) <= _MOST_VALUES:  # with those in strings: of Base64 there are none
        return False
    # Without escaped quotes: a regex that knows them takes seconds for 60 MB, and lets no other thread run meanwhile.
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    found = (one for one in _STRING_OR_VALUE.finditer(plain) if plain[one.start()] != ord('"'))
    return next(islice(found, _MOST_VALUES, None), None) is not None


def _call(route: str, model: str, asked: dict[str, Any]) -> OllamaCall:
    keep_alive_s = _seconds(asked.get("keep_alive"))
    if route in ("/api/embed", "/api/embeddings"):
        words = asked.get("prompt" if route == "/api/embeddings" else "input") or ""
        body = {"model": model, "input": words}
        dimensions = max(0, _whole(asked, "dimensions") or 0) or None
        cuts = asked.get("truncate") is not False
        return OllamaCall(route, model, "/v1/embeddings", _json(body), False, not words, keep_alive_s, dimensions, cuts)
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
    most = _whole(options, "num_predict")
    if most is not None and most > 0:  # 0, -1 and -2 are no limit (runner/ollamarunner/runner.go of Ollama)
        found["max_tokens"] = most
    shape = asked.get("format")
    if shape == "json":
        found["response_format"] = {"type": "json_object"}
    elif isinstance(shape, dict):
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": shape}}
    elif shape:
        raise _bad('format must be "json" or a JSON schema')
    think = asked.get("think")
    if isinstance(think, bool):
        found["chat_template_kwargs"] = {"enable_thinking": think}
    elif isinstance(think, str):
        found["chat_template_kwargs"] = {"enable_thinking": True, "reasoning_effort": think}
    return found


def _whole(asked: Mapping[str, Any], name: str) -> int | None:
    """Return a number without its fraction, as Ollama takes it. Raises RejectedError for anything else."""
    value = asked.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 2**31:
        raise _bad(f"{name} must be a whole number")
    return int(value)


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


def _bad(message: str) -> RejectedError:
    return RejectedError(HttpFault(400, "bad_request", message, None))
