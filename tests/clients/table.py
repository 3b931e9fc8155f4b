"""Write docs/clients.md, each client's calls here and at a bare llama-server: `python -m tests.clients.table`.

Needs what `make test-full` has made: the clients' environments, and the demo model.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from edge.gateway import keys
from edge.gateway.config import GatewayOptions
from tests.clients.test_real_clients import (
    EXPECTED,
    HERE,
    MEAN_POOLING,
    environment,
    node_client,
    requirements_of,
)
from tests.conftest import CACHE, DEMO, pull
from tests.fakes.upstream.model import FakeModel
from tests.fakes.upstream.real import real_engine
from tests.gateway.conftest import Rigs
from tests.gateway.test_gateway_engine import PROGRAMS, check_answer, play

DOCS = HERE.parents[1] / "docs" / "clients.md"
SECRET = keys.new_secret()
HEADER = """# Clients

Written by `python -m tests.clients.table`: each row is one call, or a series, of that library, with a check of what
comes back. `make test-full` runs the same calls through the gateway. The bare llama-server is the same engine with
the same options and key, asked directly; it serves one model, so calls that need the embedding model beside it fail
there. The last rows are programs: their calls, from their published sources, in the programs' order (Codex sends its
bodies as zstd). Open WebUI runs itself, from its wheel.

**The column Ollama is documented, not measured**: the package registries that the tests use have no Ollama server. It
lists what Ollama's own pages say of the parameters that the call needs, and which page: [a][a] its API, [o][o] OpenAI
compatibility, [n][n] Anthropic compatibility, [e][e] errors. – is what they do not say.

[a]: https://docs.ollama.com/api/introduction
[o]: https://docs.ollama.com/api/openai-compatibility
[n]: https://docs.ollama.com/api/anthropic-compatibility
[e]: https://docs.ollama.com/api/errors

Home Assistant, VS Code, Open WebUI and others use these APIs: Ollama's `/api/tags`, `/api/show`, `/api/chat`
(docs/gateway.md), and OpenAI's under `/v1`. A base URL may end in a slash or in `/api/v1`.

