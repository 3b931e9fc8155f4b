"""FC-85: which names a model answers to. FC-89: what Ollama's clients look for."""

from __future__ import annotations

import json

import pytest

from edge.gateway.config import GatewayOptions
from edge.gateway.model_name import named_model
from edge.gateway.openai import RejectedError
from tests.fakes.upstream.engine import FakeEngine, Line, Received
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rigs

NAMES = [
    "chat",
    "alias",
    "SmolLM2-135M.gguf",
    "/models/SmolLM2-135M.gguf",
    "gpt-3.5-turbo",
    "a b/c",
    "x" * 10_000,
    None,
]


def body(name: str | None) -> bytes:
    return json.dumps({"messages": [], **({} if name is None else {"model": name})}).encode()


@pytest.mark.parametrize("name", NAMES)
async def test_fc85_the_only_model_answers_to_any_name(rig: Rigs, name: str | None) -> None:
    here = await rig()
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", body(name))
    assert (await client.answer()).status == 200
    assert here.engine.requests[0].body == body(name)


@pytest.mark.parametrize("name", NAMES)
async def test_fc85_strict_answers_to_its_id_and_aliases_and_lists_them_otherwise(rig: Rigs, name: str | None) -> None:
    here = await rig(config=GatewayOptions(unknown_model="strict"))
    here.model.aliases = ("alias",)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", body(name))
    answer = await client.answer()
    if name in ("chat", "alias", None):
        assert answer.status == 200
        return
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["kind"], error["param"]) == (404, "model_not_found", "model")
    assert "chat" in error["message"]
    assert len(answer.body) < 1000, "a name of 10 kB is not repeated"


async def test_fc85_one_id_everywhere_and_no_path_of_the_machine(rig: Rigs) -> None:
    here = await rig(loading=True)
    documents = [(await here.once(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())).body for path in
                 ("/v1/models", "/models", "/v1/models/chat", "/api/tags", "/healthz", "/readyz")]  # fmt: skip
    assert [json.loads(documents[0])["data"][0]["id"], json.loads(documents[2])["id"]] == ["chat", "chat"]
    assert all(b"chat" in document and b".sock" not in document for document in documents)
    missing = await here.once(b"GET /v1/models/" + b"y" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (missing.status, len(missing.body) < 1000) == (404, True)


@pytest.mark.parametrize("loading", [True, False])
async def test_every_alias_is_an_entry_before_ready_and_after(rig: Rigs, loading: bool) -> None:
    async def models(line: Line, request: Received) -> None:
        await line.json({"models": [{"name": "chat"}], "object": "list", "data": [{"id": "chat", "meta": {"n": 1}}]})

    here = await rig(models, loading=loading, config=GatewayOptions(unknown_model="strict"))
    here.model.aliases = ("mistralai/mistral-7b", "gpt-4")
    names = ["chat", "mistralai/mistral-7b", "gpt-4"]
    async with here.client.get("/v1/models") as answer:
        document = await answer.json()
    assert [entry["id"] for entry in document["data"]] == names
    assert [entry["model"] for entry in document["models"]] == names
    assert all(entry["aliases"] == names[1:] for entry in document["data"])
    for path in ("/v1/models/", "/api/v0/models/", "/api/v1/models/", "//v1//models/"):
        for name in ("mistralai/mistral-7b", "mistralai%2Fmistral-7b", "chat"):
            found = json.loads((await here.once(f"GET {path}{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())).body)
            assert found["id"] == name.replace("%2F", "/"), path
    async with here.client.get("/api/v0/models") as answer:
        entries = (await answer.json())["data"]
    assert [(entry["id"], entry["state"]) for entry in entries] == [
        (name, "not-loaded" if loading else "loaded") for name in names
    ]


async def test_one_name_with_a_slash_finds_its_engine(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(unknown_model="strict"))
    here.model.aliases = ("mistralai/mistral-7b",)
    client = await here.connect()
    for target in ("/v1/chat/completions", "//v1/chat/completions/", "/upstream/mistralai%2Fmistral-7b/v1/x"):
        await client.request("POST", target, body("mistralai/mistral-7b"))
        assert (await client.answer()).status == 200
    assert [each.target for each in here.engine.requests] == ["/v1/chat/completions"] * 2 + ["/v1/x"]


async def test_a_model_that_failed_is_not_listed_as_usable(rig: Rigs) -> None:
    here = await rig(loading=True)
    await here.model.fail("bad_model", "pull it again")
    async with here.client.get("/v1/models") as answer:
        assert (await answer.json())["data"] == []
    async with here.client.get("/v1/models/chat") as answer:
        assert (answer.status, (await answer.json())["error"]["kind"]) == (503, "bad_model")
    async with here.client.get("/api/tags") as answer:
        assert (await answer.json())["models"] == []
    async with here.client.post("/api/show", json={"model": "chat"}) as answer:
        assert (answer.status, "pull it again" in (await answer.json())["error"]) == (503, True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"model": "a", "x": {"model": "trap"}}', "a"),
        (b'{"model": "a", "model": "b"}', "b"),
        (b'{"\\u006dodel": "\\ud83d\\ude00"}', "\N{GRINNING FACE}"),
        (b'\xef\xbb\xbf {"model": "a"}', "a"),
        ('{"x": "' + "\N{GRINNING FACE}" * 30_000 + '", "model": "é"}', "é"),
        (b'{"model": 1}', None),
        (b'{"model": null}', None),
        (b'["model"]', None),
        (b'"model"', None),
        (b'{"model": "' + b"x" * 100_000 + b'"}', "x" * 65_535),
    ],
)
def test_the_name_in_a_body(text: bytes | str, name: str | None) -> None:
    body = text if isinstance(text, bytes) else text.encode()
    assert named_model(body, "application/json", "/v1/chat/completions") == name


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": "\xff", "model": "a"}',
        b'{"model": "\xff"}',
        "é".encode() * 40_000 + b"\xc3",
        b"{",
        b"[1, 2",
        b'{"x": 1,}',
        b'{"model": "a"} x',
        b'{"x": 01}',
        b'{"x": "\n"}',
        b'{"x": ' + b"[" * 100_000,
    ],
)
def test_what_is_no_json_is_refused_wherever_it_is_wrong(body: bytes) -> None:
    with pytest.raises(RejectedError) as refused:
        named_model(body, "application/json", "/v1/chat/completions")
    assert (refused.value.fault.status, refused.value.fault.kind) == (400, "bad_json")


