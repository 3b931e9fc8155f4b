from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama
from checks import BASE, EMBEDDING, HELLO, KEY, MODEL, PERSON, TOO_LONG, WEATHER, check

HEADERS = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(host=BASE, headers=HEADERS)
FEW = {"num_predict": 8, "temperature": 0, "seed": 1}


def weather_talk() -> list[dict[str, Any]]:
    """The talk of checks.py as Ollama writes it: arguments are objects, calls have no ids."""
    talk: list[dict[str, Any]] = []
    for city in ("London", "Rome", "Berlin"):
        call = {"function": {"name": "get_weather", "arguments": {"city": city}}}
        talk += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
        ]
    return [*talk, {"role": "user", "content": "Weather in Paris?"}]


@check("list")
def _() -> Any:
    names = [model.model for model in client.list().models]
    assert MODEL in names
    return names


@check("ps")
def _() -> Any:
    return [model.model for model in client.ps().models]


@check("version")
def _() -> Any:
    found = client._client.get("/api/version").raise_for_status().json()["version"]
    assert tuple(int(part) for part in found.split(".")) >= (0, 6, 4)
    return found


@check("show")
def _() -> Any:
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities
    return shown.modelinfo


@check("chat")
def _() -> Any:
    answer = client.chat(model=MODEL, messages=HELLO, options=FEW)
    assert answer.done and answer.message.content and answer.eval_count and answer.prompt_eval_count
    assert answer.done_reason in ("stop", "length") and answer.total_duration and answer.eval_duration
    return answer.message.content


@check("chat, streamed, says the same")
def _() -> Any:
    whole = client.chat(model=MODEL + ":latest", messages=HELLO, options=FEW).message.content
    parts = list(client.chat(model=MODEL, messages=HELLO, options=FEW, stream=True))
    assert len(parts) > 2 and parts[-1].done and not any(part.done for part in parts[:-1])
    assert "".join(part.message.content or "" for part in parts) == whole
    return whole


@check("generate, with system and raw, streamed and not")
def _() -> Any:
    whole = client.generate(model=MODEL, prompt="Say hello.", system="Be brief.", options=FEW)
    assert whole.done and whole.response
    raw = "".join(part.response for part in client.generate(MODEL, "One, two,", raw=True, options=FEW, stream=True))
    assert raw
    return raw


@check("tools, streamed and not")
def _() -> Any:
    """Ollama cannot force a call, and so small a model does not always make one: some tries."""
    tools = [{"type": "function", "function": WEATHER}]
    for stream in (False, True):
        for seed in range(8):
            options = {"temperature": 0.2, "num_predict": 80, "seed": seed}
            answer = client.chat(model=MODEL, messages=weather_talk(), tools=tools, options=options, stream=stream)
            calls = [call for part in (answer if stream else [answer]) for call in part.message.tool_calls or []]
            if calls:
                break
        assert calls and calls[0].function.name == "get_weather" and "city" in calls[0].function.arguments, stream
    return calls


@check("format: a schema, and json")
def _() -> Any:
    ask = [{"role": "user", "content": "A person as JSON."}]
    shaped = client.chat(model=MODEL, messages=ask, format=PERSON, options={"num_predict": 80, "temperature": 0})
    assert json.loads(shaped.message.content).keys() == {"name", "age"}
    # Examples as in weather_talk(): a model of 135 million parameters ends its object when it has seen how.
    examples = [{"name": "Ann", "age": 31}, {"name": "Bob", "age": 42}, {"name": "Eve", "age": 27}]
    talk = [{"role": "assistant", "content": json.dumps(each)} for each in examples]
    options = {"num_predict": 200, "temperature": 0, "seed": 1}
    talk = [message for each in talk for message in (*ask, each)] + ask
    free = client.chat(model=MODEL, messages=talk, format="json", options=options)
    assert isinstance(json.loads(free.message.content), dict)
    return free.message.content


@check("embed and embeddings")
def _() -> Any:
    several = client.embed(EMBEDDING, ["a", "b"])
    one = client.embeddings(EMBEDDING, "a")
    assert len(several.embeddings) == 2 and len(several.embeddings[0]) == len(one.embedding) == 576
    assert several.prompt_eval_count
    return len(one.embedding)


@check("a model is loaded without a prompt")
def _() -> Any:
    answer = client.generate(model=MODEL, keep_alive="5m")
    assert answer.done_reason == "load"
    return answer.done_reason


@check("errors are ResponseErrors with a text")
def _() -> Any:
    seen = []
    for status, call in (
        (404, lambda: client.chat(model="nope", messages=HELLO)),
        (400, lambda: client.chat(model=MODEL, messages=TOO_LONG)),
        (403, lambda: client.pull("other")),
        (403, lambda: client.delete("other")),
        (401, lambda: ollama.Client(host=BASE).chat(model=MODEL, messages=HELLO)),
        (401, lambda: ollama.Client(host=BASE).list()),
    ):
        try:
            call()
        except ollama.ResponseError as error:
            assert error.status_code == status, (status, error)
            assert isinstance(error.error, str) and error.error
            seen.append(error.error)
        else:
            raise AssertionError(f"no error {status}")
    return seen


@check("the asynchronous client, four at once")
def _() -> Any:
    async def ask() -> list[Any]:
        found = ollama.AsyncClient(host=BASE, headers=HEADERS)
        return await asyncio.gather(*(found.chat(model=MODEL, messages=HELLO, options=FEW) for _ in range(4)))

    answers = asyncio.run(ask())
    assert len({answer.message.content for answer in answers}) == 1
    return len(answers)
