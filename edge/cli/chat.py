"""`edgellm chat`: a question, or on a terminal a conversation, with a running server over its public API."""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import typer
from msgspec import Struct, field

from edge.cli.options import Json, StateDir, print_json
from edge.errors import EdgeError, NotRunningError, TimedOutError, UnavailableError, UsageError
from edge.linux.files import parse_foreign_json
from edge.units import printable

# Not OPENAI_API_KEY: that one belongs to another server.
KEY_VARIABLE = "EDGELLM_API_KEY"
# The first byte may take as long as a model loads; the server sends heartbeats every few seconds meanwhile.
SILENCE_S = 120.0
MOST_TOKENS = 1024
# SGR and EL of ECMA-48.
_DIM, _PLAIN, _CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"


def register(root: typer.Typer) -> None:
    root.command(epilog='Example: edgellm chat "What is a capacitor?"')(chat)


def chat(
    text: Annotated[
        list[str] | None, typer.Argument(help="the question; - reads standard input; none: a conversation")
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", metavar="ID", help="one of several models")] = "",
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="system prompt")] = "",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", min=1, help="longest answer; 1024 unless given")
    ] = None,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="address of another server")] = "",
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Ask a running server and stream its answer. EDGELLM_API_KEY holds the key where the server needs one.

    Without a question, on a terminal, a conversation: Ctrl-C stops an answer, /exit or Ctrl-D ends it. Exit code 1 for
    an incomplete answer; one that --max-tokens ended is complete.
    """
    most = max_tokens or MOST_TOKENS
    server = ChatServer(url or server_url(os.environ, state_dir), key_of(os.environ))
    messages = [{"role": "system", "content": system}] if system else []
    if not text and not as_json and sys.stdin.isatty():
        _converse(server, messages, model or server.first_model(), most)
        return
    prompt = (sys.stdin.read() if not text or text == ["-"] else " ".join(text)).strip()
    if not prompt:
        raise UsageError("there is no question", 'edgellm chat "What is a capacitor?"')
    messages.append({"role": "user", "content": prompt})
    answer = server.ask(messages, model or server.first_model(), most, ChatScreen(quiet=as_json))
    if as_json:
        print_json(answer.document(), indent=None)
    if answer.finish_reason == "length":
        typer.echo(f"the answer was cut after {most} tokens: --max-tokens sets the limit", err=True)
        if max_tokens is None:
            raise typer.Exit(1)


def _converse(server: ChatServer, messages: list[dict[str, Any]], model: str, max_tokens: int) -> None:
    """Ask line by line and keep the history. An answer that Ctrl-C stopped stays in it as far as it came."""
    from contextlib import suppress

    from edge.cli import report

    # Distributions build Python without readline; input() then edits by the terminal's own line discipline.
    with suppress(ImportError):
        import readline  # noqa: F401  # makes input() edit and remember lines
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            typer.echo("")
            return
        except KeyboardInterrupt:
            typer.echo("")
            continue
        if line in ("/exit", "/quit"):
            return
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        screen = ChatScreen()
        try:
            answer = server.ask(messages, model, max_tokens, screen)
        except KeyboardInterrupt:
            typer.echo(f"{_PLAIN} (stopped)")
            # The model sees its own half answer, so that "go on" continues it.
            messages.append({"role": "assistant", "content": screen.text})
            continue
        except EdgeError as error:
            report(error)
            # The question was not answered: asked again, it would stand twice in the history.
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})
        if answer.finish_reason == "length":
            typer.echo(f"(cut after {max_tokens} tokens: --max-tokens sets the limit)", err=True)


class Answer(Struct):
    """A streamed answer so far, then whole. `reasoning` is the thinking before it."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "text": self.text,
            "reasoning": self.reasoning or None,
            "finish_reason": self.finish_reason,
            "usage": self.usage or None,
            "timings": self.timings or None,
        }

    @property
    def summary(self) -> str:
        """Return `120 tokens, 41.3 tokens/s` as far as known."""
        tokens, speed = self.usage.get("completion_tokens"), self.timings.get("predicted_per_second")
        known_speed = isinstance(speed, (int, float)) and 0 < speed < 1e9  # a number of 400 digits is no float
        shown = f"{speed:.1f} tokens/s" if known_speed else ""
        known = [f"{tokens} tokens" if tokens else "", shown]
        return ", ".join(part for part in known if part)