PART = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav\r\n\r\n%s\r\n'


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (PART % (b"model", b"whisper") + FILE % b"RIFF" + b"--b--", "whisper"),
        (FILE % (b'\r\n\r\nname="model"\r\n\r\ntrap' * 1000) + PART % (b"model", b"last") + b"--b--", "last"),
        (b"\r\n" + PART.replace(b'"', b"") % (b"MODEL", "é".encode()) + b"--b--", "é"),
        (PART % (b"model", b"") + b"--b--", None),
        (PART % (b"model_path", b"x") + b"--b--", None),
        (FILE % b"RIFF" + b"--b--", None),
        (PART % (b"x", b"y") * 200 + PART % (b"model", b"far too late") + b"--b--", None),
        (b"--b", None),
        (b"nothing", None),
        (b"--b\r\n" + b'name="model"\r\n' * 300_000, None),  # once the square of its length
    ],
)
def test_the_name_in_a_form(form: bytes, name: str | None) -> None:
    assert named_model(form, "multipart/form-data", "/v1/audio/transcriptions") == name


async def test_several_models_are_told_apart_by_name(rig: Rigs) -> None:
    models = {name: FakeModel(name) for name in ("small", "large/q8")}
    here = await rig(models=models)
    engines: dict[str, FakeEngine] = {}
    for number, (name, model) in enumerate(models.items()):
        engines[name] = FakeEngine(here.engine.path.with_name(f"several{number}.sock"))
        await engines[name].start()
        here.stack.push_async_callback(engines[name].stop)
        await model.ready(str(engines[name].path))
    client = await here.connect()
    for name in models:
        await client.request(
            "POST", "/v1/chat/completions", b'{"messages": [{"model": "trap"}], "model": "%s"}' % name.encode()
        )
        assert (await client.answer()).status == 200
    await client.request("GET", "/props?model=small")
    assert (await client.answer()).status == 200
    await client.request("GET", "/upstream/large%2Fq8/slots")
    assert (await client.answer()).status == 200
    assert [request.target for request in engines["small"].requests] == ["/v1/chat/completions", "/props?model=small"]
    assert [request.target for request in engines["large/q8"].requests] == ["/v1/chat/completions", "/slots"]
    for unknown in (b'{"model": "gpt-3.5-turbo"}', b"{}"):
        await client.request("POST", "/v1/chat/completions", unknown)
        answer = await client.answer()
        assert answer.status == 404
        assert b"small, large/q8" in answer.body
    await client.request("POST", "/v1/chat/completions", b'{"model": "\xff"}')
    assert (await client.answer()).status == 400
    await client.request("POST", "/v1/chat/completions", b'{"pad": "' + b"x" * 2_000_000 + b'", "model": "small"}')
    assert (await client.answer()).status == 200, "the name may come last, after much"
    assert here.context.waiting.held_bytes == 0


