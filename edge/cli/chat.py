"""`edgellm chat`: one question to a running server."""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import typer
from msgspec import Struct, field

from edge.cli.options import Json, StateDir
from edge.errors import EdgeError, NotRunningError, TimedOutError, UnavailableError, UsageError

KEY_VARIABLE = "EDGELLM_API_KEY"


def register(root: typer.Typer) -> None:
    root.command(epilog='Example: edgellm chat "What is a capacitor?"')(chat)


def chat(
    text: Annotated[list[str] | None, typer.Argument(help="the question; - reads standard input")] = None,
    model: Annotated[str, typer.Option("--model", "-m", metavar="ID", help="one of several models")] = "",
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="system prompt")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="longest answer")] = 1024,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="address of another server")] = "",
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Ask a running server and stream its answer. EDGELLM_API_KEY holds the key where the server needs one."""

    words = text or ["-"]
    prompt = sys.stdin.read() if words == ["-"] else " ".join(words)
    question = Question(prompt.strip(), model, system, max_tokens)
    terminal = sys.stdout.isatty() and not as_json

    def waiting(state: str) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r\x1b[K{state}", nl=False, err=True)

    def piece(part: str) -> None:
        if not as_json:
            typer.echo(part, nl=False)
            sys.stdout.flush()

    answer = ask(url or server_url(os.environ, state_dir), question, os.environ.get(KEY_VARIABLE), piece, waiting)
    if as_json:
        typer.echo(json.dumps(answer.document(), ensure_ascii=False))
        return
    typer.echo("")
    if terminal and answer.summary:
        typer.echo(f"\x1b[2m{answer.summary}\x1b[0m", err=True)


# Client of the public API for `edgellm chat`: one question, one streamed answer.

# The first byte may take as long as a model loads; the server sends heartbeats every few seconds meanwhile.
SILENCE_S = 120.0


class Question(Struct, frozen=True):
    """A chat request. An empty `model` leaves the choice to the server."""

    text: str
    model: str = ""
    system: str = ""
    max_tokens: int = 1024

    def document(self) -> dict[str, Any]:
        """Return the OpenAI chat request: streamed, with usage."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.text})
        document: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.max_tokens,
        }
        return document | ({"model": self.model} if self.model else {})


class Answer(Struct):
    """A streamed answer so far, then whole."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage or None,
            "timings": self.timings or None,
        }

    @property
    def summary(self) -> str:
        """Return `120 tokens, 41.3 tokens/s` as far as known."""
        tokens, speed = self.usage.get("completion_tokens"), self.timings.get("predicted_per_second")
        known = [f"{tokens} tokens" if tokens else "", f"{speed:.1f} tokens/s" if speed else ""]
        return ", ".join(part for part in known if part)


def server_url(env: Mapping[str, str], state_dir: Path | None) -> str:
    """Return the address of the running edgellm. Raises NotRunningError."""
    from edge.cli.client import Client, find, not_running
    from edge.daemon.lock import held

    places = find(env, state_dir)
    if not held(places.lock):
        raise not_running(places)
    urls: list[str] = Client(places).status()["urls"]
    web = [url for url in urls if url.startswith("http")]
    if not web:
        raise UnavailableError("the running edgellm has no HTTP address for clients of this machine", "give --url")
    return reachable(web[0])


def reachable(url: str) -> str:
    """Return an address that a client can connect to: the loopback address for a wildcard."""
    parts = urlsplit(url)
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname or "")
    if anywhere is None:
        return url
    return urlunsplit(parts._replace(netloc=anywhere if parts.port is None else f"{anywhere}:{parts.port}"))


def ask(
    url: str, question: Question, key: str | None, piece: Callable[[str], None], waiting: Callable[[str], None]
) -> Answer:
    """Send a question and collect its answer.

    `piece` is called with each part of the text; `waiting` with the state of the server while its model loads, then "".

    Raises UsageError, NotRunningError, UnavailableError, TimedOutError, EdgeError.
    """
    if not question.text:
        raise UsageError("there is no question", 'edgellm chat "What is a capacitor?"')
    headers = {"Edgellm-Heartbeat": "1"} | ({"Authorization": f"Bearer {key}"} if key else {})
    answer = Answer()
    endpoint = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    # The server is on this machine or in its network: no proxy.
    client = httpx.Client(timeout=httpx.Timeout(SILENCE_S, connect=5.0), trust_env=False, verify=_trust(endpoint))
    try:
        with client, client.stream("POST", endpoint, json=question.document(), headers=headers) as response:
            if response.status_code != 200:
                response.read()
                raise _failure(response.status_code, _error(response.text))
            for line in response.iter_lines():
                _take(line, answer, piece, waiting)
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            hint = "export SSL_CERT_FILE=… names a certificate to trust"
            raise UnavailableError(f"the certificate of {url} is not trusted here", hint) from error
        raise NotRunningError(f"nothing answers at {url}", "start it: `edgellm up`") from error
    except httpx.TimeoutException as error:
        raise TimedOutError(f"{url} sent nothing for {SILENCE_S:.0f} s", "`edgellm status` shows its state") from error
    except httpx.InvalidURL as error:
        raise UsageError(f"not a URL: {url!r}", "write it like http://127.0.0.1:8080") from error
    except httpx.TransportError as error:
        raise EdgeError("the answer broke off", "`edgellm logs` shows the engine's last lines") from error
    return answer


def _trust(endpoint: str) -> ssl.SSLContext | bool:
    """Return the system's certificates and SSL_CERT_FILE; plain HTTP loads none."""
    return ssl.create_default_context() if endpoint.startswith("https:") else False


def _take(line: str, answer: Answer, piece: Callable[[str], None], waiting: Callable[[str], None]) -> None:
    """Apply one line of the event stream: a comment is a heartbeat with the state of the server."""
    if line.startswith(": "):
        waiting(line[2:])
        return
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = _json(line[6:])
    if isinstance(event.get("error"), dict):
        waiting("")
        raise _failure(502, event["error"])
    for part in _parts(event, answer):
        if not answer.text:
            waiting("")
        answer.text += part
        piece(part)


def _parts(event: dict[str, Any], answer: Answer) -> Iterator[str]:
    answer.usage = event.get("usage") or answer.usage
    answer.timings = event.get("timings") or answer.timings
    for choice in event.get("choices") or []:  # the usage event has none
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        part = (choice.get("delta") or {}).get("content")
        if part:
            yield part


def _failure(status: int, error: Mapping[str, Any]) -> EdgeError:
    message = str(error.get("message") or f"the server answered {status}")
    if status == 401:
        return UnavailableError("this server needs a key", "export EDGELLM_API_KEY=…; `edgellm key add NAME` makes one")
    hint = error.get("hint")
    kind = UnavailableError if status in (429, 503) else EdgeError
    return kind(message, str(hint) if hint else None)


def _error(text: str) -> Mapping[str, Any]:
    found = _json(text).get("error")
    return found if isinstance(found, dict) else {}


def _json(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
