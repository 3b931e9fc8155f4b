"""The load of other processes: which samples count for `n_threads` of the next start."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.daemon import thermal
from edge.daemon.console import Console
from edge.daemon.thermal import ThermalControl
from edge.gateway.config import GatewayOptions
from edge.gateway.server import make_app
from edge.paths import folders
from edge.plan import other_load
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.status import State
from edge.telemetry.governor import Governor
from edge.telemetry.sample import Sample
from edge.telemetry.sampler import Sampler
from edge.telemetry.telemetry import Telemetry


def engine(state: State, *, open_requests: int = 0, moved_s: float = 0.0, first_token_s: float | None = None) -> Any:
    watch = SimpleNamespace(first_token_s=first_token_s)
    machine = SimpleNamespace(state=state)
    traffic = SimpleNamespace(open=open_requests, moved_s=moved_s)
    return SimpleNamespace(machine=machine, traffic=traffic, watch=watch)


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A ThermalControl sets up the log of telemetry, which other tests of this process read."""
    news = logging.getLogger("edge.telemetry")
    level, handlers, propagate = news.level, news.handlers, news.propagate
    yield
    news.setLevel(level)
    news.handlers, news.propagate = handlers, propagate


@pytest.mark.parametrize(
    ("supervisor", "counts"),
    [
        (None, True),
        (engine(State.READY, first_token_s=0.0), True),
        (engine(State.SLEEPING), True),
        (engine(State.READY, open_requests=1, first_token_s=0.0), False),
        (engine(State.LOADING), False),
        (engine(State.WARMING), False),
        (engine(State.DRAINING), False),
        (engine(State.READY, moved_s=float("inf")), False),
        (engine(State.READY, first_token_s=float("inf")), False),
    ],
)
def test_a_load_that_may_be_our_own_does_not_count(
    supervisor: Any, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_load, "WINDOW", 3)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(thermal.os, "cpu_count", lambda: 4)
    places = folders({}, tmp_path)
    sampler = Sampler([], None)
    handle = ModelHandle("chat", supervisor=supervisor)
    ThermalControl(Telemetry(sampler, Governor()), Console(), {"chat": handle}, places)
    for _ in range(3):
        for listener in sampler._listeners:
            listener(Sample(0.0, "host", cpu_load_ratio=0.5))
    assert other_load.read_busy_cores(other_load.load_path(places)) == (2 if counts else 0)


@pytest.mark.parametrize(
    ("default", "order"),
    [("", ["high", "a", "b", "low"]), ("b", ["high", "b", "a", "low"]), ("x", ["high", "b", "a", "low"])],
)
def test_a_shared_limit_serves_the_highest_priority_first_and_the_default_among_equals(
    default: str, order: list[str], tmp_path: Path
) -> None:
    priorities = {"low": -1, "a": 0, "b": 0, "high": 1}
    handles = {name: ModelHandle(name, ("x",) if name == "b" else ()) for name in priorities}
    app = make_app(handles, GatewayOptions(default_model=default))
    control = ThermalControl(Telemetry(Sampler([], None), Governor()), Console(), handles, folders({}, tmp_path))
    context = control.attach(app, priorities.__getitem__)
    assert sorted(priorities, key=context.admission.rank) == order
