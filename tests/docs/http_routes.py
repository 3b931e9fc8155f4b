"""Write docs/http.md from the router, the errors in the code and the rows below: `python -m tests.docs.http_routes`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import edge
from edge.gateway import own_routes
from edge.gateway.routes import Kind, Route, route

DOCS = Path(__file__).resolve().parents[2] / "docs" / "http.md"
GATEWAY = Path(edge.__file__).parent / "gateway"

# Method, path, the type of the answer, what it holds. {id} is a model's id or alias.
# Types: json | text | html | engine (the engine's own answer, unchanged) | ndjson.
OWN: tuple[tuple[str, str, str, str], ...] = (
    ("GET", "/livez", "json", "200 while the event loop turns, otherwise 503: restart the process"),
    ("GET", "/readyz", "json", "200 when every model serves, otherwise 503 and `Retry-After`; one row a model"),
    ("GET", "/readyz/{id}", "json", "the same of one model; 404 for an unknown one"),
    ("GET", "/healthz", "json", "gates, degradations and failures of every model; 503 unless `ok` or `degraded`"),
    ("GET", "/health", "json", 'llama-server\'s `{"status":"ok"}`, or its 503 "Loading model"'),
    ("GET", "/v1/health", "json", "as `/health`"),
    ("GET", "/", "html", "the status page; its figures need a key where there is one"),
    ("GET", "/metrics", "text", "Prometheus, text format 0.0.4"),
    ("GET", "/telemetry", "json", "sensors, energy, governor, requests by model, history of a day"),
    ("GET", "/starts", "json", "the stages of the last ten starts, without paths"),
    ("GET", "/v1/models", "json", "every id and alias; from the plan while an engine loads; no model that failed"),
    ("GET", "/models", "json", "as `/v1/models`"),
    ("GET", "/v1/models/{id}", "json", "one entry of the list; 404 for an unknown one, 503 for one that failed"),
    ("GET", "/api/v0/models", "json", "LM Studio's list"),
    ("GET", "/api/v0/models/{id}", "json", "one entry of LM Studio's list"),
    (
        "GET",
        "/admin/log",
        "json",
        "lines that the reader has not seen: `since` is the last `next`; `engine=1`: the engines' lines, of `model`",
    ),
    ("POST", "/admin/models/{id}/load", "json", "202: the model starts; `/readyz/{id}` shows what comes of it"),
    ("POST", "/admin/models/{id}/unload", "json", "202: the model sleeps after its open requests"),
    (
        "POST",
        "/admin/models/{id}/restart",
        "json",
        "202: its engine is replaced after its open requests; a sleeping model starts as with `load`",
    ),
)
OLLAMA: tuple[tuple[str, str, str, str], ...] = (
    ("GET", "/api/version", "json", "the version of Ollama whose API this is"),
    ("GET", "/api/tags", "json", "every id and alias"),
    ("GET", "/api/ps", "json", "the models that are ready"),
    ("POST", "/api/show", "json", "details, context length and capabilities of one model"),
    ("POST", "/api/chat", "ndjson", "chat, streamed unless `stream` is false"),
    ("POST", "/api/generate", "ndjson", "completion, streamed unless `stream` is false"),
    ("POST", "/api/embed", "json", "embeddings of one text or several"),
    ("POST", "/api/embeddings", "json", "the older form, of one text"),
    ("POST", "/api/pull", "json", "`success` for a model that is here, otherwise 403 `not_by_api`"),
    ("POST", "/api/create", "json", "403 `not_by_api`: `edgellm model import`"),
    ("DELETE", "/api/delete", "json", "403 `not_by_api`: `edgellm model remove`"),
    ("POST", "/api/copy", "json", "403 `not_by_api`: an alias in `[[model]]`"),
)
ENGINE: tuple[tuple[str, str, str, str], ...] = (
    ("POST", "/v1/chat/completions", "engine", "OpenAI's chat, SSE with `stream`"),
    ("POST", "/v1/completions", "engine", "OpenAI's completion"),
    ("POST", "/v1/responses", "engine", "OpenAI's responses"),
    ("POST", "/v1/embeddings", "engine", 'OpenAI\'s embeddings; a model with `role = "embedding"`'),
    ("POST", "/v1/messages", "engine", "Anthropic's messages"),
    ("POST", "/v1/messages/count_tokens", "engine", "tokens of such a request"),
    ("POST", "/v1/rerank", "engine", 'rerank; a model with `role = "rerank"`'),
    ("POST", "/v1/reranking", "engine", "as `/v1/rerank`"),
    ("POST", "/v1/audio/transcriptions", "engine", "OpenAI's speech to text; an engine with `routes`"),
    ("POST", "/v1/audio/translations", "engine", "OpenAI's speech to English; an engine with `routes`"),
    ("POST", "/v1/audio/speech", "engine", "OpenAI's text to speech; an engine with `routes`"),
    ("POST", "/chat/completions", "engine", "as `/v1/chat/completions`"),
    ("POST", "/completion", "engine", "llama.cpp's own completion"),
    ("POST", "/completions", "engine", "as `/completion`"),
    ("POST", "/embedding", "engine", "llama.cpp's own embeddings"),
    ("POST", "/embeddings", "engine", "as `/embedding`"),
    ("POST", "/rerank", "engine", "as `/v1/rerank`"),
    ("POST", "/reranking", "engine", "as `/v1/rerank`"),
    ("POST", "/infill", "engine", "code between a prefix and a suffix"),
    ("POST", "/tokenize", "engine", "tokens of a text"),
    ("POST", "/detokenize", "engine", "text of tokens"),
    ("POST", "/apply-template", "engine", "the prompt that the chat template makes"),
    ("GET", "/props", "engine", "the engine's properties; file names in place of paths without an admin key"),
    ("POST", "/props", "engine", "change them"),
    ("GET", "/slots", "engine", "the engine's slots"),
    ("POST", "/slots/{n}", "engine", "save, restore or erase a slot's cache"),
    ("GET", "/lora-adapters", "engine", "adapters and their scales"),
    ("POST", "/lora-adapters", "engine", "change the scales"),
    ("GET", "/v1/stream", "engine", "resume a stream of this key (`X-Conversation-Id`)"),
    ("POST", "/upstream/{id}/v1/chat/completions", "engine", "any route of the engine of that model"),
    ("GET", "/upstream/{id}/metrics", "engine", "its own metrics"),
    ("POST", "/api/v0/chat/completions", "engine", "LM Studio's base URL: as under `/v1`"),
    ("POST", "/api/v1/chat/completions", "engine", "base URLs that end as OpenRouter's do: as under `/v1`"),
    ("POST", "/any/other", "engine", "every other path and method"),
    ("GET", "/tools", "json", "403 `refused`: llama-server's tools run shell commands"),
    ("GET", "/cors-proxy", "json", "403 `refused`: it fetches any address"),
)
CONTROL: tuple[tuple[str, str, str], ...] = (
    ("GET", "/status", "the document of `edgellm status --json`, evidence included"),
    ("GET", "/telemetry", "`/telemetry` without its history"),
    ("GET", "/logs", "log lines after `since`; with `engine` 1 the engines', with `model` those of one"),
    ("POST", "/stop", "202; with `now` 1 open requests are not waited for"),
    ("POST", "/restart", "202, or 404 for an unknown `model`; without `model` all but those under `asleep`"),
    ("POST", "/reload", "reads the configuration again and waits for its models; 422 if it has no plan"),
    ("POST", "/load", "waits until `model` serves; 422 with the failure"),
    ("POST", "/unload", "202: `model` sleeps"),
)
HEAD = """# HTTP

