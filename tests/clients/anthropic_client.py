from __future__ import annotations

from typing import Any

import anthropic
from checks import BASE, HELLO, KEY, MODEL, WEATHER, check, weather_talk_anthropic

client = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)  # sends x-api-key
TOOL: Any = [{"name": "get_weather", "description": "w", "input_schema": WEATHER["parameters"]}]
COLD = {"temperature": 0}  # else a small model now and then ends before its first word


@check("messages")
def _() -> Any:
    answer = client.messages.create(model=MODEL, max_tokens=16, messages=HELLO, extra_body=COLD)
    assert answer.content[0].text and answer.usage.output_tokens
    return answer.content[0].text, answer.stop_reason


@check("messages, stream")
def _() -> Any:
    with client.messages.stream(model=MODEL, max_tokens=16, messages=HELLO, extra_body=COLD) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_message()
    assert answer.content[0].text and "message_stop" in kinds
    return sorted(kinds)


@check("system, several turns")
def _() -> Any:
    talk: Any = [*HELLO, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Again"}]
    return (
        client.messages.create(model=MODEL, max_tokens=8, system="Be brief.", messages=talk, extra_body=COLD)
        .content[0]
        .text
    )


@check("count_tokens")
def _() -> Any:
    count = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    assert count > 5
    return count


@check("tools")
def _() -> Any:
    talk: Any = weather_talk_anthropic()
    answer = client.messages.create(
        model=MODEL, max_tokens=120, messages=talk, extra_body=COLD, tools=TOOL, tool_choice={"type": "any"}
    )
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert uses and answer.stop_reason == "tool_use"
    return uses[0].input


@check("tools, stream")
def _() -> Any:
    talk: Any = weather_talk_anthropic()
    with client.messages.stream(
        model=MODEL, max_tokens=120, messages=talk, extra_body=COLD, tools=TOOL, tool_choice={"type": "any"}
    ) as stream:
        answer = stream.get_final_message()
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert uses
    return uses[0].input


@check("models.list")
def _() -> Any:
    ids = [model.id for model in client.models.list().data]
    assert MODEL in ids
    return ids


@check("error: a wrong key is a 401")
def _() -> Any:
    try:
        anthropic.Anthropic(base_url=BASE, api_key="wrong", max_retries=0).messages.create(
            model=MODEL, max_tokens=1, messages=HELLO
        )
    except anthropic.AuthenticationError as error:
        return error.status_code
    raise AssertionError("no error")
