"""Kill the supervisor, its engine and jtop's reader at random times: `python -m tests.bench.kills [--rounds 1000]`

Each round kills one of them, a third of the time while the engine loads, the rest while it serves. The supervisor is
the product's own process, the engine a stub with the protocol of llama-server that loads in 0.3 s. With --jtop (root)
the sensors are those of a fake board with the real jtop service, whose reader is a third victim. At the end, and every
ten rounds: READY on rung 0, a completion is answered, each death was named by its signal, no engine is left behind.
Exit code 1 where one of these is missed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from edge.models.pull import pull
from tests.bench.rows import Row, bench_parser, report
from tests.conftest import CACHE
from tests.fakes import llama_switches
from tests.fakes.fake_jetson.client import jtop_python
from tests.fakes.fake_jetson.service import JtopService, only_one
from tests.fakes.fake_jetson.tree import fake_board
from tests.serving import DEMO, ROOT, Up, alive, children, eventually, free_port

CONFIG = "schema = 1\n[restart]\nstable_s = 0\nbackoff_s = [0]\n"
LOAD_S = 0.3
NAMED = {signal.SIGKILL: "killed", signal.SIGSEGV: "signal_segv", signal.SIGABRT: "signal_abrt"}
CHECK_EVERY = 10


@dataclass
class Tally:
    """What happened. `faults` are sentences, one for each thing that should not have been."""

    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    engines: set[int] = field(default_factory=set)


class Kills:
    """A supervisor that is started again after each of its deaths, on the same port and state."""

    def __init__(self, start: Callable[[int], Up], chance: random.Random, *, jtop: bool) -> None:
        self._start = start
        self._port = free_port()
        self._chance = chance
        self._victims = ["engine", "engine", "supervisor", *(["jtop's reader"] if jtop else [])]
        self.tally = Tally()
        self._judged = 0  # events of this supervisor
        self.up = start(self._port)

    def run(self, rounds: int) -> None:
        for number in range(1, rounds + 1):
            loading = self._chance.random() < 1 / 3
            if not loading:
                self.ready()
                time.sleep(self._chance.uniform(0, 0.2))
            else:
                time.sleep(self._chance.uniform(0, LOAD_S))
            victim = self._chance.choice(self._victims)
            if {"engine": self.engine, "supervisor": self.supervisor}.get(victim, self.reader)():
                self.tally.kills[f"{victim}, {'at any moment' if loading else 'while it serves'}"] += 1
            if number % CHECK_EVERY == 0 or number == rounds:
                self.check(number)

    def ready(self) -> dict[str, object]:
        def there() -> dict[str, object] | None:
            model: dict[str, object] = self.up.healthz().get("models", {}).get("demo", {})
            if model.get("state") == "FAILED":
                raise AssertionError(f"FAILED: {model.get('failure')}")
            return model if model.get("state") == "READY" else None

        model: dict[str, object] = eventually(there, lambda: f"READY: {self.up.output[-2000:]}", 120)
        return model

    def engine(self) -> bool:
        """Kill it, unless it is just being started. Return whether there was one; so do the next two."""
        found = [pid for pid in children(self.up.process.pid) if self._is_engine(pid)]
        if not found:
            return False
        number = self._chance.choice(list(NAMED))
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[0], number)
            self.tally.engines.add(found[0])
        return True

    def supervisor(self) -> bool:
        self.tally.engines.update(pid for pid in children(self.up.process.pid) if self._is_engine(pid))
        self.up.process.kill()
        self.up.process.wait()
        left = [pid for pid in self.tally.engines if self._is_engine(pid)]
        until_s = time.monotonic() + 10
        while left and time.monotonic() < until_s:
            time.sleep(0.01)
            left = [pid for pid in left if self._is_engine(pid)]
        if left:
            self.tally.faults.append(f"engines outlived their supervisor: {left}")
        self.judge()
        self.up, self._judged = self._start(self._port), 0
        return True

    def reader(self) -> bool:
        for pid in children(self.up.process.pid):
            if b"jtop_reader" in _command(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return True
        return False

    def check(self, number: int) -> None:
        model = self.ready()
        if model["rung"] != 0:
            self.tally.faults.append(f"round {number}: rung {model['rung']}")
        if (status := self.up.chat(timeout=120).status_code) != 200:
            self.tally.faults.append(f"round {number}: a completion got {status}")
        self.judge()

    def judge(self) -> None:
        """Compare the kinds of failure that the supervisor reports with those that were caused."""
        events = self.up.events()
        for event in events[self._judged :]:
            if event.get("event") == "failed" and (event["kind"] not in NAMED.values() or event["gives_up"]):
                self.tally.faults.append(f"a wrong verdict: {event}")
        self._judged = len(events)

    def close(self) -> None:
        self.up.__exit__()
        left = [pid for pid in self.tally.engines if self._is_engine(pid)]
        if left:
            self.tally.faults.append(f"engines are left: {left}")

    @staticmethod
    def _is_engine(pid: int) -> bool:
        """Return whether it serves: the same program is also asked for its version and its options."""
        return alive(pid) and b"--model" in _command(pid) and b"llama_server.py" in _script(pid)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _script(pid: int) -> bytes:
    """Return the beginning of the script that an interpreter runs: the stub's has the name of its server in it."""
    words = _command(pid).split(b"\0")
    with contextlib.suppress(OSError, IndexError):
        return Path(os.fsdecode(words[2])).read_bytes()[:4096]
    return b""


@contextlib.contextmanager
def places(jtop: bool) -> Iterator[Callable[[int], Up]]:
    """Yield what starts the supervisor on a port."""
    model = Path(pull(DEMO, CACHE / "models").path)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="e-", dir="/tmp")))
        (folder / "s/config").mkdir(parents=True)
        (folder / "s/config/edgellm.toml").write_text(CONFIG)
        fake = llama_switches.write_fake(folder / "engine", load_s=LOAD_S)
        program = ["-m", "edge", "up"]
        if jtop:
            stack.enter_context(only_one())
            board = stack.enter_context(fake_board())
            service = JtopService(board, jtop_python("7.2.2")).start()
            stack.callback(service.stop)
            program = [str(ROOT / "tests/fakes/up_on_board.py"), str(board.root), "1.0"]
        options = ("-p", "cpu", "-m", f"demo={model}", "--engine", str(fake), "--set", "n_ctx=2048")
        yield lambda port: Up(folder / "s", *options, port=port, program=program)


def measure(rounds: int, seed: int, *, jtop: bool) -> list[Row]:
    with places(jtop) as start:
        kills = Kills(start, random.Random(seed), jtop=jtop)
        try:
            kills.run(rounds)
        except KeyboardInterrupt:
            print("interrupted: what follows is of the rounds until then", file=sys.stderr)
        finally:
            kills.close()
    tally = kills.tally
    for fault in tally.faults[:10]:
        print(fault, file=sys.stderr)
    rows = [Row(f"kills: {what}", count, "") for what, count in sorted(tally.kills.items())]
    return [*rows, Row("orphans, lost rungs, wrong verdicts, unanswered", len(tally.faults), "", 0)]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jtop", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.seed, jtop=arguments.jtop)
    return report(rows, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
