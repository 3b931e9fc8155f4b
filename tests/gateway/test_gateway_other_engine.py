"""Which model a request means where engines beside llama.cpp serve paths of their own."""

from __future__ import annotations

import json

import pytest

from edge.gateway.config import GatewayOptions
from edge.gateway.model_name import only_one, serves
from tests.fakes.upstream.engine import FakeEngine
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rigs

SPEECH, CHAT = "/v1/audio/speech", "/v1/chat/completions"


def engines(path: str | None = None) -> dict[str, FakeModel]:
    found = {name: FakeModel(name, path) for name in ("chat", "embed", "voice", "images")}
    found["voice"].routes = (SPEECH,)
    found["images"].routes = ("/v1/images/",)
    return found


@pytest.mark.parametrize(
    ("routes", "path", "served"),
    [
        (None, CHAT, True),
        ((), CHAT, True),
        ((SPEECH,), SPEECH, True),
        ((SPEECH,), SPEECH + "/x", False),
        (("/v1/images/",), "/v1/images/edits", True),
        (("/v1/images/",), "/v1/images", False),
    ],
)
def test_a_route_is_a_path_or_a_prefix(routes: tuple[str, ...] | None, path: str, served: bool) -> None:
    model = FakeModel()
    model.routes = routes
    assert serves(model, path) is served


def test_a_path_means_the_engine_that_names_it() -> None:
    found = engines()
    assert only_one(found.values(), SPEECH) is found["voice"]
    assert only_one(found.values(), "/v1/images/generations") is found["images"]
    assert only_one(found.values(), CHAT) is None  # chat or embed
    del found["embed"]
    assert only_one(found.values(), CHAT) is found["chat"]


@pytest.mark.parametrize(
    ("path", "name", "strict", "wanted"),
    [
        (SPEECH, None, False, "voice"),
        (SPEECH, None, True, "voice"),
        (SPEECH, "tts-1", False, "voice"),
        (SPEECH, "tts-1", True, "model_not_found"),
        (SPEECH, "voice", True, "voice"),
        (SPEECH, "images", False, "no_route"),
        (CHAT, "voice", False, "no_route"),
        (CHAT, "chat", False, "chat"),
        (CHAT, "gpt-4o", False, "model_not_found"),
        (CHAT, None, False, "model_not_found"),
        ("/upstream/voice/inference", "chat", False, "voice"),
    ],
)
async def test_a_request_reaches_the_model_that_it_names_or_that_its_path_means(
    rig: Rigs, short_dir: object, path: str, name: str | None, strict: bool, wanted: str
) -> None:
    engine = FakeEngine(short_dir / "e.sock")  # type: ignore[operator]
    await engine.start()
    models = engines(str(engine.path))
    here = await rig(config=GatewayOptions(unknown_model="strict" if strict else "only"), models=models)
    client = await here.connect()
    document = {"input": "Hi", **({} if name is None else {"model": name})}
    await client.request("POST", path, json.dumps(document).encode())
    answer = await client.answer()
    await engine.stop()
    if wanted in models:
        assert answer.status == 200
        assert [each for each, model in models.items() if model.fingerprints or model.looks] == [wanted]
    else:
        assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (404, wanted)


@pytest.mark.parametrize(
    ("path", "name", "default", "wanted"),
    [
        (CHAT, None, "embed", "embed"),
        (CHAT, None, "second", "embed"),
        (SPEECH, None, "embed", "voice"),
        (CHAT, "chat", "embed", "chat"),
        (CHAT, "gpt-4o", "embed", "model_not_found"),
        (CHAT, None, "voice", "no_route"),
        (CHAT, None, "nosuch", "model_not_found"),
    ],
)
async def test_a_request_without_a_name_gets_the_default_unless_its_path_means_an_engine(
    rig: Rigs, short_dir: object, path: str, name: str | None, default: str, wanted: str
) -> None:
    engine = FakeEngine(short_dir / "e.sock")  # type: ignore[operator]
    await engine.start()
    models = engines(str(engine.path))
    models["embed"].aliases = ("second",)
    here = await rig(config=GatewayOptions(default_model=default, unknown_model="strict"), models=models)
    client = await here.connect()
    await client.request("POST", path, json.dumps({} if name is None else {"model": name}).encode())
    answer = await client.answer()
    await engine.stop()
    if wanted in models:
        assert answer.status == 200
        assert [each for each, model in models.items() if model.fingerprints or model.looks] == [wanted]
    else:
        assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (404, wanted)
