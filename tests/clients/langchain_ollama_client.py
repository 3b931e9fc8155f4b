from __future__ import annotations

from typing import Any

from checks import BASE, EMBEDDING, KEY, MODEL, check
from langchain_ollama import ChatOllama, OllamaEmbeddings

SETTINGS: dict[str, Any] = {"base_url": BASE, "client_kwargs": {"headers": {"Authorization": f"Bearer {KEY}"}}}
chat = ChatOllama(model=MODEL, temperature=0, num_predict=8, **SETTINGS)


@check("invoke")
def _() -> Any:
    answer = chat.invoke("Say hello.")
    assert answer.content and answer.usage_metadata["output_tokens"]
    return answer.content


@check("stream")
def _() -> Any:
    parts = [part.content for part in chat.stream("Say hello.")]
    assert len(parts) > 2
    return "".join(parts)


@check("structured output")
def _() -> Any:
    schema = {
        "title": "Answer",
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    }
    model = ChatOllama(model=MODEL, temperature=0, num_predict=60, **SETTINGS)
    found = model.with_structured_output(schema, method="json_schema").invoke("A city as JSON.")
    assert set(found) == {"city"}
    return found


@check("embeddings")
def _() -> Any:
    found = OllamaEmbeddings(model=EMBEDDING, **SETTINGS).embed_documents(["a", "b"])
    assert len(found) == 2 and len(found[0]) == 576
    return len(found)
