from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from checks import BASE, EMBEDDING, HELLO, KEY, MODEL, PERSON, TOO_LONG, WEATHER, check, weather_talk
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0)
ask = client.chat.completions.create
TOOLS: Any = [{"type": "function", "function": WEATHER}]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


class Greeting(BaseModel):
    name: str = Field(max_length=12)
    ok: bool


def expect(kind: type[Exception], what: Any) -> Any:
    try:
        what()
    except kind as error:
        return error
    raise AssertionError("no error")


@check("models.list")
def _() -> Any:
    ids = [model.id for model in client.models.list().data]
    assert ids == [MODEL, EMBEDDING]
    return ids


@check("models.retrieve")
def _() -> Any:
    return client.models.retrieve(MODEL).id


@check("chat")
def _() -> Any:
    answer = ask(model=MODEL, messages=HELLO, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content and answer.usage.total_tokens
    return answer.choices[0].message.content


@check("chat stream, usage")
def _() -> Any:
    text, usage, chunks = "", None, 0
    options = {"include_usage": True}
    for chunk in ask(model=MODEL, messages=HELLO, max_tokens=16, temperature=0, stream=True, stream_options=options):
        chunks += 1
        usage = chunk.usage or usage
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    assert text and usage and chunks > 5
    return chunks, text


@check("raw headers")
def _() -> Any:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=4)
    assert raw.headers["server"] == "llama.cpp"
    return dict(raw.headers)


@check("json schema")
def _() -> Any:
    asked = [{"role": "user", "content": "A person"}]
    answer = ask(model=MODEL, messages=asked, max_tokens=80, temperature=0, response_format=SCHEMA)
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"}
    return person


@check("parse into pydantic")
def _() -> Any:
    parse = client.chat.completions.parse
    answer = parse(model=MODEL, messages=HELLO, max_tokens=80, temperature=0, response_format=Greeting)
    assert isinstance(answer.choices[0].message.parsed, Greeting)
    return answer.choices[0].message.parsed


@check("tools")
def _() -> Any:
    talk: Any = weather_talk()
    answer = ask(model=MODEL, messages=talk, max_tokens=120, temperature=0, tools=TOOLS, tool_choice="required")
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    return call.function.name, json.loads(call.function.arguments)


@check("tools, stream")
def _() -> Any:
    talk: Any = weather_talk()
    name, arguments, reason = None, "", None
    for chunk in ask(
        model=MODEL, messages=talk, max_tokens=120, temperature=0, tools=TOOLS, tool_choice="required", stream=True
    ):
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name = call.function.name or name
                arguments += call.function.arguments or ""
    assert (name, reason) == ("get_weather", "tool_calls")
    return json.loads(arguments)


@check("logprobs")
def _() -> Any:
    answer = ask(model=MODEL, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3


@check("n = 2")
def _() -> Any:
    assert len(ask(model=MODEL, messages=HELLO, max_tokens=4, n=2).choices) == 2


@check("completions")
def _() -> Any:
    return client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8, temperature=0).choices[0].text


@check("completions, stream")
def _() -> Any:
    stream = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=8, temperature=0, stream=True)
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


@check("responses")
def _() -> Any:
    answer = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16, temperature=0)
    assert answer.output_text
    return answer.output_text


@check("responses, stream")
def _() -> Any:
    kinds = [each.type for each in client.responses.create(model=MODEL, input="Hi.", max_output_tokens=16, stream=True)]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    return sorted(set(kinds))


@check("embeddings, base64 and float")
def _() -> Any:
    two = client.embeddings.create(model=EMBEDDING, input=["a", "b c"])
    one = client.embeddings.create(model=EMBEDDING, input="a", encoding_format="float")
    assert len(two.data) == 2 and len(two.data[0].embedding) == len(one.data[0].embedding) == 576


@check("error: bad messages are a 400")
def _() -> Any:
    bad: Any = "x"
    return expect(openai.BadRequestError, lambda: ask(model=MODEL, messages=bad)).body


@check("error: an unknown path is a 404")
def _() -> Any:
    return expect(openai.NotFoundError, lambda: client.post("/nope", body={"model": MODEL}, cast_to=object)).body


@check("error: an unknown model is a 404 that lists the ids")
def _() -> Any:
    error = expect(openai.NotFoundError, lambda: ask(model="gpt-3.5-turbo", messages=HELLO))
    assert "chat, emb" in error.body["message"] and error.body["kind"] == "model_not_found"
    return error.body


@check("error: too long is a 400 with the engine's figures")
def _() -> Any:
    error = expect(openai.BadRequestError, lambda: ask(model=MODEL, messages=TOO_LONG, max_tokens=4))
    assert error.body["n_prompt_tokens"] > error.body["n_ctx"]
    return error.body


@check("error: a wrong key is a 401")
def _() -> Any:
    other = OpenAI(base_url=BASE + "/v1", api_key="wrong", max_retries=0)
    return expect(openai.AuthenticationError, other.models.list).body


@check("a stream left early frees the slot for the next")
def _() -> Any:
    more = {"ignore_eos": True}
    for _ in range(4):
        stream = ask(model=MODEL, messages=HELLO, max_tokens=3000, stream=True, extra_body=more)
        next(iter(stream))
        stream.close()
    return ask(model=MODEL, messages=HELLO, max_tokens=1).choices[0].finish_reason


@check("async, four at once")
def _() -> Any:
    async def four() -> list[Any]:
        async with AsyncOpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0) as other:
            asked = (other.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8) for _ in range(4))
            return await asyncio.gather(*asked)

    assert len(asyncio.run(four())) == 4