class ChatScreen:
    """Shows an answer as it comes: on a terminal the thinking too, dimmed, and the figures; in a pipe the text only."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.text = ""
        self._quiet = quiet
        self._terminal = sys.stdout.isatty() and not quiet
        self._waiting = self._thinking = False

    def waiting(self, state: str) -> None:
        """Show the state of the server while its model loads."""
        if sys.stderr.isatty() and not self._quiet:
            typer.echo(f"{_CLEAR_LINE}{printable(state)}", nl=False, err=True)
            self._waiting = True

    def thought(self, part: str) -> None:
        self._arrived()
        if not self._terminal:
            return
        if not self._thinking:
            typer.echo(_DIM, nl=False)
            self._thinking = True
        self._write(part)

    def part(self, part: str) -> None:
        self._arrived()
        self._end_of_thinking("\n\n")
        self.text += part
        if not self._quiet:
            self._write(part)

    def finish(self, answer: Answer) -> None:
        self._arrived()
        self._end_of_thinking("")
        if not self._quiet:
            typer.echo("")
        if self._terminal and answer.summary:
            typer.echo(f"{_DIM}{printable(answer.summary)}{_PLAIN}", err=True)

    def _arrived(self) -> None:
        if self._waiting:
            typer.echo(_CLEAR_LINE, nl=False, err=True)
            self._waiting = False

    def _end_of_thinking(self, after: str) -> None:
        if self._thinking:
            typer.echo(f"{_PLAIN}{after}", nl=False)
            self._thinking = False

    def _write(self, part: str) -> None:
        """Write and flush. A model's text may hold control characters, which must not reach a terminal."""
        typer.echo(printable(part, newlines=True) if self._terminal else part, nl=False)
        sys.stdout.flush()


class ChatServer(Struct, frozen=True):
    """A server with OpenAI's API. Methods raise NotRunningError, UnavailableError, TimedOutError, EdgeError."""

    url: str
    key: str | None = None

    def first_model(self) -> str:
        """Return the first model that can chat, or an empty string where the server has no list of models.

        Raises UnavailableError where there are only models for embeddings and reranking.
        """
        with self._client() as client:
            # llama-server's list does not name the task of a model; LM Studio's does, and other servers have none.
            kinds = self._listed(client, "/api/v0/models")
            names = self._listed(client, "/v1/models") or kinds
        able = [name for name in names if kinds.get(name) != "embeddings"]
        if names and not able:
            hint = "edgellm up -m REF serves a chat model; `edgellm model list --catalogue` shows some"
            raise UnavailableError(f"no model here can chat: {', '.join(names)}", hint)
        return able[0] if able else ""

    def _listed(self, client: httpx.Client, path: str) -> dict[str, str]:
        """Return the models of a list with their types, none where there is no such list."""
        try:
            response = client.get(f"{self._base}{path}", timeout=5.0)
            entries = response.json()["data"] if response.status_code == 200 else []
            return {str(entry["id"]): str(entry.get("type")) for entry in entries}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return {}  # the question itself shows what is wrong

    def ask(self, messages: list[dict[str, Any]], model: str, max_tokens: int, screen: ChatScreen) -> Answer:
        """Send a conversation, show the answer as it comes and return it."""
        request: dict[str, Any] = {"messages": messages, "stream": True, "max_tokens": max_tokens}
        request |= {"stream_options": {"include_usage": True}} | ({"model": model} if model else {})
        answer = Answer()
        # An argument or a line of a pipe that is no UTF-8 holds lone surrogates.
        body, kind = json.dumps(request, ensure_ascii=False).encode("utf-8", "replace"), "application/json"
        with (
            named_faults(self.url),
            self._client() as client,
            client.stream(
                "POST", f"{self._base}/v1/chat/completions", content=body, headers={"Content-Type": kind}
            ) as got,
        ):
            if got.status_code != 200:
                got.read()
                got.raise_for_status()
            for line in got.iter_lines():
                _take(line, answer, screen)
        screen.finish(answer)
        if answer.finish_reason in (None, "error"):  # the connection closed in order, but the engine had not ended
            raise _broken()
        return answer

    @property
    def _base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def _client(self) -> httpx.Client:
        headers = {"Edgellm-Heartbeat": "1"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        timeout = httpx.Timeout(SILENCE_S, connect=5.0)
        # The server is on this machine or in its network: no proxy.
        return httpx.Client(timeout=timeout, trust_env=False, verify=_trust(self._base), headers=headers)


def key_of(env: Mapping[str, str]) -> str | None:
    """Return the key of EDGELLM_API_KEY. Raises UsageError for what is none."""
    key = env.get(KEY_VARIABLE, "")
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"{KEY_VARIABLE} holds no key", "a key is ASCII; `edgellm key add NAME` makes one")
    return key or None


