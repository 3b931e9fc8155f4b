"""The real engine behind the gateway."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.builder.tiny_model import Shape, tiny_model
from edge.gateway import connection_pool
from edge.supervisor.warmup import grey_png
from tests.fakes.projectors import write_projector
from tests.fakes.upstream.model import FakeModel
from tests.fakes.upstream.real import get, real_engine
from tests.gateway.conftest import Rig, Rigs
from tests.gateway.raw import LIMIT_S, Client, until
from tests.gateway.test_gateway_encoding import zstd

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"
VOLATILE = re.compile(
    rb'"(id|created|prompt_\w*ms|predicted_\w*ms|\w+_per_second|cache_n|prompt_n|cached_tokens)":("[^"]*"|[0-9.e+-]+)'
)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        path = Path(folder) / "engine.sock"
        # Its tools are on, as a stray LLAMA_ARG_TOOLS=all would switch them on.
        with real_engine(smollm2, path, model_alias=["chat"], server_tools=["all"]):
            yield path


@pytest.fixture
async def here(rig: Rigs, engine: Path) -> Rig:
    model = FakeModel(socket_path=str(engine))
    model.slots = 2
    return await rig(models={"chat": model})


def question(**more: Any) -> bytes:
    document = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0, "seed": 1}
    return json.dumps(document | more).encode()


async def _through(here: Rig, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
    client = await here.connect()
    await client.request(method, target, body)
    answer = await client.answer()
    return answer.status, answer.body


async def _direct(engine: Path, method: str, target: str, body: bytes | None = None) -> tuple[int, bytes]:
    return await asyncio.to_thread(get, engine, target, method, body)


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("GET", "/props", b""),
        ("POST", "/tokenize", b'{"content": "Hello w\xc3\xb6rld"}'),
        ("POST", "/apply-template", question()),
        ("POST", CHAT, b"{broken"),
        ("POST", CHAT, b'{"messages": "x"}'),
        ("POST", CHAT, b'{"messages":[{"role":"user","content":"\xff\xfe"}]}'),
        ("GET", "/no/such/route", b""),
        ("DELETE", "/v1/stream", b""),
        ("POST", CHAT, question(max_tokens=2, messages=[{"role": "user", "content": "word " * 6000}])),
    ],
)
async def test_the_answer_is_the_engines_byte_for_byte(
    here: Rig, engine: Path, method: str, target: str, body: bytes
) -> None:
    assert await _through(here, method, target, body) == await _direct(engine, method, target, body or None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_the_engines_but_for_ids_and_times(here: Rig, engine: Path, stream: bool) -> None:
    body = question(stream=stream, stream_options={"include_usage": True})
    await _direct(engine, "POST", CHAT, body)  # the second and third time have the same cache
    direct, through = await _direct(engine, "POST", CHAT, body), await _through(here, "POST", CHAT, body)
    assert VOLATILE.sub(b"", through[1]) == VOLATILE.sub(b"", direct[1])
    stats = here.context.stats.model("chat")
    assert stats.completion_tokens == 8
    assert stats.prompt_tokens > 8 and (stats.last_per_s or 0) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_fc38_the_slot_is_free_once_the_client_has_left(here: Rig, engine: Path, stream: bool) -> None:
    client = await here.connect()
    await client.request("POST", CHAT, question(max_tokens=3000, ignore_eos=True, stream=stream))
    await _until_busy(engine, True)
    if stream:
        await client.head()
        await client.chunk()
    client.reset()
    await _until_busy(engine, False)
    await until(lambda: here.context.stats.model("chat").gone == 1)
    assert here.context.stats.requests[CHAT, "499" if not stream else "200", "chat"] == 1


async def test_fc38_beside_a_stream_the_work_for_a_client_that_left_ends_with_the_stream_at_the_latest(
    here: Rig, engine: Path
) -> None:
    """llama-server looks for closed connections after a second without any result, of other slots too."""
    first, second = await here.connect(), await here.connect()
    await first.request("POST", CHAT, question(max_tokens=3000, ignore_eos=True, stream=True))
    await first.head()
    await first.chunk()
    await second.request("POST", CHAT, question(max_tokens=3000, ignore_eos=True))
    await until(lambda: here.context.admission.active("chat") == 2)
    second.reset()
    await until(lambda: here.context.stats.model("chat").gone == 1)
    assert here.context.admission.active("chat") == 1, "the gateway's own slot is free at once"
    first.reset()
    await _until_busy(engine, False)


async def _until_busy(engine: Path, busy: bool) -> None:
    """llama-server looks for closed connections once a second without any result: asking more often would hide them."""
    for _ in range(40):
        status, body = await _direct(engine, "GET", "/slots")
        if status == 200 and any(slot["is_processing"] for slot in json.loads(body)) is busy:
            return
        await asyncio.sleep(0.1 if busy else 1.3)
    raise AssertionError(f"no slot became {'busy' if busy else 'free'}")


async def test_the_first_chunk_of_a_chat_comes_before_its_last_is_made(here: Rig, engine: Path) -> None:
    client = await here.connect()
    await client.request("POST", CHAT, question(max_tokens=3000, ignore_eos=True, stream=True))
    await client.head()
    assert (await client.chunk()).startswith(b"data: ")
    slots = json.loads((await _direct(engine, "GET", "/slots"))[1])
    assert any(slot["is_processing"] for slot in slots)
    client.reset()
    await _until_busy(engine, False)


async def test_tools_are_refused_though_the_engine_would_run_them(here: Rig, engine: Path) -> None:
    assert (await _direct(engine, "GET", "/tools"))[0] == 200, "this engine has them on: else the test proves nothing"
    for target in (
        "/tools",
        "/%74ools",
        "//tools",
        "/upstream/chat/tools",
        "/upstream/chat//tools",
        "/cors-proxy?url=http://x",
    ):
        for method in ("GET", "POST"):
            assert (await _through(here, method, target))[0] == 403, target


async def test_thirty_clients_at_once_are_all_answered(here: Rig, engine: Path) -> None:
    answers = await asyncio.gather(*(_through(here, "POST", "/tokenize", b'{"content": "x"}') for _ in range(30)))
    assert {status for status, _ in answers} == {200}


async def test_fc91_a_kept_connection_is_given_up_before_the_engine_does(engine: Path) -> None:
    """What the engine says itself: `Keep-Alive: timeout=5, max=100`."""
    reader, writer = await asyncio.open_unix_connection(str(engine))
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
    writer.close()
    found = re.search(rb"(?i)keep-alive: timeout=(\d+)", head)
    assert found is not None, head
    assert connection_pool.KEEP_S < connection_pool.ENGINE_KEEPS_S == float(found[1])


async def test_its_own_pages_are_under_upstream(here: Rig) -> None:
    status, metrics = await _through(here, "GET", "/upstream/chat/metrics")
    assert status == 200 and b"llamacpp:" in metrics
    client = await here.connect()
    await client.request("GET", "/upstream/chat/", b"", "Accept-Encoding: gzip")
    page = await client.answer()
    assert (page.status, page.header("content-encoding")) == (200, "gzip")
    assert page.body[:2] == b"\x1f\x8b"


HI = [{"role": "user", "content": "Say hello."}]
LAMP = {"name": "turn_on", "description": "Turn a lamp on", "parameters": {"type": "object", "properties": {}}}
# What these programs send, in their order (published sources, 2026), limited to 8 tokens.
PROGRAMS: dict[str, list[tuple[str, str, Any]]] = {
    "Home Assistant": [
        ("GET", "/api/tags", None),
        (
            "POST",
            "/api/chat",
            {
                "model": "chat",
                "messages": [{"role": "system", "content": "You are a voice assistant."}, *HI],
                "tools": [{"type": "function", "function": LAMP}],
                "stream": True,
                "keep_alive": "-1s",
                "options": {"num_ctx": 8192, "num_predict": 8},
                "think": False,
            },
        ),
    ],
    "VS Code": [
        ("GET", "/api/version", None),
        ("GET", "/api/tags", None),
        ("POST", "/api/show", {"model": "chat"}),
        ("POST", "/v1/chat/completions", {"model": "chat", "messages": HI, "stream": True, "max_tokens": 8}),
    ],
    "Continue, Ollama": [
        ("POST", "/api/show", {"name": "chat"}),
        (
            "POST",
            "/api/chat",
            {
                "model": "chat",
                "messages": HI,
                "options": {"num_predict": 8, "num_ctx": 32768, "use_mmap": True},
                "keep_alive": 1800,
                "stream": True,
            },
        ),
    ],
    "Continue, OpenAI": [
        ("GET", "/v1/models", None),
        ("POST", "/v1/chat/completions", {"model": "chat", "messages": HI, "stream": True, "max_tokens": 8}),
    ],
    "Open WebUI, Ollama": [
        ("GET", "/api/version", None),
        ("GET", "/api/tags", None),
        ("GET", "/api/ps", None),
        ("POST", "/api/chat", {"model": "chat", "messages": HI, "options": {"num_predict": 8}, "format": ""}),
    ],
    "Open WebUI, OpenAI with a slash": [
        ("GET", "//v1/models", None),
        ("POST", "//v1/chat/completions", {"model": "chat", "messages": HI, "stream": True, "max_tokens": 8}),
    ],
    "Codex": [
        (
            "POST",
            "/v1/responses",
            {
                "model": "chat",
                "instructions": "You are a coding agent.",
                "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}],
                "tools": [{"type": "function", "strict": False, **LAMP}],
                "tool_choice": "auto",
                "parallel_tool_calls": False,
                "reasoning": None,
                "store": False,
                "stream": True,
                "include": [],
                "prompt_cache_key": "0198-1",
                "max_output_tokens": 8,
            },
        ),
    ],
}
PACKED = {"Codex"}  # these send each body as zstd


async def play(port: int, program: str, *headers: str) -> list[tuple[str, int, bytes]]:
    """Send a program's calls; return target, status and body of each answer. `headers`: sent along."""
    found = []
    for method, target, asked in PROGRAMS[program]:
        body, kind = b"" if asked is None else json.dumps(asked).encode(), ["Content-Type: application/json"]
        if body and program in PACKED:
            body, kind = zstd.compress(body), [*kind, "Content-Encoding: zstd"]
        client = await Client.connect(port)
        try:
            await client.request(method, target, body, *headers, *(kind if body else ()))
            answer = await client.answer()
        finally:
            await client.close()
        found.append((target, answer.status, answer.body))
    return found


