"""Resumable streams of llama-server and the keys that made them: spellings, headers, forms and floods of ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.gateway import keys
from edge.gateway.accounting import RequestRecord
from edge.gateway.config import GatewayOptions
from edge.gateway.openai import RejectedError
from edge.gateway.streams import StreamOwners, check_stream
from tests.gateway.conftest import Rig, Rigs
from tests.gateway.raw import Answer

MINE, THEIRS, ADMIN = (name + "-" + "k" * 40 for name in ("mine", "theirs", "admin"))
CHAT = "/v1/chat/completions"


@pytest.fixture
async def here(rig: Rigs, tmp_path: Path) -> Rig:
    """A gateway with two keys and an admin's; MINE has made the stream `a b`, the admin `root`."""
    ring: list[keys.Key] = []
    for secret in (MINE, THEIRS, ADMIN):
        name = secret.partition("-")[0]
        ring.append(keys.make(name, secret, admin=name == "admin", created="", others=ring))
    path = tmp_path / "keys.toml"
    keys.write(path, ring)
    here = await rig(config=GatewayOptions(keys_file=path))
    assert (await ask(here, "POST", CHAT, MINE, "X-Conversation-Id: a b")).status == 200
    assert (await ask(here, "POST", CHAT, ADMIN, "X-Conversation-Id: root")).status == 200
    here.engine.requests.clear()
    return here


async def ask(here: Rig, method: str, target: str, key: str, *headers: str, body: bytes = b"") -> Answer:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", f"X-Api-Key: {key}", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return await here.once("\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body)


@pytest.mark.parametrize(
    "target",
    [
        "/v1/%73tream?conv_id=a%20b",
        "/v1/stream?conv_id=a+b",
        "/v1/stream/?conv_id=a%20b",
        "/upstream/chat/v1/strea%6d?conv_id=a%20b",
        "/v1/stream?conv%5Fid=a%20b",
        "/v1/stream?conv_id=theirs&conv_id=a%20b",
        "/v1/stream?conv_id=a%20b&conv_id=theirs",
        "/v1/stream?conv_id=&conv_id=a%20b",
        "/v1/stream?conv_id=a%2520b",
        "/v1/stream?conv_id=a%20b::model",
        "/v1/stream?conv_id=root",
        "/v1/stream#?conv_id=a%20b",
        "/api/v0/stream?conv_id=a%20b",
    ],
)
async def test_no_spelling_reaches_the_stream_of_another_key(here: Rig, target: str) -> None:
    assert (await ask(here, "POST", CHAT, THEIRS, "X-Conversation-Id: theirs")).status == 200
    here.engine.requests.clear()
    for method in ("GET", "DELETE"):
        assert (await ask(here, method, target, THEIRS)).status in (404, 405), method
    assert here.engine.requests == []
    assert (await ask(here, "GET", "/v1/%73tream?conv_id=a%20b", MINE)).status == 200
    assert (await ask(here, "DELETE", "/v1/stream?conv_id=root", ADMIN)).status == 200


async def test_fields_of_a_form_name_no_stream(here: Rig) -> None:
    """cpp-httplib puts the fields of a form into the same table as those of the query, the last one wins."""
    form = "Content-Type: application/x-www-form-urlencoded"
    await ask(here, "POST", CHAT, THEIRS, "X-Conversation-Id: theirs")
    here.engine.requests.clear()
    for method in ("GET", "DELETE"):
        for body in (b"conv_id=a+b", b"conv_id=a+b&" + b"x" * 400_000):
            assert (await ask(here, method, "/v1/stream?conv_id=theirs", THEIRS, form, body=body)).status == 404
    assert here.engine.requests == []


@pytest.mark.parametrize("header", ["x-conversation-id: own\r\nX-CONVERSATION-ID: a b",
                                    "X-Conversation-Id: own\r\nX-Conversation-Id: a b"])  # fmt: skip
async def test_two_ids_in_one_request_are_refused(here: Rig, header: str) -> None:
    """llama-server takes the header whose spelling sorts first: upper case before lower case."""
    assert (await ask(here, "POST", CHAT, THEIRS, header)).status == 400
    assert here.engine.requests == []


@pytest.mark.parametrize("ident", ["a%20b", "a b::other", "a%2520b", "root", "root::x"])
async def test_an_id_that_decodes_to_anothers_is_anothers(here: Rig, ident: str) -> None:
    """Older cpp-httplib decodes percent signs in headers, and lookup finds ID::MODEL by ID."""
    assert (await ask(here, "POST", CHAT, THEIRS, f"X-Conversation-Id: {ident}")).status == 403
    assert (await ask(here, "POST", "/tokenize", THEIRS, f"X-Conversation-Id: {ident}")).status == 403
    assert here.engine.requests == []


async def test_bytes_that_are_no_text_are_not_confused_with_their_replacement(here: Rig) -> None:
    assert (await ask(here, "POST", CHAT, MINE, "X-Conversation-Id: \udcff")).status == 200
    assert (await ask(here, "POST", CHAT, THEIRS, "X-Conversation-Id: \ufffd")).status == 200
    here.engine.requests.clear()
    assert (await ask(here, "GET", "/v1/stream?conv_id=%FF", THEIRS)).status == 404
    assert (await ask(here, "GET", "/v1/stream?conv_id=%FF", MINE)).status == 200


async def test_a_lookup_shows_own_streams_only_however_large_it_is(here: Rig) -> None:
    async def lookup(key: str, document: object) -> Answer:
        return await ask(here, "POST", "/v1/streams/%6cookup", key, body=json.dumps(document).encode())

    for document in ({"conversation_ids": ["a b", "root", 1, None, ["a b"]]}, ["a b"], {"conversation_ids": "a b"}):
        assert (await lookup(THEIRS, document)).status == 200
        assert json.loads(here.engine.requests[-1].body) == {"conversation_ids": []}
    here.engine.requests.clear()
    large = {"pad": "x" * 3_000_000, "conversation_ids": ["a b"]}
    assert (await lookup(THEIRS, large)).status == 413
    assert here.engine.requests == []
    assert (await lookup(ADMIN, large)).status == 200


def test_no_key_pushes_out_the_ids_of_another() -> None:
    owners = StreamOwners()
    assert owners.claim("victim", "mine")
    for number in range(2 * owners.MOST):
        assert owners.claim(f"flood-{number}" + "x" * 8000, "theirs")
    assert owners.owns("victim", "mine") and not owners.claim("victim", "theirs")
    assert not owners.owns("flood-0" + "x" * 8000, "theirs") and owners.owns("flood-8191" + "x" * 8000, "theirs")


def test_a_name_that_is_given_again_reads_no_stream_of_the_former_key() -> None:
    class Whole:
        complete, data = True, None

    def record(key_hash: str) -> RequestRecord:
        return RequestRecord("GET", 0.0, key="bob", key_hash=key_hash)

    owners = StreamOwners()
    check_stream(owners, "POST", "/v1/chat/completions", ["c"], Whole(), record("old"))
    check_stream(owners, "GET", "/v1/stream?conv_id=c", [], Whole(), record("old"))
    for method in ("GET", "DELETE"):
        with pytest.raises(RejectedError):
            check_stream(owners, method, "/v1/stream?conv_id=c", [], Whole(), record("new"))
