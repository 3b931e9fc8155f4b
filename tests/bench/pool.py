"""Serve more models than memory holds, on the real engine, under random requests.

    python -m tests.bench.pool MODEL.gguf [--models 8] [--fit 2] [--requests 50] [--seconds 600] [--clients 6]

Every model is the same file under another name, and `memory.limit` leaves room for `--fit` of them. Each client asks
random models until `--seconds` have passed and each was asked `--requests` times. Exit code 1 if a request was not
answered, if more models were resident than fit, if the engines took more memory than the limit, or if a busy model was
chosen to sleep.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from edge.cli.client import Client
from edge.linux.procfs import family_pss_bytes
from edge.paths import folders
from edge.pool.schedule import PoolPolicy
from edge.units import MIB
from tests.bench.rows import Row, bench_parser, report
from tests.serving import Up, eventually

# The plan of SmolLM2-135M Q4 with 512 tokens and no prompt cache; one more half leaves no room for another.
MODEL_MIB = 178
RESIDENT = ("STARTING", "LOADING", "WARMING", "READY", "DRAINING", "STOPPING", "BACKOFF")


class Soak(NamedTuple):
    """What a soak saw. `waits_s`: from request to answer; `most`: models resident at once, and bytes of the engines."""

    answered: int
    wrong: list[str]
    waits_s: list[float]
    most: int
    most_bytes: int
    starts: int


def configure(path: Path, model: Path, models: int, fit: int) -> None:
    entries = "".join(
        f'[[model]]\nid = "m{n}"\nref = "{model}"\nset = {{ n_ctx = 512, n_threads = 1 }}\n' for n in range(models)
    )
    limit = int((fit + 0.5) * MODEL_MIB)
    path.parent.mkdir(parents=True)
    path.write_text(f'schema = 1\nprofile = "cpu"\n[memory]\nlimit = "{limit}MiB"\n{entries}')


def soak(model: Path, *, models: int, fit: int, requests: int, seconds: float, clients: int, seed: int = 1) -> Soak:
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        state = Path(folder) / "s"
        configure(state / "config" / "edgellm.toml", model, models, fit)
        with Up(state) as up:
            client = Client(folders({}, state))
            eventually(lambda: up.healthz().get("status") in ("ok", "degraded"), lambda: up.output)
            seen = _Watch(client)
            watching = threading.Thread(target=seen.run, daemon=True)
            watching.start()
            plan = _Turns([f"m{n}" for n in range(models)], requests, time.monotonic() + seconds, seed)
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(lambda _: _ask_in_turn(up.url, plan), range(clients)))
            seen.done.set()
            watching.join()
            starts = sum(model["restarts"] + 1 for model in client.status()["models"].values())
            client.close()
        return Soak(len(plan.waits_s), plan.wrong + seen.wrong, plan.waits_s, seen.most, seen.most_bytes, starts)


class _Turns:
    """The requests that are still to be made, shared by the clients."""

    def __init__(self, names: list[str], requests: int, until_s: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.left = dict.fromkeys(names, requests)
        self.until_s = until_s
        self.waits_s: list[float] = []
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def next(self) -> str | None:
        with self.lock:
            open_ = [name for name, left in self.left.items() if left > 0]
            if not open_ and time.monotonic() >= self.until_s:
                return None
            name = self.random.choice(open_ or list(self.left))
            self.left[name] -= 1
            return name


def _ask_in_turn(url: str, plan: _Turns) -> None:
    with httpx.Client(timeout=300) as http:
        while (name := plan.next()) is not None:
            began = time.monotonic()
            body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            try:
                answer = http.post(f"{url}/v1/chat/completions", json=body)
                if answer.status_code != 200 or not answer.json()["choices"]:
                    plan.wrong.append(f"{name}: {answer.status_code} {answer.text[:200]}")
            except httpx.HTTPError as error:
                plan.wrong.append(f"{name}: {error!r}")
            plan.waits_s.append(time.monotonic() - began)


class BusyLeavers:
    """Finds models that were chosen to leave while they had open requests, by looks at the status.

    A request that arrives between the choice and its effect is answered while the engine drains, and is no fault. So a
    model has to be busy at two looks before: it leaves after `idle_s` without a request only, and looks that are
    further apart prove nothing.
    """

    def __init__(self, idle_s: float = PoolPolicy().idle_s) -> None:
        self._idle_s = idle_s
        self._asked_s = float("-inf")
        self._busy: dict[str, int] = {}  # at how many looks in a row

    def look(self, models: Mapping[str, Mapping[str, Any]], asked_s: float, seen_s: float) -> list[str]:
        """Return the ids. `asked_s`, `seen_s`: before and after the status was read, monotonic."""
        found, near = [], seen_s - self._asked_s < self._idle_s
        self._asked_s = asked_s
        for name, model in models.items():
            looks = self._busy.pop(name, 0) if near else 0
            if not model.get("open_requests"):
                continue
            if model["state"] == "READY":
                self._busy[name] = looks + 1
            elif model["state"] in ("DRAINING", "STOPPING") and looks > 1:
                found.append(name)
        return found


class _Watch:
    """Samples which models are resident, and whether one leaves with open requests."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.leavers = BusyLeavers()
        self.done = threading.Event()
        self.most = self.most_bytes = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.done.wait(0.05):
            asked_s = time.monotonic()
            models = self.client.status()["models"]
            for name in self.leavers.look(models, asked_s, time.monotonic()):
                self.wrong.append(f"{name} was chosen to sleep with {models[name]['open_requests']} open requests")
            self.most = max(self.most, sum(model["state"] in RESIDENT for model in models.values()))
            pids = [pid for model in models.values() if (pid := model["pid"]) is not None]
            # PSS divides the weights, which are one file here, among the engines that map them.
            self.most_bytes = max(self.most_bytes, family_pss_bytes(pids) or 0)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--fit", type=int, default=2)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=6)
    chosen = parser.parse_args()
    seen = soak(
        chosen.model,
        models=chosen.models,
        fit=chosen.fit,
        requests=chosen.requests,
        seconds=chosen.seconds,
        clients=chosen.clients,
    )
    for line in seen.wrong[:20]:
        print(line, file=sys.stderr)
    waits = sorted(seen.waits_s)
    rows = [
        Row("requests answered", seen.answered, ""),
        Row("requests that went wrong", len(seen.wrong), "", 0),
        Row("most models resident at once", seen.most, "", chosen.fit),
        Row("most memory of the engines", seen.most_bytes / MIB, "MiB", int((chosen.fit + 0.5) * MODEL_MIB)),
        Row("engine starts", seen.starts, ""),
        Row("wait, median", statistics.median(waits), "s"),
        Row("wait, longest", waits[-1], "s"),
    ]
    return report(rows, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
