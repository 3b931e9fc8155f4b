"""How an idle model gives its memory back: measured, kept by board, engine and size class, used by plan and `up`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.board.probe import probe
from edge.config.values import ModelConfig
from edge.engine.engine import Flag
from edge.paths import folders
from edge.plan.choices import SleepChoice, choices_path, read_choices, size_class, winner, write_choice
from edge.plan.planner import Extras, PromptFolder
from edge.units import GIB, MIB
from tests.daemon.served import Served, config_text
from tests.plan import shapes
from tests.plan.test_plan_planner import SMALL, one, plan
from tests.serving import edgellm, eventually

FILE = shapes.model("Small", SMALL)


def choice(mode: str = "engine", **changes: object) -> SleepChoice:
    return replace(SleepChoice("b", "e", 1, "stop", 2.0, 1.0, 60 * MIB), mode=mode, **changes)


def test_a_choice_is_kept_by_board_engine_and_size_class(tmp_path: Path) -> None:
    path = tmp_path / "data/sleep_modes.json"
    for each in (choice("stop"), choice("engine"), choice("stop", size_class=2), choice("stop", board="other")):
        write_choice(path, each)
    assert read_choices(path, SleepChoice, "b", "e") == (choice("engine"), choice("stop", size_class=2))
    assert read_choices(path, SleepChoice, "b", "another") == ()


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "choices": []}', '{"schema": 1, "choices": [{"mode": 1}]}'])
def test_a_damaged_file_is_no_choice(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    assert read_choices(tmp_path / "s.json", SleepChoice, "b", "e") == ()


def test_the_engines_own_sleep_has_to_be_sooner_and_to_leave_little() -> None:
    assert winner(2.0, 1.0, 60 * MIB, GIB) == "engine"
    assert winner(2.0, 1.9, 60 * MIB, GIB) == "stop", "not worth the memory"
    assert winner(2.0, 1.0, 200 * MIB, GIB) == "stop", "a fifth of the model stays"


def line(
    mode: str | None,
    *,
    ttl_s: float = 90.5,
    larger: int = 0,
    prompts: bool = False,
    told: bool = True,
    beside: bool = False,
    return_to: str = "",
) -> list[str]:
    """Return the engine's command line. `larger`: size classes between the model and the measured one."""
    names = ("--slot-save-path", *(["--sleep-idle-seconds"] if told else []))
    engine = shapes.engine()
    engine = replace(engine, flags={**engine.flags, **{name: Flag(name, 1) for name in names}})
    choices = () if mode is None else (choice(mode, size_class=size_class(FILE.bytes) + larger),)
    extras = Extras(sleep_choices=choices, prompts=PromptFolder("/cache", durable=True) if prompts else None)
    models = one(FILE, ttl_s=ttl_s, return_to=return_to)
    if beside:
        models["other"] = (models["chat"][0], ModelConfig("other", "Small"))
    model = plan(shapes.cpu_board(64), engine=engine, models=models, extras=extras).models["chat"]
    launch = model.ladder.plans[model.ladder.chosen]
    assert (launch.own_sleep_s > 0) is ("--sleep-idle-seconds" in launch.argv)
    return list(launch.argv)


def test_a_plan_uses_what_was_measured_for_the_size_class() -> None:
    argv = line("engine")
    assert argv[argv.index("--sleep-idle-seconds") + 1] == "91"
    assert line("engine", beside=True) != line("stop", beside=True), "beside another model too"
    for other in (line("stop"), line(None), line("engine", larger=1)):
        assert "--sleep-idle-seconds" not in other


def test_an_engine_ends_where_it_must() -> None:
    """A model that never sleeps, prompts that would be lost, an engine that cannot sleep, another that returns."""
    for other in (line("engine", ttl_s=0), line("engine", prompts=True), line("engine", told=False)):
        assert "--sleep-idle-seconds" not in other
    assert "--sleep-idle-seconds" not in line("engine", beside=True, return_to="other")


def test_the_bench_measures_both_ways_and_keeps_the_winner(short_dir: Path, smollm2: Path) -> None:
    state = short_dir / "s"
    arguments = ("-p", "cpu", "-m", f"chat={smollm2}", "--set", "n_threads=1", "--state-dir", str(state))
    done = edgellm("bench", "sleep", "--repeat", "1", "--apply", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    row, best = result["row"], result["winner"]
    assert len(row["stop_s"]) == len(row["engine_s"]) == 1 and row["left_bytes"] > MIB and result["applied"]
    assert best["mode"] == winner(best["stop_s"], best["engine_s"], best["left_bytes"], smollm2.stat().st_size)
    (kept,) = read_choices(choices_path(folders({}, state), SleepChoice), SleepChoice, probe().id, best["engine"])
    assert kept.mode == best["mode"]


@pytest.mark.parametrize("mode", ["engine", "stop"])
def test_an_idle_model_sleeps_as_the_measurement_favours(mode: str, short_dir: Path, smollm2: Path) -> None:
    """SLEEPING either way, and the next request wakes it: the same engine, or a new one."""
    state = short_dir / "s"
    (state / "config").mkdir(parents=True)
    body = f'id = "chat"\nref = "{smollm2}"\nttl_s = 1\nset = {{ saved_prompts = "off", n_ctx = 4096 }}'
    (state / "config" / "edgellm.toml").write_text(config_text(body))
    shown = json.loads(edgellm("plan", "--json", "--state-dir", str(state)).stdout)
    kept = choice(mode, board=probe().id, engine=shown["engine"]["id"], size_class=0)
    write_choice(state / "data" / "sleep_modes.json", kept)
    with Served(state) as up:
        up.wait_for("ok")
        pids = []
        for _ in range(2):
            asleep = eventually(
                lambda: (model := up.model()) and model["state"] == "SLEEPING" and model, lambda: up.output
            )
            pids.append(asleep["pid"])
            assert up.healthz()["status"] == "ok"
            assert up.chat().status_code == 200
        assert up.model()["restarts"] == (0 if mode == "engine" else 2)
        assert pids == ([pids[0]] * 2 if mode == "engine" else [None, None]) and (pids[0] is None) is (mode == "stop")
