"""Keys, Hosts, origins, refused and admin routes, over the wire."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge.daemon.control import LogQuestion, log_lines
from edge.errors import ConfigError
from edge.gateway import keys
from edge.gateway.config import GatewayOptions
from edge.linux.procfs import Ring
from edge.supervisor.status import Degraded, Failure, ModelStatus, State
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rigs

SECRET = "sk-edge-0123456789abcdefghij"
ADMIN = "sk-edge-admin-0123456789abcdefghij"


OLLAMA_READS = ("/api/tags", "/api/ps", "/api/version")


@pytest.fixture
def keyed(tmp_path: Path) -> GatewayOptions:
    path = tmp_path / "keys.toml"
    user = keys.make("laptop", SECRET, admin=False, created="2026-11-29", others=())
    admin = keys.make("owner", ADMIN, admin=True, created="2026-11-29", others=(user,))
    keys.write(path, [user, admin])
    return GatewayOptions(keys_file=path, cors_origins=("https://chat.example",))


def ask(method: str, target: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: localhost", *headers]).encode() + b"\r\n\r\n"


@pytest.mark.parametrize(
    "target",
    ["/v1/chat/completions", "/v1/models", "/metrics", "/telemetry", *OLLAMA_READS, "/props", "/upstream/chat/metrics"],
)
async def test_a_key_is_asked_for(rig: Rigs, keyed: GatewayOptions, target: str) -> None:
    here = await rig(config=keyed)
    for headers in (
        (),
        ("Authorization: Bearer wrong",),
        ("X-Api-Key: " + SECRET[:-1],),
        ("Authorization: Basic " + SECRET,),
    ):
        refused = await here.once(ask("GET", target, *headers))
        error = json.loads(refused.body)["error"]
        if target.startswith("/api/"):  # Ollama's shape: its clients show this text
            assert (refused.status, error) == (401, "Invalid API Key: send Authorization: Bearer KEY")
        else:
            assert (refused.status, error["type"]) == (401, "authentication_error")
    for headers in (
        ("Authorization: Bearer " + SECRET,),
        ("x-api-key: " + SECRET,),
        ("Authorization: Basic dXNlcjpwYXNz", "x-api-key: " + SECRET),  # what a proxy in front of us adds
    ):
        assert (await here.once(ask("GET", target, *headers))).status == 200


@pytest.mark.parametrize("target", ["/livez", "/readyz", "/readyz/chat", "/healthz", "/health", "/v1/health", "/"])
async def test_probes_carry_no_key_and_show_none(rig: Rigs, keyed: GatewayOptions, target: str) -> None:
    here = await rig(config=keyed)
    answer = await here.once(ask("GET", target, "Authorization: Bearer " + SECRET))
    assert answer.status == 200
    assert (await here.once(ask("GET", target))).body == answer.body
    assert SECRET.encode() not in answer.body


async def test_a_revoked_key_is_refused_from_the_next_request_on(rig: Rigs, keyed: GatewayOptions) -> None:
    here = await rig(config=keyed)
    client = await here.connect()
    await client.request("GET", "/props", b"", "X-Api-Key: " + SECRET)
    assert (await client.answer()).status == 200
    assert keyed.keys_file is not None
    keys.write(keyed.keys_file, [key for key in keys.read(keyed.keys_file) if key.name != "laptop"])
    await client.request("GET", "/props", b"", "X-Api-Key: " + SECRET)
    assert (await client.answer()).status == 401


@pytest.mark.parametrize(
    "target", ["/slots/0?action=save", "/props", "/lora-adapters", "/upstream/chat/slots/0?action=erase"]
)
async def test_admin_routes_need_an_admin_key(rig: Rigs, keyed: GatewayOptions, target: str) -> None:
    here = await rig(config=keyed)
    assert (await here.once(ask("POST", target, "X-Api-Key: " + SECRET))).status == 403
    assert here.engine.requests == []
    assert (await here.once(ask("POST", target, "X-Api-Key: " + ADMIN))).status == 200
    keyless = await rig()
    assert (await keyless.once(ask("POST", target))).status == 403, "without keys there is no admin"


@pytest.mark.parametrize(
    "target", ["/tools", "/cors-proxy?url=http://x", "/%74ools", "//tools", "/upstream/chat/tools", "/tools/"]
)
async def test_refused_routes_are_refused_to_everybody(rig: Rigs, keyed: GatewayOptions, target: str) -> None:
    here = await rig(config=keyed)
    for method in ("GET", "POST"):
        assert (await here.once(ask(method, target, "X-Api-Key: " + ADMIN))).status == 403
    assert here.engine.requests == []


async def test_fc86_a_preflight_carries_no_key_and_needs_none(rig: Rigs, keyed: GatewayOptions) -> None:
    here = await rig(config=keyed)
    page = "Origin: https://chat.example"
    preflight = await here.once(
        ask(
            "OPTIONS",
            "/v1/models",
            page,
            "Access-Control-Request-Method: GET",
            "Access-Control-Request-Headers: authorization",
        )
    )
    assert preflight.status == 204
    assert preflight.header("access-control-allow-origin") == "https://chat.example"
    assert preflight.header("access-control-allow-headers") == "authorization"
    assert "GET" in (preflight.header("access-control-allow-methods") or "")
    without = await here.once(ask("GET", "/v1/models", page))
    with_key = await here.once(ask("GET", "/v1/models", page, "Authorization: Bearer " + SECRET))
    assert (without.status, with_key.status) == (401, 200)
    for answer in (without, with_key):  # else the page cannot even read that its key is wrong
        assert answer.all("access-control-allow-origin") == ["https://chat.example"]
    passed = await here.once(ask("POST", "/v1/chat/completions", page, "Authorization: Bearer " + SECRET))
    assert passed.all("access-control-allow-origin") == ["https://chat.example"]


@pytest.mark.parametrize(
    ("origins", "has_key", "warned"),
    [(("*",), False, True), (("*",), True, False), (("https://chat.example",), False, False), ((), False, False)],
)
async def test_fc86_every_origin_without_a_key_is_a_warning(
    rig: Rigs,
    keyed: GatewayOptions,
    caplog: pytest.LogCaptureFixture,
    origins: tuple[str, ...],
    has_key: bool,
    warned: bool,
) -> None:
    await rig(config=replace(keyed, cors_origins=origins, keys_file=keyed.keys_file if has_key else None))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [("cors_origins" in each, "edgellm key add" in each) for each in warnings] == [(True, True)] * warned


async def test_a_page_elsewhere_gets_no_cors_headers_and_cannot_act(rig: Rigs) -> None:
    async def generous(line, request):  # type: ignore[no-untyped-def]
        await line.json({}, extra="Access-Control-Allow-Origin: *\r\nAccess-Control-Allow-Credentials: true\r\n")

    here = await rig(generous)
    evil = "Origin: https://evil.example"
    preflight = await here.once(ask("OPTIONS", "/v1/chat/completions", evil, "Access-Control-Request-Method: POST"))
    assert preflight.header("access-control-allow-origin") is None
    posted = await here.once(ask("POST", "/v1/chat/completions", evil, "Content-Type: text/plain"))
    assert (posted.status, json.loads(posted.body)["error"]["kind"]) == (403, "origin_not_allowed")
    assert here.engine.requests == []
    looked = await here.once(ask("GET", "/props", evil))
    assert not [name for name, _ in looked.headers if name.lower().startswith("access-control")]
    own = await here.once(ask("POST", "/v1/chat/completions", "Origin: http://localhost"))
    assert own.status == 200, "the status page's chat box"


async def test_a_foreign_host_is_refused_on_every_route(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(hosts=("box.lan",)))
    for target in ("/", "/healthz", "/v1/models", "/v1/chat/completions"):
        refused = await here.once(f"GET {target} HTTP/1.1\r\nHost: rebound.evil.example\r\n\r\n".encode())
        assert (refused.status, json.loads(refused.body)["error"]["kind"]) == (403, "host_not_allowed")
        assert "hosts" in json.loads(refused.body)["error"]["hint"]
        for host in ("box.lan:80", "127.0.0.1", f"localhost:{here.port}"):
            assert (await here.once(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())).status == 200


async def test_the_machines_own_name_is_no_foreign_host(rig: Rigs) -> None:
    here = await rig()
    name = socket.gethostname()
    for host in (name, f"{name.partition('.')[0]}.local:{here.port}"):
        assert (await here.once(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())).status == 200


@pytest.mark.parametrize("target", [*OLLAMA_READS, "/v1/api/tags", "//api/ps/"])
async def test_a_foreign_host_is_refused_to_ollamas_clients_in_their_shape(rig: Rigs, target: str) -> None:
    here = await rig()
    refused = await here.once(f"GET {target} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode())
    assert refused.status == 403 and isinstance(json.loads(refused.body)["error"], str)
    for unknown in ("/api/nope", "/api"):
        refused = await here.once(f"GET {unknown} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode())
        assert refused.status == 403 and "type" in json.loads(refused.body)["error"], unknown


async def test_a_valid_key_makes_the_host_check_unnecessary_and_nothing_else_does(
    rig: Rigs, keyed: GatewayOptions
) -> None:
    here = await rig(config=keyed)
    rebound = "Host: rebound.evil.example"
    for target in ("/v1/models", "/healthz", "/"):
        for key in ("", "Authorization: Bearer wrong\r\n"):
            refused = await here.once(f"GET {target} HTTP/1.1\r\n{rebound}\r\n{key}\r\n".encode())
            assert (refused.status, json.loads(refused.body)["error"]["kind"]) == (403, "host_not_allowed")
        request = f"GET {target} HTTP/1.1\r\n{rebound}\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
        assert (await here.once(request.encode())).status == 200


async def test_an_editors_page_on_loopback_may_ask(rig: Rigs) -> None:
    here = await rig()
    page = "Origin: vscode-webview://1a2b3c"
    preflight = await here.once(ask("OPTIONS", "/v1/chat/completions", page, "Access-Control-Request-Method: POST"))
    answer = await here.once(ask("POST", "/v1/chat/completions", page))
    assert (preflight.status, answer.status) == (204, 200)
    for each in (preflight, answer):
        assert each.all("access-control-allow-origin") == ["vscode-webview://1a2b3c"]


async def test_an_address_that_others_reach_needs_a_key(rig: Rigs, keyed: GatewayOptions, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no key"):
        await rig(address="0.0.0.0")
    with pytest.raises(ConfigError):
        await rig(address="0.0.0.0", config=GatewayOptions(keys_file=tmp_path / "none.toml"))
    assert (
        await (await rig(address="0.0.0.0", config=GatewayOptions(insecure=True))).once(ask("GET", "/props"))
    ).status == 200
    here = await rig(address="0.0.0.0", config=keyed)
    assert keyed.keys_file is not None
    keys.write(keyed.keys_file, [])
    assert (await here.once(ask("GET", "/props"))).status == 401, "the last key was revoked: every request is rejected"


async def test_no_key_is_in_the_log_or_in_an_error(
    rig: Rigs, keyed: GatewayOptions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    here = await rig(config=keyed)
    answers = [
        await here.once(ask("POST", "/v1/chat/completions", "Authorization: Bearer " + SECRET)),
        await here.once(ask("POST", "/v1/chat/completions", "Authorization: Bearer wrong-secret-key")),
        await here.once(ask("GET", "/healthz", "X-Api-Key: " + SECRET)),
    ]
    seen = caplog.text + "".join(answer.body.decode() + repr(answer.headers) for answer in answers)
    assert "key=laptop" in caplog.text
    assert SECRET not in seen and "wrong-secret-key" not in seen


@pytest.mark.parametrize("target", ["/props", "/upstream/chat/props", "//props/", "/lora-adapters"])
async def test_paths_of_the_machine_are_shown_to_an_admin_key_only(
    rig: Rigs, keyed: GatewayOptions, target: str
) -> None:
    async def script(line, request):  # type: ignore[no-untyped-def]
        await line.json({"model_path": "/home/me/models/a.gguf", "n": [{"path": "/x/b.gguf", "scale": 1.5}]})

    here = await rig(script, config=keyed)
    shown = json.loads((await here.once(ask("GET", target, "X-Api-Key: " + SECRET))).body)
    assert shown == {"model_path": "a.gguf", "n": [{"path": "b.gguf", "scale": 1.5}]}
    assert b"/home/me" in (await here.once(ask("GET", target, "X-Api-Key: " + ADMIN))).body
    assert b"/home/me" in (await (await rig(script)).once(ask("GET", target))).body, "without keys: this machine only"


async def test_paths_are_hidden_in_a_large_answer_too(rig: Rigs, keyed: GatewayOptions) -> None:
    """/props holds the chat template of the model file, of any size; an engine may also send it in chunks."""

    async def script(line, request):  # type: ignore[no-untyped-def]
        await line.json({"model_path": "/home/me/models/a.gguf", "chat_template": "t" * 400_000})

    here = await rig(script, config=keyed)
    answer = await here.once(ask("GET", "/props", "X-Api-Key: " + SECRET))
    assert len(answer.body) > 400_000 and json.loads(answer.body)["model_path"] == "a.gguf"


async def test_what_is_larger_than_any_template_is_not_read_whole(rig: Rigs, keyed: GatewayOptions) -> None:
    async def script(line, request):  # type: ignore[no-untyped-def]
        await line.json({"model_path": "/home/me/models/a.gguf", "chat_template": "t" * (5 << 20)})

    here = await rig(script, config=keyed)
    answer = await here.once(ask("GET", "/props", "X-Api-Key: " + SECRET))
    assert answer.status == 502 and b"/home/me" not in answer.body
    assert (await here.once(ask("GET", "/props", "X-Api-Key: " + ADMIN))).status == 200


async def test_no_client_has_the_requests_of_another_refused(rig: Rigs, keyed: GatewayOptions) -> None:
    """A poison request beside a copy of what monitoring asks made the copy's fingerprint, and monitoring's, a 422."""
    here = await rig(config=keyed)
    body = ("Content-Type: application/json", "Content-Length: 2")
    for secret in (SECRET, ADMIN):
        await here.once(ask("POST", "/v1/chat/completions", "X-Api-Key: " + secret, *body) + b"{}")
    first, second = here.model.fingerprints
    assert first is not None and second is not None and first != second
    await here.once(ask("GET", "/slots", "X-Api-Key: " + ADMIN))
    assert here.model.fingerprints[2:] == [None]


async def test_a_model_is_loaded_unloaded_and_restarted_with_an_admin_key_only(
    rig: Rigs, keyed: GatewayOptions
) -> None:
    here = await rig(config=keyed)
    here.model.aliases = ("a/b",)
    for name, verb in (("chat", "load"), ("a/b", "unload"), ("a%2Fb", "restart")):
        target = f"/admin/models/{name}/{verb}"
        assert (await here.once(ask("POST", target, "X-Api-Key: " + SECRET))).status == 403
        assert (await here.once(ask("POST", target, "Cookie: key=" + ADMIN))).status == 401
        answer = await here.once(ask("POST", target, "X-Api-Key: " + ADMIN))
        assert (answer.status, json.loads(answer.body)["model"]) == (202, "chat")
        assert (await here.once(ask("GET", target, "X-Api-Key: " + ADMIN))).status == 405
    assert here.model.actions == ["unload", "restart"] and here.model.asked == 1
    for target in ("/admin/models/nope/load", "/admin/models/chat/explode", "/admin/models/chat"):
        assert (await here.once(ask("POST", target, "X-Api-Key: " + ADMIN))).status == 404
    assert (await (await rig()).once(ask("POST", "/admin/models/chat/load"))).status == 403, "no key, no admin"


async def test_the_last_requests_are_shown_without_key_and_prompt(rig: Rigs, keyed: GatewayOptions) -> None:
    here = await rig(config=keyed, about=lambda: {"board": "Orin"})
    for _ in range(25):
        await here.once(ask("POST", "/v1/chat/completions", "X-Api-Key: " + SECRET))
    document = json.loads((await here.once(ask("GET", "/telemetry", "X-Api-Key: " + SECRET))).body)
    assert document["about"] == {"board": "Orin"}
    assert len(document["recent"]) == 20
    assert {"key", "prompt"} & document["recent"][0].keys() == set()
    assert (document["recent"][-1]["route"], document["recent"][-1]["outcome"]) == ("/v1/chat/completions", "ok")


async def test_a_resumable_stream_belongs_to_the_key_that_made_it(
    rig: Rigs, keyed: GatewayOptions, tmp_path: Path
) -> None:
    other = "sk-edge-" + "o" * 40
    assert keyed.keys_file is not None
    known = keys.read(keyed.keys_file)
    keys.write(keyed.keys_file, [*known, keys.make("other", other, admin=False, created="", others=known)])
    here = await rig(config=keyed)
    mine, theirs, admin = "X-Api-Key: " + SECRET, "X-Api-Key: " + other, "X-Api-Key: " + ADMIN
    made = "X-Conversation-Id: a::b"
    assert (await here.once(ask("POST", "/v1/chat/completions", mine, made))).status == 200
    assert (await here.once(ask("POST", "/v1/chat/completions", theirs, made))).status == 403
    for method in ("GET", "DELETE"):
        for target in ("/v1/stream?conv_id=a%3A%3Ab", "//v1/stream?x=1&conv_id=a::b"):
            assert (await here.once(ask(method, target, theirs))).status == 404
            assert (await here.once(ask(method, target, mine))).status == 200
            assert (await here.once(ask(method, target, admin))).status == 200
    assert (await here.once(ask("GET", "/v1/stream", theirs))).status == 404
    for key, expected in ((mine, ["a::b"]), (theirs, [])):
        body = json.dumps({"conversation_ids": ["a::b", "c"]})
        request = ask("POST", "/v1/streams/lookup", key, f"Content-Length: {len(body)}") + body.encode()
        assert (await here.once(request)).status == 200
        assert json.loads(here.engine.requests[-1].body) == {"conversation_ids": expected}
    without = await rig()
    assert (await without.once(ask("GET", "/v1/stream?conv_id=x"))).status == 200


class Past:
    """Starts and lines as the daemon has them; implements PastSource."""

    def __init__(self) -> None:
        self.own = Ring()
        self.engine = Ring()
        record = {
            "model": "chat",
            "outcome": "ready",
            "ready_s": 2.5,
            "file": "/secret/m.gguf",
            "samples": [[0, 1, 2, 3]],
        }
        span = {"name": "weights", "parent": "engine", "start_s": 0.5, "end_s": 2.0, "bytes": 1 << 30, "source": "log"}
        self.records = [{**record, "start_id": str(number), "spans": [span]} for number in range(12)]

    def starts(self) -> list[dict[str, Any]]:
        return self.records

    def log(self, engine: bool, model: str | None, since: Mapping[str, int]) -> dict[str, Any]:
        rings = {"chat": self.engine} if engine else {"": self.own}
        return log_lines(LogQuestion(engine, model, dict(since)), self.own, rings)


async def test_the_last_starts_are_shown_without_paths_and_samples(rig: Rigs, keyed: GatewayOptions) -> None:
    here = await rig(config=keyed)
    async with here.client.get("/starts") as answer:
        assert answer.status == 401
    here.context.history = Past()
    async with here.client.get("/starts", headers={"X-Api-Key": SECRET}) as answer:
        document = await answer.json()
    assert [start["start_id"] for start in document["starts"]] == [str(number) for number in range(2, 12)]
    assert document["starts"][0]["spans"][0]["bytes"] == 1 << 30
    assert "secret" not in json.dumps(document) and "samples" not in document["starts"][0]


async def test_the_log_is_read_on_with_an_admin_key_only(rig: Rigs, keyed: GatewayOptions) -> None:
    here = await rig(config=keyed)
    past = here.context.history = Past()
    past.own.add("one")
    past.engine.add("srv one")
    for headers, status in (({}, 401), ({"X-Api-Key": SECRET}, 403)):
        async with here.client.get("/admin/log", headers=headers) as answer:
            assert answer.status == status
    async with here.client.get("/admin/log", headers={"X-Api-Key": ADMIN}) as answer:
        first = await answer.json()
    assert first["lines"] == ["one"]
    past.own.add("two")
    query = {"since": json.dumps(first["next"])}
    async with here.client.get("/admin/log", headers={"X-Api-Key": ADMIN}, params=query) as answer:
        assert (await answer.json())["lines"] == ["two"]
    async with here.client.get("/admin/log", headers={"X-Api-Key": ADMIN}, params={"engine": "1"}) as answer:
        assert (await answer.json())["lines"] == ["srv one"]
    for wrong in ("[]", "{", '{"": "x"}', '{"": 1e999}', "[" * 2000):
        async with here.client.get("/admin/log", headers={"X-Api-Key": ADMIN}, params={"since": wrong}) as answer:
            assert answer.status == 400
    async with here.client.post("/admin/log", headers={"X-Api-Key": ADMIN}) as answer:
        assert answer.status == 405


async def test_evidence_is_shown_to_an_admin_key_only(rig: Rigs, keyed: GatewayOptions) -> None:
    here = await rig(config=keyed, loading=True)
    await here.model.fail("bad_model", "pull it again")
    for target in ("/props", "/healthz"):
        assert b"/secret/path" not in (await here.once(ask("GET", target, "X-Api-Key: " + SECRET))).body
        assert b"/secret/path" in (await here.once(ask("GET", target, "X-Api-Key: " + ADMIN))).body


async def test_a_degraded_answer_says_so_and_strict_gives_none(rig: Rigs) -> None:
    less = ModelStatus("chat", State.READY, degraded=(Degraded("n_ctx", "8192", "4096", "memory"),))
    here = await rig()
    here.model.state = less
    answer = await here.once(ask("GET", "/props"))
    assert (answer.status, answer.header("edgellm-degraded")) == (200, "n_ctx: 4096 instead of 8192")
    assert (await here.once(ask("GET", "/readyz"))).status == 200
    assert json.loads((await here.once(ask("GET", "/healthz"))).body)["status"] == "degraded"
    strict = await rig(config=GatewayOptions(strict=True))
    strict.model.state = less
    assert (await strict.once(ask("GET", "/props"))).status == 503
    assert (await strict.once(ask("GET", "/readyz"))).status == 503
    assert (await strict.once(ask("GET", "/health"))).status == 503


async def test_each_of_two_models_has_a_readiness_of_its_own(rig: Rigs) -> None:
    models = {name: FakeModel(name) for name in ("chat", "embed")}
    models["embed"].aliases = ("second",)
    models["chat"].state = ModelStatus("chat", State.READY)
    here = await rig(models=models)
    for name, status, state in (("chat", 200, "READY"), ("embed", 503, "LOADING"), ("second", 503, "LOADING")):
        answer = await here.once(ask("GET", f"/readyz/{name}"))
        document = json.loads(answer.body)
        assert (answer.status, document["ready"], document["state"]) == (status, status == 200, state)
    both = await here.once(ask("GET", "/readyz"))
    assert both.status == 503
    assert {name: row["ready"] for name, row in json.loads(both.body)["models"].items()} == {
        "chat": True,
        "embed": False,
    }
    unknown = await here.once(ask("GET", "/readyz/nosuch"))
    assert (unknown.status, json.loads(unknown.body)["error"]["kind"]) == (404, "model_not_found")


async def test_a_fault_of_the_configuration_is_an_answer_and_not_an_exit(rig: Rigs) -> None:
    here = await rig(models={}, address="0.0.0.0", fault=Failure("config", "/etc/x: line 3", "edgellm config show"))
    for target in ("/v1/chat/completions", "/healthz", "/health"):
        answer = await here.once(ask("GET", target))
        assert answer.status == 503
        assert b"edgellm config show" in answer.body and b"/etc/x" not in answer.body
    assert (await here.once(ask("GET", "/livez"))).status == 200


async def test_answers_of_ours_do_not_name_versions(rig: Rigs) -> None:
    here = await rig(loading=True, config=GatewayOptions(cors_origins=("https://a.example",)))
    preflight = ask("OPTIONS", "/v1/x", "Origin: https://a.example", "Access-Control-Request-Method: POST")
    for request in (
        *(ask("GET", target) for target in ("/", "/healthz", "/metrics", "/tools", "/v1/models")),
        preflight,
    ):
        assert (await here.once(request)).header("server") == "edgellm"


async def test_livez_is_about_the_supervisor_too(rig: Rigs) -> None:
    here = await rig(alive=lambda: False)
    assert (await here.once(ask("GET", "/livez"))).status == 503


async def test_our_routes_answer_get_only(rig: Rigs) -> None:
    here = await rig()
    answer = await here.once(ask("POST", "/healthz"))
    assert (answer.status, answer.header("allow")) == (405, "GET, HEAD")


async def test_a_mistake_of_ours_is_a_500_without_its_insides(rig: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def document(self) -> dict[str, str]:
            raise RuntimeError("the inside")

    here = await rig(telemetry=Broken())
    client = await here.connect()
    await client.request("GET", "/telemetry")
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (500, "bug")
    assert b"the inside" not in answer.body and "the inside" in caplog.text
    await client.request("GET", "/livez")
    assert (await client.answer()).status == 200
