"""docs/http.md against the router, the code and a real gateway."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from edge.daemon import control
from edge.gateway import keys, model_list, routes
from edge.gateway.config import GatewayOptions
from tests.docs import http_routes
from tests.fakes.upstream.engine import Line, Received
from tests.gateway.conftest import Rigs, rig, sockets

__all__ = ["rig", "sockets"]  # fixtures
ROWS = (*http_routes.OWN, *http_routes.OLLAMA, *http_routes.ENGINE)
CONTENT_TYPES = {
    "json": "application/json",
    "text": "text/plain",
    "html": "text/html",
    "ndjson": "application/",
}


def constants(module: object, pattern: str) -> set[str]:
    """Return the text constants in the source of a module that match."""
    tree = ast.parse(Path(str(getattr(module, "__file__", ""))).read_text(encoding="utf-8"))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text for text in texts if re.fullmatch(pattern, text)}


def test_the_page_is_as_the_code_writes_it() -> None:
    assert http_routes.DOCS.read_text(encoding="utf-8") == http_routes.page(), "run python -m tests.docs.http_routes"


def test_the_page_has_every_route_of_the_router_and_no_other() -> None:
    known = routes.OURS | routes.LISTS | routes.OLLAMA | routes.REFUSED | routes.ADMIN | routes.NAMED | {routes.LOG}
    known |= constants(model_list, r"/api/\w+")
    documented = {path for _, path, _, _ in ROWS}
    assert known - documented == set()
    beside = {"/readyz/{id}", "/slots/{n}", "/v1/stream", "/any/other"}
    prefixes = ("/admin/models/", "/upstream/", "/api/v0/", "/api/v1/")
    assert {path for path in documented - known - beside if not path.startswith(prefixes)} == set()
    assert {path.rpartition("/")[2] for path in documented if path.startswith("/admin/models/")} == {
        "load",
        "unload",
        "restart",
    }


def test_the_control_socket_has_these_routes() -> None:
    source = Path(control.__file__).read_text(encoding="utf-8")
    found = re.findall(r'router\.add_(get|post)\("([^"]+)"', source)
    assert [(method.upper(), path) for method, path in found] == [
        (method, path) for method, path, _ in http_routes.CONTROL
    ]


def test_every_header_of_the_gateway_is_documented() -> None:
    page = http_routes.DOCS.read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in http_routes.GATEWAY.glob("*.py"))
    named = set(re.findall(r'"(Edgellm-[A-Z][\w-]*|Retry-After|Allow|X-[\w-]+)"', sources))
    assert len(named) > 4 and {name for name in named if name not in page} == set()


async def any_answer(line: Line, request: Received) -> None:
    """Answer as llama-server to a chat and to texts that want vectors; the rest is read by nothing here."""
    choices = [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]
    asked = request.method == "POST"
    await line.json({"choices": choices, "data": [{"index": 0, "embedding": [0.5]}]} if asked else {})


@pytest.mark.parametrize(("method", "path", "answer", "text"), ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
async def test_each_route_of_a_real_gateway_is_as_the_page_says(
    rig: Rigs, tmp_path: Path, method: str, path: str, answer: str, text: str
) -> None:
    secrets = {name: keys.new_secret() for name in ("plain", "admin")}
    made = [keys.make(name, secret, admin=name == "admin", created="", others=()) for name, secret in secrets.items()]
    keys.write(tmp_path / "keys.toml", made)
    here = await rig(any_answer, config=GatewayOptions(keys_file=tmp_path / "keys.toml"))
    url = path.replace("{id}", "chat").replace("{n}", "0")
    body = {"model": "chat", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    denied = set()
    for name in ("", "plain", "admin"):
        headers = {"Authorization": f"Bearer {secrets[name]}"} if name else {}
        async with here.client.request(method, url, headers=headers, json=body if method == "POST" else None) as got:
            await got.read()
        if got.status in (401, 403):
            denied.add(name)
        elif answer in CONTENT_TYPES:
            assert got.status in (200, 202) and got.content_type.startswith(CONTENT_TYPES[answer]), got
    found = routes.route(method, url)
    refused = {"no": set(), "yes": {""}, "admin": {"", "plain"}, "never": {"", "plain", "admin"}}
    assert denied == refused["never" if text.startswith("403 ") else http_routes.key_needed(found)]
    asked = {request.target for request in here.engine.requests}
    # Of edgellm's own, only the lists and details of models ask the engine, for its list and its properties.
    assert (
        bool(asked)
        if answer in ("engine", "ndjson") or http_routes.held(found) != "no"
        else asked <= {url, "/v1/models", "/props"}
    )


async def test_a_route_that_is_not_held_answers_while_the_model_loads_and_others_wait(rig: Rigs) -> None:
    here = await rig(loading=True)
    for method, path, _, _ in ROWS:
        url = path.replace("{id}", "chat").replace("{n}", "0")
        found = routes.route(method, url)
        if http_routes.key_needed(found) == "admin":
            continue
        body = {"model": "chat", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
        headers = {"Edgellm-Max-Wait": "0"}
        async with here.client.request(method, url, headers=headers, json=body if method == "POST" else None) as got:
            document = await got.text()
        waited = got.status == 503 and "is not ready yet" in document
        assert waited == (http_routes.held(found) != "no"), f"{method} {path}: {got.status} {document}"