@contextmanager
def named_faults(url: str, silence_s: float = SILENCE_S) -> Iterator[None]:
    """Raise an EdgeError that names the fault for each of httpx's, and for an answer that is an error."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise _failure(error.response.status_code, _error(_json(error.response.text))) from error
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            hint = "export SSL_CERT_FILE=… names a certificate to trust"
            raise UnavailableError(f"the certificate of {url} is not trusted here", hint) from error
        raise NotRunningError(f"nothing answers at {url}", "start it: `edgellm up`") from error
    except httpx.TimeoutException as error:
        raise TimedOutError(f"{url} sent nothing for {silence_s:.0f} s", "`edgellm status` shows its state") from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:  # UnicodeError: a host's name
        raise UsageError(f"not a URL: {url!r}", "write it like http://127.0.0.1:8080") from error
    except httpx.HTTPError as error:
        raise _broken() from error


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


def _trust(endpoint: str) -> ssl.SSLContext | bool:
    """Return the system's certificates and SSL_CERT_FILE; plain HTTP loads none."""
    return ssl.create_default_context() if endpoint.startswith("https:") else False


def _take(line: str, answer: Answer, screen: ChatScreen) -> None:
    """Apply one line of the event stream: a comment is a heartbeat with the state of the server."""
    if line.startswith(": "):
        screen.waiting(line[2:])
        return
    data = line.removeprefix("data:").strip()  # a server that does not stream answers with the document alone
    if data == "[DONE]":
        return
    event = _json(data)
    if error := _error(event):
        raise _failure(502, error)
    answer.usage = _table(event.get("usage")) or answer.usage
    answer.timings = _table(event.get("timings")) or answer.timings
    for choice in _rows(event.get("choices")):  # the usage event has none
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        delta = _table(choice.get("delta") or choice.get("message"))
        if thought := delta.get("reasoning_content"):
            answer.reasoning += str(thought)
            screen.thought(str(thought))
        if part := delta.get("content"):
            answer.text += str(part)
            screen.part(str(part))


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _broken() -> EdgeError:
    return EdgeError("the answer broke off", "`edgellm logs` shows the engine's last lines")


def _failure(status: int, error: Mapping[str, Any]) -> EdgeError:
    message = str(error.get("message") or f"the server answered {status}")
    if status == 401:
        return UnavailableError("this server needs a key", "export EDGELLM_API_KEY=…; `edgellm key add NAME` makes one")
    hint = error.get("hint")
    kind = UnavailableError if status in (429, 503) else EdgeError
    return kind(message, str(hint) if hint else None)


def _error(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error in a document of any server's shape; empty without one."""
    found = document.get("error") or (document if document.get("object") == "error" else None)
    return {"message": found} if isinstance(found, str) else _table(found)


def _json(text: str) -> dict[str, Any]:
    try:
        document = parse_foreign_json(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
