"""A pool of models without processes: the schedule decides, a script says what happens.

Tokens of a script: `a` a request for a, `a.` one of a's requests ends, `a!` a is READY, `a~` the engine of a has ended,
`az` the ttl of a has passed, `as` the engine of a sleeps by itself and keeps `keeps` bytes, `ax` a crashes and is
restarted, `af` a fails and stays down, `ar` it is to be started again (memory is back, an operator), `a-` a waiting
request is cancelled, `+5` seconds pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge.pool.schedule import Arrival, Claims, PoolDecision, Resident, decide


@dataclass
class Model:
    needs: int
    priority: int = 0
    pin: bool = False
    load_s: float | None = None
    keeps: int = 1
    state: str = "asleep"  # asleep | loading | ready | dozing | leaving | failed
    dozed: bool = False  # its engine slept by itself when it was ended
    open: int = 0
    waiting: list[float] = field(default_factory=list)
    again_s: float | None = None  # it failed, and since then is to be started again
    quiet_s: float = 0.0

    @property
    def holds(self) -> int:
        """Bytes of memory that it has, or is about to have."""
        if self.state == "dozing" or (self.state == "leaving" and self.dozed):
            return min(self.keeps, self.needs)
        return self.needs if self.state in ("loading", "ready", "leaving") else 0


class Simulation:
    """`budget`: bytes of the one domain. `log` holds what was decided, `outcomes` what requests got, in order."""

    def __init__(self, models: Mapping[str, Model], budget: int) -> None:
        self.models = dict(models)
        self.budget = budget
        self.now = 100.0
        self.freed_s = 0.0
        self.held: frozenset[str] = frozenset()
        self.claims = Claims()
        self.log: list[str] = []
        self.outcomes: list[str] = []

    def play(self, script: str) -> None:
        for token in script.split():
            self.happen(token)
            self.settle()

    def happen(self, token: str) -> None:
        if token[0] == "+":
            self.now += float(token[1:])
            return
        name, event = token[0], token[1:]
        model = self.models[name]
        if event == "":
            self.ask(name, model)
        elif event == ".":
            assert model.open > 0, token
            model.open -= 1
            model.quiet_s = self.now
        elif event == "!":
            assert model.state == "loading", token
            model.state, model.quiet_s = "ready", self.now
            self.serve(name, model)
        elif event == "~":
            assert model.state == "leaving", token
            model.state, self.freed_s = "asleep", self.now
        elif event == "z":
            if model.state == "ready" and not model.open:  # the supervisor drains: an open request keeps it
                model.state, model.dozed = "leaving", False
        elif event == "s":
            if model.state == "ready" and not model.open:
                model.state = "dozing"
        elif event == "x":
            model.state, model.open = "loading", 0
        elif event == "f":
            model.state, model.open, self.freed_s = "failed", 0, self.now
            self.outcomes += [f"{name} failed"] * len(model.waiting)
            model.waiting.clear()
        elif event == "r":
            assert model.state == "failed", token
            model.again_s = self.now if model.again_s is None else model.again_s
        elif event == "-":
            model.waiting.pop()
        else:
            raise AssertionError(token)

    def ask(self, name: str, model: Model) -> None:
        if model.state == "ready" and name not in self.held:
            model.open += 1
            self.outcomes.append(f"{name} served")
        elif model.state == "failed":
            self.outcomes.append(f"{name} failed")
        else:
            model.waiting.append(self.now)

    def serve(self, name: str, model: Model) -> None:
        model.open += len(model.waiting)
        self.outcomes += [f"{name} served"] * len(model.waiting)
        model.waiting.clear()

    def settle(self) -> None:
        """Decide until the schedule waits for an event."""
        for _ in range(20):
            decision = self.decide()
            for victim in decision.sleep:
                self.log.append(f"sleep {victim}")
                model = self.models[victim]
                model.state, model.dozed = "leaving", model.state == "dozing"
            if decision.hold != self.held and decision.hold:
                self.log.append(f"hold {''.join(sorted(decision.hold))}")
            self.held = decision.hold
            for name, model in self.models.items():
                if model.state == "ready" and name not in self.held and model.waiting:
                    self.serve(name, model)
            if decision.fits:
                self.freed_s = float("-inf")
            if decision.start is not None:
                self.start(decision.start)
            elif decision.refuse is not None:
                self.log.append(f"refuse {decision.refuse}")
                waiting = self.models[decision.refuse].waiting
                self.outcomes += [f"{decision.refuse} refused"] * len(waiting)
                waiting.clear()
                self.models[decision.refuse].again_s = None
            else:
                return
        raise AssertionError(f"no end of decisions: {self.log}")

    def start(self, name: str) -> None:
        self.log.append(f"{'wake' if self.models[name].state == 'dozing' else 'start'} {name}")
        self.models[name].state, self.models[name].again_s = "loading", None

    def free(self) -> dict[str, int]:
        """What is measured: a loading model has touched nothing yet, a leaving one holds all."""
        held = sum(m.holds for m in self.models.values() if m.state != "loading")
        return {"host": self.budget - held}

    def decide(self) -> PoolDecision:
        arrivals = [
            Arrival(name, {"host": m.needs}, self.now - m.waiting[0], m.priority)
            for name, m in self.models.items()
            if m.state in ("asleep", "dozing") and m.waiting
        ] + [
            Arrival(name, {"host": m.needs}, self.now - m.again_s, m.priority)
            for name, m in self.models.items()
            if m.again_s is not None
        ]
        residents = [
            Resident(
                name,
                {"host": m.holds},
                loading=m.state == "loading",
                leaving=m.state == "leaving",
                open=m.open,
                idle_s=self.now - m.quiet_s,
                load_s=m.load_s,
                priority=m.priority,
                pin=m.pin,
            )
            for name, m in self.models.items()
            if m.state in ("loading", "ready", "dozing", "leaving")
        ]
        free = self.claims.left(residents, self.free())
        return decide(residents, arrivals, free, {"host": self.budget}, since_freed_s=self.now - self.freed_s)