async def test_no_model_at_all_is_said(rig: Rigs) -> None:
    here = await rig(models={})
    answer = await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "no_model")


async def test_a_ready_engine_describes_itself_and_a_loading_one_is_described_from_its_plan(rig: Rigs) -> None:
    own = {"object": "list", "models": [{"name": "chat", "capabilities": ["completion", "multimodal"]}],
           "data": [{"id": "chat", "meta": {"n_ctx": 4096}}]}  # fmt: skip

    async def script(line: Line, request: Received) -> None:
        await line.json(own)

    here = await rig(script, loading=True)
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert json.loads((await here.once(get)).body)["data"][0]["meta"] == here.model.model_info
    await here.model.ready(str(here.engine.path))
    assert json.loads((await here.once(get)).body) == own
    one = await here.once(b"GET /v1/models/chat HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert json.loads(one.body) == own["data"][0]
    other = FakeModel("other")
    here.context.upstreams["other"] = other  # type: ignore[index]
    both = json.loads((await here.once(get)).body)
    assert [entry["id"] for entry in both["data"]] == ["chat", "other"]
    assert [entry["name"] for entry in both["models"]] == ["chat", "other"]


@pytest.mark.parametrize("data", ["[]", "[7]", "7", "[{}", "[" * 60_000, '[{"n": 1e400}]'])
async def test_an_engine_whose_list_is_none_is_described_from_its_plan(rig: Rigs, data: str) -> None:
    async def script(line: Line, request: Received) -> None:
        text = b'{"data": ' + data.encode() + b"}"
        await line.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)

    here = await rig(script)
    here.model.aliases = ("gpt-4",)
    answer = await here.once(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert [entry["id"] for entry in json.loads(answer.body)["data"]] == ["chat", "gpt-4"]


async def test_a_list_does_not_wait_for_an_engine_that_says_nothing(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.until_gone()

    here = await rig(script)
    answer = await here.once(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert json.loads(answer.body)["data"][0]["id"] == "chat"


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_fc89_ollamas_probes_find_the_model(rig: Rigs, prefix: str) -> None:
    here = await rig()

    async def get(path: str) -> dict[str, object]:
        answer = await here.once(f"GET {prefix}{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert answer.status == 200
        return dict(json.loads(answer.body))

    assert (await get("/api/version"))["version"]
    assert [model["name"] for model in (await get("/api/tags"))["models"]] == ["chat"]  # type: ignore[union-attr,attr-defined]
    assert [model["name"] for model in (await get("/api/ps"))["models"]] == ["chat"]  # type: ignore[union-attr,attr-defined]
    await here.model.lost()
    assert (await get("/api/ps"))["models"] == []
    assert here.engine.requests == []


@pytest.mark.parametrize("call", ["GET /api/nope", "GET /api"])
async def test_fc89_an_unknown_route_of_ollamas_is_a_404_that_names_the_base_url(rig: Rigs, call: str) -> None:
    here = await rig()
    answer = await here.once(f"{call} HTTP/1.1\r\nHost: localhost:8080\r\n\r\n".encode())
    assert answer.status == 404
    assert "http://localhost:8080/v1" in json.loads(answer.body)["error"]["hint"]