def check_answer(target: str, status: int, body: bytes) -> None:
    """Raise AssertionError unless the program can work with the answer."""
    assert status == 200, (target, body)
    if target == "/api/chat":
        lines = [json.loads(line) for line in body.splitlines()]
        assert lines[-1]["done"] and lines[-1]["eval_count"] > 0
        assert "".join(line["message"]["content"] for line in lines)
    if target == "/api/tags":
        assert "chat" in [each["model"] for each in json.loads(body)["models"]]
    if target == "/v1/responses":
        assert b"event: response.output_text.delta" in body and b"event: response.completed" in body


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_calls_of_programs_that_look_for_ollama_are_answered(here: Rig, program: str) -> None:
    for target, status, body in await play(here.port, program):
        check_answer(target, status, body)


async def _ask_ollama(here: Rig, route: str, **asked: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "see", "options": {"num_predict": 1}, "stream": False, **asked}
    status, answer = await _through(here, "POST", route, json.dumps(body).encode())
    return status, json.loads(answer)


async def test_images_of_an_ollama_client_reach_the_projector(rig: Rigs, tmp_path: Path, sockets: Path) -> None:
    model, path = tmp_path / "m.gguf", sockets / "see.sock"
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    model.write_bytes(b"".join(tiny_model(Shape(n_ctx_train=4096), texts=template)))
    projector = write_projector(tmp_path / "mmproj-m.gguf", "clip", 128)  # (336 / 14)² patches, one token each
    picture, patches = base64.b64encode(grey_png(64)).decode(), 576
    with real_engine(model, path, **{"mmproj.path": str(projector)}):
        here = await rig(models={"see": FakeModel("see", str(path))})
        chat = [{"role": "user", "content": "What is it?"}]
        _, blind = await _ask_ollama(here, "/api/chat", messages=chat)
        for images in ([picture], [picture, picture]):
            seen = [{**chat[0], "images": images}]
            for route, asked in (
                ("/api/chat", {"messages": seen}),
                ("/api/generate", {"prompt": "What is it?", "images": images}),
            ):
                status, answer = await _ask_ollama(here, route, **asked)
                assert status == 200 and answer["done"], answer
                more = answer["prompt_eval_count"] - blind["prompt_eval_count"]
                assert patches * len(images) <= more <= patches * len(images) + 20, (route, more)
        no_image = base64.b64encode(b"no image").decode()
        status, refused = await _ask_ollama(here, "/api/chat", messages=[{**chat[0], "images": [no_image]}])
        assert status == 400 and refused.keys() == {"error"} and "image" in refused["error"], refused
        shown = await _through(here, "POST", "/api/show", b'{"model": "see"}')
        assert "vision" in json.loads(shown[1])["capabilities"]


