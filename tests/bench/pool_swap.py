"""Compare a change of models with llama-server's own ways, on one built llama-server, in interleaved turns.

    python -m tests.bench.pool_swap LLAMA_SERVER MODEL.gguf [--turns 10]

Swap: a request for B while A is resident and only one may be, through edgellm (`memory.limit` for one), through
llama-server's router mode (`--models-max 1`) with the options of edgellm's plan, and every third turn through edgellm
and the router with the defaults of each. A turn begins when the engines of the last one compute no more: edgellm
warms an engine up after its first answer. Eviction: how soon a completion of one token comes back from a llama-server
that put itself to sleep (`--sleep-idle-seconds`), and from one that was ended and is started again, and what memory
the sleeping one keeps. The page cache is warm. Routing: the choice of one model of 20 by the name in a body, alone.
Exit code 1 where a swap takes more than 1.05 of the router's with the same options, or a choice more than 0.2 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from edge.gateway.config import GatewayOptions
from edge.gateway.dispatch import by_name_or_path
from edge.gateway.handler import CONTEXT
from edge.gateway.model_name import named_model
from edge.gateway.routes import route
from edge.gateway.server import make_app
from edge.linux.procfs import family_pids, family_pss_bytes, read_family_usage
from tests.bench.rows import Row, bench_parser, report
from tests.fakes.upstream.model import FakeModel
from tests.serving import Up, edgellm, eventually, free_port

PATH = "/v1/chat/completions"
# Options that the router gives each model itself, or that name a file or an address.
_OWN = {"--model", "-m", "--alias", "-a", "--host", "--port", "--log-colors"}
# SmolLM2-135M Q4 with 512 tokens and no prompt cache takes 178 MiB: one fits, two do not.
LIMIT_MIB = 300


def ask(url: str, model: str) -> float:
    """Return the seconds until a completion of one token came back. Raises if it did not."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    began = time.monotonic()
    answer = httpx.post(url + PATH, json=body, timeout=120)
    answer.raise_for_status()
    return time.monotonic() - began


def router_options(argv: Sequence[str]) -> list[str]:
    """Return the options of a plan's command line without those of `_OWN` and their values."""
    kept: list[str] = []
    skip = False
    for word in argv[1:]:
        if word.startswith("-") and word in _OWN:
            skip = True
        elif skip and not word.startswith("-"):
            skip = False
        else:
            skip = False
            kept.append(word)
    return kept


@contextmanager
def started(command: Sequence[str]) -> Iterator[str]:
    """Run a llama-server on a port of its own; the url once it is healthy."""
    port = free_port()
    argv = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: healthy(url), f"{argv[0]} is healthy")
            yield url
        finally:
            process.terminate()
            process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def folder_of(model: Path, folder: Path) -> Path:
    """Two names of one file: two models for a router, one set of pages."""
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.gguf").symlink_to(model.resolve())
    return folder


def configure(state: Path, model: Path, limit: str, settings: str = "set = { n_ctx = 512, n_threads = 1 }") -> None:
    entries = "".join(f'[[model]]\nid = "{name}"\nref = "{model}"\n{settings}\n' for name in "ab")
    (state / "config").mkdir(parents=True, exist_ok=True)
    text = f'schema = 1\nprofile = "cpu"\n[memory]\nlimit = "{limit}"\n{entries}'
    (state / "config" / "edgellm.toml").write_text(text)


def planned(state: Path, server: Path) -> dict[str, Any]:
    """Return the launch that is planned for model a."""
    plan = edgellm("plan", "--json", "--engine", str(server), "--state-dir", str(state))
    ladder = json.loads(plan.stdout)["models"]["a"]
    return dict(ladder["ladder"][ladder["chosen"]])


def by_default(state: Path, model: Path, server: Path) -> None:
    """Configure two models with edgellm's defaults, and room for one of them."""
    configure(state, model, "0", "")
    needs = sum(domain["required_bytes"] for domain in planned(state, server)["memory"].values())
    configure(state, model, f"{needs // 2**20 + 1}MiB", "")


