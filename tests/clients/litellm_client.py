from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import BASE, EMBEDDING, HELLO, KEY, MODEL, PERSON, TOO_LONG, WEATHER, check, weather_talk

litellm.suppress_debug_info = True
litellm.telemetry = False
NAME = "openai/" + MODEL
HERE: Any = {"api_base": BASE + "/v1", "api_key": KEY, "num_retries": 0}


@check("completion")
def _() -> Any:
    return (
        litellm.completion(model=NAME, messages=HELLO, max_tokens=16, temperature=0, **HERE).choices[0].message.content
    )


@check("stream")
def _() -> Any:
    stream = litellm.completion(model=NAME, messages=HELLO, max_tokens=16, temperature=0, stream=True, **HERE)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text
    return text


@check("json schema")
def _() -> Any:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = litellm.completion(
        model=NAME, messages=HELLO, max_tokens=80, temperature=0, response_format=schema, **HERE
    )
    return json.loads(answer.choices[0].message.content)


@check("tools")
def _() -> Any:
    tools = [{"type": "function", "function": WEATHER}]
    answer = litellm.completion(
        model=NAME, messages=weather_talk(), max_tokens=120, temperature=0, tools=tools, tool_choice="required", **HERE
    )
    return answer.choices[0].message.tool_calls[0].function


@check("embedding")
def _() -> Any:
    assert len(litellm.embedding(model="openai/" + EMBEDDING, input=["a", "b"], **HERE).data) == 2


@check("as llamafile/")
def _() -> Any:
    answer = litellm.completion(model="llamafile/" + MODEL, messages=HELLO, max_tokens=8, **HERE)
    return answer.choices[0].message.content


@check("as anthropic/, through /v1/messages")
def _() -> Any:
    answer = litellm.completion(model="anthropic/" + MODEL, messages=HELLO, max_tokens=8, api_base=BASE, api_key=KEY)
    return answer.choices[0].message.content


@check("responses")
def _() -> Any:
    answer = litellm.responses(model=NAME, input="Say hello.", max_output_tokens=8, **HERE)
    return answer.output[0].content[0].text


@check("error: too long")
def _() -> Any:
    try:
        litellm.completion(model=NAME, messages=TOO_LONG, max_tokens=4, **HERE)
    except litellm.BadRequestError as error:
        return type(error).__name__, error.status_code
    raise AssertionError("no error")