async def test_texts_that_are_too_long_are_cut_for_an_ollama_client(rig: Rigs, smollm2: Path, sockets: Path) -> None:
    """As Ollama does. One piece of a document that is too long would fail the request for all of them."""
    path, n_ctx = sockets / "emb.sock", 256
    sizes = {"n_ctx": n_ctx, "n_parallel": 1, "n_batch": n_ctx, "n_ubatch": n_ctx}
    with real_engine(smollm2, path, embedding=True, pooling_type=1, **sizes):
        model = FakeModel("see", str(path))
        model.model_info = {"n_ctx": n_ctx}
        here = await rig(models={"see": model})
        _, short = await _ask_ollama(here, "/api/embed", input="short")
        for long in ("word " * 2000, "\N{CJK UNIFIED IDEOGRAPH-6A21}" * 1000):
            status, answer = await _ask_ollama(here, "/api/embed", input=[long, "short"])
            assert status == 200 and len(answer["embeddings"]) == 2, answer
            assert answer["embeddings"][1] == pytest.approx(short["embeddings"][0], abs=1e-3), "in their order"
            assert n_ctx - 20 <= answer["prompt_eval_count"] - short["prompt_eval_count"] <= n_ctx
            status, refused = await _ask_ollama(here, "/api/embed", input=[long], truncate=False)
            assert status >= 400 and "too large" in refused["error"], refused
        status, answer = await _ask_ollama(here, "/api/embeddings", prompt="word " * 2000)
        assert (status, len(answer["embedding"])) == (200, len(short["embeddings"][0]))


