"""Open WebUI, from its wheel, in its slim mode: its server runs here, with an Ollama and an OpenAI connection."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

from checks import BASE, EMBEDDING, HELLO, KEY, MODEL, PERSON, TOO_LONG, WEATHER, check, weather_talk

FOLDER = tempfile.TemporaryDirectory(prefix="open-webui-")
os.environ |= {
    "DATA_DIR": FOLDER.name,
    "FROM_INIT_PY": "true",  # it takes its files from the wheel
    "USE_SLIM_DOCKER": "true",  # without the models that it would run itself
    "WEBUI_AUTH": "false",
    "WEBUI_SECRET_KEY": KEY,
    "OFFLINE_MODE": "true",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "OLLAMA_BASE_URLS": BASE,
    "OPENAI_API_BASE_URLS": f"{BASE}/v1",
    "OPENAI_API_KEYS": KEY,
}
# Some of its modules look for others in the parent of the working directory.
Path(FOLDER.name, "cwd").mkdir()
os.chdir(Path(FOLDER.name, "cwd"))

import httpx  # noqa: E402
import uvicorn  # noqa: E402
from open_webui.main import app  # noqa: E402

FEW: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "seed": 1}
OURS = f"oa.{MODEL}"  # the same model through the other connection


listening = socket.create_server(("127.0.0.1", 0))  # a request that comes before it serves waits in the backlog
server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
serving.start()
webui = httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=120, trust_env=False)
signed_in = webui.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status()
webui.headers["Authorization"] = f"Bearer {signed_in.json()['token']}"


def asked(path: str, **document: Any) -> Any:
    return webui.post(path, json=document).raise_for_status().json()


def streamed(**document: Any) -> str:
    """The text of a streamed answer, in the one shape that Open WebUI makes of both APIs."""
    with webui.stream("POST", "/api/chat/completions", json={**document, "stream": True}) as answer:
        answer.raise_for_status()
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    found = [choice["delta"] for event in events[:-1] for choice in json.loads(event).get("choices", [])]
    return "".join(delta.get("content") or "" for delta in found)


@check("both connections are saved and verified")
def _() -> Any:
    asked(
        "/ollama/config/update", ENABLE_OLLAMA_API=True, OLLAMA_BASE_URLS=[BASE], OLLAMA_API_CONFIGS={"0": {"key": KEY}}
    )
    openai = {"OPENAI_API_BASE_URLS": [f"{BASE}/v1"], "OPENAI_API_KEYS": [KEY]}
    asked("/openai/config/update", ENABLE_OPENAI_API=True, **openai, OPENAI_API_CONFIGS={"0": {"prefix_id": "oa"}})
    models = asked("/openai/verify", url=f"{BASE}/v1", key=KEY)["data"]
    assert MODEL in [each["id"] for each in models]
    return asked("/ollama/verify", url=BASE, key=KEY)["version"]


@check("a wrong key is named as the cause")
def _() -> Any:
    urls = {"ollama": BASE, "openai": f"{BASE}/v1"}
    seen = [webui.post(f"/{api}/verify", json={"url": url, "key": "wrong"}).text for api, url in urls.items()]
    assert all("Invalid API Key" in each for each in seen), seen
    return seen


@check("the models of both are offered")
def _() -> Any:
    found = {each["id"]: each["owned_by"] for each in webui.get("/api/models").raise_for_status().json()["data"]}
    assert found[MODEL] == found[EMBEDDING] == "ollama" and {OURS, f"oa.{EMBEDDING}"} <= found.keys(), found
    return found


@check("Ollama's version, loaded models and details")
def _() -> Any:
    loaded = webui.get("/ollama/api/ps").raise_for_status().json()["models"]
    assert MODEL in [each["model"] for each in loaded] and webui.get("/ollama/api/version").json()["version"]
    return asked("/ollama/api/show", model=MODEL)["capabilities"]


@check("a chat over Ollama's API, streamed and not")
def _() -> Any:
    whole = asked("/api/chat/completions", model=MODEL, messages=HELLO, stream=False, **FEW)
    assert whole["choices"][0]["message"]["content"] and streamed(model=MODEL, messages=HELLO, **FEW)
    return whole["usage"]


@check("a chat over OpenAI's API, streamed and not")
def _() -> Any:
    whole = asked("/api/chat/completions", model=OURS, messages=HELLO, stream=False, **FEW)
    assert whole["choices"][0]["message"]["content"] and streamed(model=OURS, messages=HELLO, **FEW)
    return whole["usage"]


@check("tools over both")
def _() -> Any:
    """Ollama's API cannot force a call, and so small a model does not always make one: some tries."""
    found = []
    for model in (MODEL, OURS):
        more = {"tools": [{"type": "function", "function": WEATHER}], "stream": False, "max_tokens": 64}
        for seed in range(8):
            asks = {"model": model, "messages": weather_talk(), "temperature": 0.2, "seed": seed, **more}
            calls = asked("/api/chat/completions", **asks)["choices"][0]["message"].get("tool_calls")
            if calls:
                break
        call = calls[0]["function"]
        assert call["name"] == "get_weather" and "city" in json.loads(call["arguments"]), calls
        found.append(call["arguments"])
    return found


@check("Ollama's generate and a schema")
def _() -> Any:
    body = {"model": MODEL, "prompt": "Say hello.", "options": {"num_predict": 8}, "stream": False}
    said = asked("/ollama/api/generate", **body)["response"]
    options = {"num_predict": 64, "temperature": 0}
    chat = {"messages": HELLO, "format": PERSON, "stream": False, "options": options}
    made = json.loads(asked("/ollama/api/chat", model=MODEL, **chat)["message"]["content"])
    assert said and made.keys() == {"name", "age"}
    return said


@check("embeddings over both")
def _() -> Any:
    of_ollama = asked("/ollama/api/embed", model=EMBEDDING, input=["a", "b"])["embeddings"]
    of_openai = asked("/api/embeddings", model=f"oa.{EMBEDDING}", input=["a", "b"])["data"]
    assert len(of_ollama) == len(of_openai) == 2 and len(of_ollama[0]) == len(of_openai[0]["embedding"])
    return len(of_ollama[0])


@check("an unknown model, and a prompt that is too long, are errors with a text")
def _() -> Any:
    gone = webui.post("/ollama/api/chat/0", json={"model": "gone", "messages": HELLO, "stream": False})
    long = webui.post("/api/chat/completions", json={"model": OURS, "messages": TOO_LONG, "stream": False})
    assert "gone" in gone.text and "context" in long.text and 400 <= long.status_code < 500, (gone.text, long.text)
    return gone.text, long.text


@check("a model is unloaded")
def _() -> Any:
    return asked("/ollama/api/unload", model=MODEL)["status"]


webui.close()
server.should_exit = True
serving.join(30)
