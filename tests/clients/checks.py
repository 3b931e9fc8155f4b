"""What every client script shares: where the server is, what is asked, and one JSON line a check on standard output."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

BASE = os.environ["BASE"]
MODEL = "chat"
EMBEDDING = "emb"
KEY = os.environ["KEY"]

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "Say hello."}]
TOO_LONG = [{"role": "user", "content": "word " * 6000}]


def weather_talk() -> list[dict[str, Any]]:
    """Three examples: a model of 135 million parameters calls a tool when it has seen how."""
    talk: list[dict[str, Any]] = []
    for city in ("London", "Rome", "Berlin"):
        call = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        calls = [{"id": f"call_{city}", "type": "function", "function": call}]
        talk += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{city}", "content": "sunny"},
        ]
    return [*talk, {"role": "user", "content": "Weather in Paris?"}]


def weather_talk_anthropic() -> list[dict[str, Any]]:
    talk: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for city in ("London", "Rome", "Berlin"):
        use = {"type": "tool_use", "id": f"call_{city}", "name": "get_weather", "input": {"city": city}}
        talk.append({"role": "user", "content": [*results, {"type": "text", "text": f"Weather in {city}?"}]})
        talk.append({"role": "assistant", "content": [use]})
        results = [{"type": "tool_result", "tool_use_id": f"call_{city}", "content": "sunny"}]
    return [*talk, {"role": "user", "content": [*results, {"type": "text", "text": "Weather in Paris?"}]}]


def check(name: str) -> Callable[[Callable[[], Any]], None]:
    def run(what: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            ok, seen = True, what()
        except Exception as error:
            ok, seen = False, f"{type(error).__name__}: {error}"
        took = round(time.monotonic() - began, 3)
        print(json.dumps({"check": name, "ok": ok, "took_s": took, "seen": str(seen)[:300]}))
        sys.stdout.flush()

    return run