Every route of the gateway, written by `python -m tests.docs.http_routes` from the router and the errors in the code. A
test asks each route of a real gateway without a key, with a key and with an admin key. How waiting, names of models and
access work is in [gateway.md](gateway.md); the fields of the documents are in [json.md](json.md).

**Key**: `no` needs none; `yes` needs one as soon as there is one (`edgellm key add NAME`); `admin` needs one made with
`--admin`, always; `never` is refused. A key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. **Held**: a
request waits while its model loads; `slot` also takes one of the engine's slots, and queues for it. GET routes answer
HEAD too.

## Of edgellm

"""
TABLE = "| method | path | key | held | answer | |\n|---|---|---|---|---|---|\n"
TYPES = {
    "json": "JSON",
    "text": "text",
    "html": "HTML",
    "engine": "the engine's",
    "ndjson": "NDJSON, or JSON",
}
# Of kinds whose code is no literal.
CODES = {"bad_request": "400", "bug": "500", "engine_error": "the engine's", "failed": "503"}
HEADERS = """
## Headers

| of a request | |
|---|---|
| `Authorization: Bearer KEY`, `x-api-key: KEY` | the key; neither reaches the engine |
| `Edgellm-Max-Wait: 2` | wait at most so many seconds for model and slot; 400 `bad_header` if it is no number |
| `Edgellm-Heartbeat: 1` | of a stream: the first comment at once, then at least every 5 s; `0`: none |
| `X-Conversation-Id` | makes a stream resumable, for this key; 403 `not_your_stream` if another key made it |
| `Content-Encoding` | `zstd`, `gzip` or `deflate` of the body; others get 415 |
| `Host`, `Origin` | against DNS rebinding and pages of other sites: 403 `host_not_allowed`, `origin_not_allowed` |

