"""Engines that sleep by themselves in a pool, on the real engine: another has the memory, they keep their process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.board.probe import probe
from edge.plan.choices import SleepChoice, write_choice
from edge.units import MIB
from tests.daemon.served import Served, config_text
from tests.pool.test_pool_up import LIMIT, ask
from tests.serving import edgellm, eventually

pytestmark = pytest.mark.e2e


@pytest.fixture
def two(smollm2: Path, short_dir: Path) -> Iterator[Served]:
    """Two models in the memory of one. The engine of `a` sleeps by itself, as if it had been measured so."""
    state = short_dir / "s"
    (state / "config").mkdir(parents=True)
    settings = 'set = { saved_prompts = "off", n_ctx = 512, n_threads = 1, cache_ram = 0 }'
    models = [f'id = "{name}"\nref = "{smollm2}"\n{settings}\n{more}' for name, more in (("a", "ttl_s = 1"), ("b", ""))]
    (state / "config" / "edgellm.toml").write_text(config_text(*models, top=LIMIT))
    plan = json.loads(edgellm("plan", "--json", "--state-dir", str(state)).stdout)
    chosen = SleepChoice(probe().id, plan["engine"]["id"], 0, "engine", 2.0, 1.0, 60 * MIB)
    write_choice(state / "data" / "sleep_modes.json", chosen)
    with Served(state) as up:
        up.wait_for("ok", "degraded")
        yield up


def asleep(up: Served, name: str) -> dict[str, object]:
    found: dict[str, object] = eventually(
        lambda: (model := up.model(name)) and model["state"] == "SLEEPING" and model, lambda: str(up.status())
    )
    return found


def test_one_that_sleeps_by_itself_is_not_ended_and_wakes_once_there_is_room(two: Served) -> None:
    shown = json.loads(two.cli("plan", "--json"))["models"]
    reasons = {each["subject"]: each["because"] for each in shown["a"]["ladder"][0]["reasons"]}
    assert reasons["ttl_s"].startswith("the engine sleeps by itself")
    pid = asleep(two, "a")["pid"]
    assert isinstance(pid, int), "it keeps its process"
    kept = json.loads(two.cli("ps", "--json"))["models"]["a"]["memory_bytes"]["host"]
    assert MIB < kept < 120 * MIB, "of the 178 of its plan"

    assert ask(two, "b").status_code == 200
    beside = two.ready("b")["pid"]
    assert (asleep(two, "a")["pid"], two.model("a")["restarts"]) == (pid, 0), "nothing had to end for b"

    assert ask(two, "a").status_code == 200
    assert (two.model("a")["pid"], two.model("a")["restarts"]) == (pid, 0), "the same engine woke"
    other = asleep(two, "b")
    assert other["pid"] is None and beside != pid, "the engine of b ended for it"
