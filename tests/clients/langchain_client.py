from __future__ import annotations

from typing import Any

from checks import BASE, EMBEDDING, KEY, MODEL, PERSON, WEATHER, check, weather_talk
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

URL = BASE + "/v1"
model = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=80, max_retries=0)


@check("invoke")
def _() -> Any:
    return model.invoke("Say hello.").content


@check("stream")
def _() -> Any:
    text = "".join(chunk.content for chunk in model.stream("Say hello."))
    assert text
    return text


@check("structured output, json schema")
def _() -> Any:
    person = model.with_structured_output({"title": "p", "description": "d", **PERSON}, method="json_schema")
    return person.invoke("A person")


@check("structured output, function calling")
def _() -> Any:
    tool = {"title": "get_weather", "description": "w", **WEATHER["parameters"]}
    answer = model.with_structured_output(tool, method="function_calling").invoke(weather_talk())
    assert answer
    return answer


@check("tools")
def _() -> Any:
    bound = model.bind_tools([{"type": "function", "function": WEATHER}], tool_choice="any")
    calls = bound.invoke(weather_talk()).tool_calls
    assert calls
    return calls


@check("responses")
def _() -> Any:
    other = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, use_responses_api=True, max_tokens=16)
    return other.invoke("Say hello.").text


@check("embeddings")
def _() -> Any:
    # The default wants a tokenizer's file from the internet.
    embeddings = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=EMBEDDING, check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["a", "b"])) == 2