| of an answer | |
|---|---|
| `Edgellm-Degraded: n_ctx: 4096 instead of 8192` | the model serves with less than planned |
| `Retry-After: 5` | whole seconds, at least 1: with 429, with 502 and with 503 of a model that may come |
| `Allow` | with 405 |
| `Access-Control-…`, `Vary: Origin` | for pages that may use the server; the first two headers are exposed |
| `Content-Security-Policy`, `X-Content-Type-Options` | of the status page, which loads nothing from elsewhere |
| `Server: edgellm` | on answers of edgellm; the engine's own answers keep the engine's |

## Errors

An error of the gateway is OpenAI's envelope; `src` is "edgellm", which the engine's own errors lack. `kind` is stable;
`hint` and `param` may be null; `evidence` (log lines) is there for an admin key only. On Ollama's routes it is
`{"error": "message: hint"}`.

```json
{"error": {"message": "…", "type": "unavailable_error", "param": null, "code": 503,
           "src": "edgellm", "kind": "loading", "hint": "try again later"}}
```

| kind | code | message | hint |
|---|---|---|---|
"""
AFTER_ERRORS = """
Beside these, 503 with the kind of a model's failure (`out_of_memory`, `bad_model`, …), and 502 with it where the engine
ended during the request: [troubleshooting.md](troubleshooting.md) lists them. An engine's own error passes unchanged;
`engine_error` stands in for one without a body.

## The control socket

HTTP on the unix socket `control.sock` in the run folder, for the commands of `edgellm`. The kernel names its peer
(SO_PEERCRED): GET is for the socket's owner and group, POST for the owner and root (403 `forbidden`).

| method | path | |
|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    ollama = "\n## Of Ollama's API\n\n" + TABLE + "".join(map(_row, OLLAMA))
    engine = "\n## Of the engine\n\n" + TABLE + "".join(map(_row, ENGINE))
    errors = "".join(f"| `{kind}` | {code} | {message} | {hint} |\n" for kind, code, message, hint in faults())
    control = "".join(f"| {method} | `{path}` | {text} |\n" for method, path, text in CONTROL)
    return HEAD + TABLE + "".join(map(_row, OWN)) + ollama + engine + HEADERS + errors + AFTER_ERRORS + control


def key_needed(found: Route) -> str:
    """Return no | yes | admin | never, as the handler decides it."""
    if found.kind is Kind.REFUSED:
        return "never"
    if found.kind in (Kind.ADMIN, Kind.CONTROL):
        return "admin"
    return "no" if found.kind is Kind.OURS and found.name in own_routes.PUBLIC else "yes"


def held(found: Route) -> str:
    """Return no | yes | slot."""
    if found.kind not in (Kind.HELD, Kind.ADMIN):
        return "no"
    return "slot" if found.slot else "yes"


def _row(row: tuple[str, str, str, str]) -> str:
    method, path, answer, text = row
    found = route(method, path.replace("{id}", "chat").replace("{n}", "0"))
    return f"| {method} | `{path}` | {key_needed(found)} | {held(found)} | {TYPES[answer]} | {text} |\n"


def faults() -> list[tuple[str, str, str, str]]:
    """Return kind, code, message and hint of each HttpFault of the gateway whose kind is a literal."""
    found: dict[str, tuple[str, str, str, str]] = {}
    for path in sorted(GATEWAY.glob("*.py")):
        for kind, code, message, hint in _in_file(path):
            found.setdefault(kind, (kind, code if code.isdecimal() else CODES[kind], message, hint))
    return [found[kind] for kind in sorted(found)]


def _in_file(path: Path) -> Iterator[tuple[str, str, str, str]]:
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        named: dict[str, str] = {}
        for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named[node.targets[0].id] = _text(node.value, {})
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "HttpFault":
                code, kind, message, hint = (_text(each, named) for each in [*node.args, ast.Constant("")][:4])
                if kind.isidentifier():
                    yield kind, code, message, hint


def _text(node: ast.expr, named: dict[str, str]) -> str:
    """Return a literal as it is shown, with … for its variable parts."""
    if isinstance(node, ast.Constant):
        return "" if node.value is None else str(node.value).replace("|", "\\|")
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(each, named) if isinstance(each, ast.Constant) else "…" for each in node.values)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body, named)} or {_text(node.orelse, named)}"
    return named.get(node.id, "…") if isinstance(node, ast.Name) else "…"


if __name__ == "__main__":
    DOCS.write_text(page(), encoding="utf-8")
