from __future__ import annotations

from typing import Any

import ollama
from checks import BASE, HELLO, KEY, MODEL, check

client = ollama.Client(host=BASE, headers={"Authorization": f"Bearer {KEY}"})


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
    return client._client.get("/api/version").raise_for_status().json()


@check("chat is refused with a hint, not with a crash")
def _() -> Any:
    try:
        client.chat(model=MODEL, messages=HELLO)
    except ollama.ResponseError as error:
        assert error.status_code == 404
        assert "/v1" in str(error)
        return str(error)
    raise AssertionError("no error")