async def test_thirty_two_chats_of_one_client_are_all_answered_by_one_slot(rig: Rigs, engine: Path) -> None:
    """The bare engine queues them all; so does the gateway, and the connection is not lost meanwhile."""
    from openai import AsyncOpenAI

    model = FakeModel(socket_path=str(engine))
    model.slots = 1
    here = await rig(models={"chat": model})
    hello: Any = [{"role": "user", "content": "Say hello."}]
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{here.port}/v1/", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="chat", messages=hello, max_tokens=2) for _ in range(32))
        )
    assert [answer.choices[0].message.role for answer in answers] == ["assistant"] * 32


async def test_a_dead_engine_is_a_cut_stream_and_then_a_502(rig: Rigs, smollm2: Path, sockets: Path) -> None:
    path = sockets / "dies.sock"
    with real_engine(smollm2, path) as child:
        model = FakeModel(socket_path=str(path))
        here = await rig(models={"chat": model})
        client: Client = await here.connect()
        await client.request("POST", CHAT, question(max_tokens=3000, ignore_eos=True, stream=True))
        await client.head()
        await client.chunk()
        child.kill()
        text = b""
        with pytest.raises(asyncio.IncompleteReadError):
            while True:
                text = await client.chunk()
        assert json.loads(text.partition(b"data: ")[2])["error"]["kind"] == "upstream_died"
        client = await here.connect()
        await client.request("POST", CHAT, question(), "Edgellm-Max-Wait: 0.2")
        assert (await client.answer()).status == 502
