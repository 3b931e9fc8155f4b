"""A plugin for the suite's pytest: runs the wanted tests only (ONLY=file), writes down what was said (TRACE=file).

Every exchange made through `requests` becomes a row: method, path, status, some headers, body or lines; what changes
from run to run (ids, times, ports) is masked, so that two runs of the same server give the same trace.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

HEADERS = (
    "content-type",
    "transfer-encoding",
    "content-encoding",
    "www-authenticate",
    "retry-after",
    "server",
    "cache-control",
)
IDS = r'"(id|call_id|item_id|response_id|tool_call_id)":\s*"(chatcmpl|resp|msg|fc|rs|call|toolu)?[-_]?[A-Za-z0-9]{8,}"'
TIMES = r'"(created|created_at|completed_at|t_start|t_last|modified_at)":\s*"?[0-9.]+"?'
MASKS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (IDS, r'"\1":"*"'),
        (TIMES, r'"\1":0'),
        (r'"timings":\s*\{[^{}]*\}', '"timings":{}'),
        (r'"(\w*_ms|\w*_per_second|seconds)":\s*[-0-9.e+]+', r'"\1":0'),
        (r"127\.0\.0\.1:\d+", "127.0.0.1:P"),
        (r'("--port",\s*")\d+', r"\1P"),
        (r"(_seconds(_total)?) [-0-9.e+]+", r"\1 0"),
        (r'"(pid|port)":\s*\d+', r'"\1":0'),
    ]
]

rows: list[dict[str, Any]] = []
really_send = requests.sessions.Session.send


def mask(text: str) -> str:
    for pattern, replacement in MASKS:
        text = pattern.sub(replacement, text)
    return text


def send(self: Any, request: Any, **options: Any) -> Any:
    row: dict[str, Any] = {"method": request.method, "path": re.sub(r"^https?://[^/]+", "", request.url)}
    try:
        answer = really_send(self, request, **options)
    except Exception as error:
        rows.append(row | {"error": type(error).__name__})
        raise
    if "/health" in row["path"] and answer.status_code in (200, 503):
        return answer
    row["status"] = answer.status_code
    row["headers"] = {name: answer.headers[name] for name in HEADERS if name in answer.headers}
    rows.append(row)
    if options.get("stream"):
        watch_lines(answer, row)
    else:
        row["body"] = mask(answer.text)
    return answer


def watch_lines(answer: Any, row: dict[str, Any]) -> None:
    row["lines"] = []
    really_iterate = answer.iter_lines

    def lines(*arguments: Any, **options: Any) -> Iterator[bytes]:
        for line in really_iterate(*arguments, **options):
            row["lines"].append(mask(line.decode("utf-8", "replace")))
            yield line

    answer.iter_lines = lines


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Iterator[None]:
    rows.clear()
    yield
    with Path(os.environ["TRACE"]).open("a") as file:
        file.write(json.dumps({"test": item.nodeid, "rows": rows}) + "\n")


def pytest_configure(config: Any) -> None:
    Path(os.environ["TRACE"]).write_text("")
    requests.sessions.Session.send = send  # type: ignore[method-assign]


def pytest_collection_finish(session: Any) -> None:
    """SKIP_LOAD_ALL: one test needs one model; the suite would start a server with each of its presets first."""
    if os.environ.get("SKIP_LOAD_ALL"):
        import utils

        def load_one() -> None:
            """Fetch the test's model as load_all() does: the presets themselves are --offline."""
            server = utils.ServerPreset.tinyllama2()
            server.offline = False
            server.start()
            server.stop()

        utils.ServerPreset.load_all = staticmethod(load_one)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    wanted = set(Path(os.environ["ONLY"]).read_text().splitlines())
    missing = wanted - {item.nodeid for item in items}
    if missing:
        raise pytest.UsageError(f"tests that are no longer there: {sorted(missing)[:5]}")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]