| client | call | edgellm | bare llama-server | Ollama, documented |
|---|---|---|---|---|
"""
# By call, or by client and call where clients differ. Read on 2026-11-30.
_DOCUMENTED = {
    "yes, o": (
        *("models.list", "models.retrieve", "chat", "chat stream, usage", "json schema", "parse into pydantic"),
        *("completions", "completions, stream", "responses", "responses, stream", "invoke", "stream"),
        *("structured output, json schema", "embeddings, base64 and float", "embeddings", "embedding", "completion"),
        *("prompt, stream", "prompt, no stream", "schema", "go on with the conversation", "as llamafile/"),
        *("a chat over OpenAI's API, streamed and not", "Continue, OpenAI"),
    ),
    # They need `tool_choice`, `n` or `logprobs`; keys are "required but ignored".
    "no, o": (
        *("tools", "tools, stream", "structured output, function calling", "logprobs", "n = 2"),
        *("error: a wrong key is a 401", "a wrong key is named as the cause"),
    ),
    "yes, n": (
        *("messages", "messages, stream", "system, several turns", "anthropic messages", "anthropic stream"),
        "as anthropic/, through /v1/messages",
    ),
    "no, n": (
        *("count_tokens", "anthropic: tools", "anthropic: tools, stream", "anthropic: error: a wrong key is a 401"),
    ),
    "yes, e": (
        *("error: bad messages are a 400", "error: an unknown model is a 404"),
        *("ollama: errors are ResponseErrors with a text", "node: ollama: an unknown model is an error with a text"),
    ),
    "yes, a": (
        *("ollama: list", "ollama: ps", "ollama: version", "ollama: show", "ollama: chat"),
        *("ollama: chat, streamed, says the same", "ollama: generate, with system and raw, streamed and not"),
        *("ollama: tools, streamed and not", "ollama: format: a schema, and json", "ollama: embed and embeddings"),
        *("ollama: a model is loaded without a prompt", "langchain_ollama: invoke", "langchain_ollama: stream"),
        *("langchain_ollama: structured output", "langchain_ollama: embeddings", "node: ollama: list and show"),
        *("node: ollama: chat", "node: ollama: stream", "node: ollama: embed", "Home Assistant", "Continue, Ollama"),
        *("Open WebUI, Ollama", "Ollama's version, loaded models and details", "a model is unloaded"),
        *("a chat over Ollama's API, streamed and not", "Ollama's generate and a schema"),
    ),
    "yes, a, o": (
        *("both connections are saved and verified", "the models of both are offered", "tools over both"),
        *("embeddings over both", "VS Code"),
    ),
    "–": ("anthropic: models.list",),
}
OF_CALL = {call: cell for cell, calls in _DOCUMENTED.items() for call in calls}


@asynccontextmanager
async def relayed(path: Path) -> AsyncIterator[int]:
    """A TCP port in front of a unix socket, byte for byte."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection(str(path))
        await asyncio.gather(copy(reader, engine_writer), copy(engine_reader, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def run(port: int, command: list[str | Path]) -> dict[str, bool]:
    """Return which checks of a client passed."""
    variables = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    variables |= {"BASE": f"http://127.0.0.1:{port}", "KEY": SECRET, "PYTHONPATH": str(HERE)}
    child = await asyncio.create_subprocess_exec(
        *command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    out, _ = await asyncio.wait_for(child.communicate(), 600)
    done = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    return {each["check"]: each["ok"] for each in done}


async def main() -> None:
    model = Path(pull(DEMO, CACHE / "models").path)
    template = (HERE / "tools.jinja").read_text()
    options = {"model_alias": ["chat"], "n_ctx": 8192, "use_jinja": True, "chat_template": template}
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gw-") as name:
        folder = Path(name)
        chat, bare, embedding = folder / "chat.sock", folder / "bare.sock", folder / "emb.sock"
        keys.write(folder / "keys.toml", [keys.make("clients", SECRET, admin=False, created="", others=())])
        with (
            real_engine(model, chat, **options),
            real_engine(model, bare, **options, api_keys=[SECRET]),
            real_engine(model, embedding, model_alias=["emb"], embedding=True, pooling_type=MEAN_POOLING),
        ):
            async with AsyncExitStack() as stack:
                rigs = Rigs(folder, stack)
                models = {"chat": FakeModel("chat", str(chat)), "emb": FakeModel("emb", str(embedding))}
                here = await rigs(models=models, config=GatewayOptions(keys_file=folder / "keys.toml"))
                direct = await stack.enter_async_context(relayed(bare))
                for client in EXPECTED:
                    command = command_of(client)
                    ours, theirs = await run(here.port, command), await run(direct, command)
                    for check, ok in ours.items():
                        bare_ok = theirs.get(check, False)
                        rows.append(
                            f"| {client} | {check} | {mark(ok)} | {mark(bare_ok)} | {documented(client, check)} |"
                        )
                rows += [await program_row(program, here.port, direct) for program in PROGRAMS]
    DOCS.write_text(HEADER + "\n".join(rows) + "\n")


async def program_row(program: str, port: int, direct: int) -> str:
    """Return the row of a program's recorded calls. `direct`: port of the bare engine."""
    calls = " → ".join(f"{method} `{target}`" for method, target, _ in PROGRAMS[program])
    marks = [mark(await plays(each, program)) for each in (port, direct)]
    return f"| {program} | {calls} | {marks[0]} | {marks[1]} | {documented(program)} |"


async def plays(port: int, program: str) -> bool:
    """Return whether all calls of a program are answered as it needs them."""
    try:
        for answer in await play(port, program, f"Authorization: Bearer {SECRET}"):
            check_answer(*answer)
    except (AssertionError, ValueError, LookupError, asyncio.IncompleteReadError, ConnectionError):
        return False
    return True


def command_of(client: str) -> list[str | Path]:
    if client == "node":
        return node_client(CACHE)
    return [environment(CACHE, requirements_of(client)), HERE / f"{client}_client.py"]


def documented(client: str, check: str = "") -> str:
    """Return what Ollama's documentation says of a call, and where; a dash where it says nothing."""
    found = (OF_CALL.get(each) for each in (f"{client}: {check}", check, client))
    return next((each for each in found if each is not None), "–")


def mark(ok: bool) -> str:
    return "✓" if ok else "✗"


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