def swaps(server: Path, model: Path, turns: int) -> dict[str, list[float]]:
    """Return the seconds of each swap, by who made it; the turns alternate between them."""
    own, router_own = "edgellm, its defaults", "router, its defaults"
    found: dict[str, list[float]] = {"edgellm": [], "router, same options": [], own: [], router_own: []}
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="e-") as folder:
        state = Path(folder) / "s"
        configure(state, model, f"{LIMIT_MIB}MiB")
        argv = planned(state, server)["argv"]
        plain = Path(folder) / "d"
        by_default(plain, model, server)
        models = folder_of(model, Path(folder) / "models")
        router = [str(server), "--models-dir", str(models), "--models-max", "1"]
        ups = [stack.enter_context(Up(each, "--engine", str(server))) for each in (state, plain)]
        for up in ups:
            up.wait_for("ok", "degraded")
        urls = {
            "edgellm": ups[0].url,
            "router, same options": stack.enter_context(started([*router, *router_options(argv)])),
            own: ups[1].url,
            router_own: stack.enter_context(started(router)),
        }
        for url in urls.values():
            ask(url, "a")
        for turn in range(turns):
            for who, url in urls.items():
                if who not in (own, router_own) or turn % 3 == 0:
                    found[who].append(ask(url, "ba"[len(found[who]) % 2]))
                    for up in ups:
                        eventually(lambda up=up: _quiet(up.process.pid), "the engines compute no more")
    return found


def _quiet(pid: int) -> bool:
    """Return whether a process and its children use less than a tenth of a core for a second."""
    before = read_family_usage(pid)
    time.sleep(1.0)
    after = read_family_usage(pid)
    return before is not None and after is not None and after.cpu_s - before.cpu_s < 0.1


def evictions(server: Path, model: Path, turns: int) -> tuple[list[float], list[float], list[int]]:
    """Return the seconds to wake, the seconds to start anew, and the bytes that the sleeping server keeps."""
    woken, anew, kept = [], [], []
    command = [str(server), "--model", str(model), "-c", "512", "-t", "1", "--no-ui"]
    for _ in range(turns):
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        argv = [*command, "--host", "127.0.0.1", "--port", str(port), "--sleep-idle-seconds", "1"]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            eventually(lambda url=url: healthy(url), "healthy")
            ask(url, "a")
            full = family_pss_bytes(family_pids(process.pid)) or 0
            eventually(lambda pid=process.pid, full=full: (family_pss_bytes([pid]) or full) < full * 0.7, "asleep")
            kept.append(family_pss_bytes([process.pid]) or 0)
            woken.append(ask(url, "a"))
            process.terminate()
        began = time.monotonic()
        with started(command) as again:
            ask(again, "a")
            anew.append(time.monotonic() - began)
    return woken, anew, kept


def routing(count: int = 20, rounds: int = 2000) -> float:
    """Return the median milliseconds to find one of `count` models by the name at the end of a 4 KiB body."""
    models = {f"m{n}": FakeModel(f"m{n}", aliases=(f"alias-{n}",)) for n in range(count)}
    messages = [{"role": "user", "content": "word " * 800}]
    body = json.dumps({"messages": messages, "model": f"alias-{count - 1}"}).encode()

    async def timed() -> list[float]:
        context = make_app(models, GatewayOptions())[CONTEXT]
        found = []
        for _ in range(rounds):
            began = time.perf_counter()
            target = route("POST", PATH).target
            chosen = by_name_or_path(context, named_model(body, "application/json", target), PATH)
            found.append(time.perf_counter() - began)
            assert chosen.model_id == f"m{count - 1}"
        return found

    return statistics.median(asyncio.run(timed())) * 1000


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("server", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--evictions", type=int, default=5)
    chosen = parser.parse_args()
    rows = [Row("routing: one of 20 models by its alias", routing(), "ms", 0.2)]
    seen = swaps(chosen.server, chosen.model, chosen.turns)
    rows += [Row(f"swap, {who}", statistics.median(each), "s") for who, each in seen.items()]
    pairs = zip(seen["edgellm"], seen["router, same options"], strict=True)
    rows.append(
        Row("swap, edgellm over router with the same options", statistics.median(a / b for a, b in pairs), "×", 1.05)
    )
    woken, anew, kept = evictions(chosen.server, chosen.model, chosen.evictions)
    rows += [
        Row("eviction by sleep: from request to answer", statistics.median(woken), "s"),
        Row("eviction by end and start: from start to answer", statistics.median(anew), "s"),
        Row("memory that a sleeping server keeps", statistics.median(kept) / 2**20, "MiB"),
    ]
    return report(rows, as_json=chosen.json)


if __name__ == "__main__":
    os.environ.pop("EDGELLM_STATE_DIR", None)
    sys.exit(main())
