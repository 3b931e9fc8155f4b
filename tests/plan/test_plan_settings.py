"""Each setting of a profile changes what can be seen: the plan, what a process is started with, or a choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from edge.cli.plan import plan_document
from edge.config import Config
from edge.config.values import SETTINGS, ModelConfig, Preset, Profile
from edge.daemon.fleet import gives_pages_back, terms_of
from edge.errors import DoesNotFitError, EngineMissingError
from edge.plan.argv import EnvFacts
from edge.plan.candidates import DownloadCandidate
from edge.plan.inputs import candidate_of, situation
from edge.plan.planner import Extras, PromptFolder, make_plan
from edge.plan.prepare import Prepared
from edge.plan.select import select
from tests.plan import shapes
from tests.plan.test_plan_engine_options import REAL

ROOT = Path(__file__).parents[2]
PROMPTS = "tests/daemon/test_daemon_saved_prompts.py"
# Read before a plan is made, or by another command: the test that shows what they change.
ELSEWHERE = {
    "mmproj": "tests/plan/test_plan_engine_options.py::test_the_projector_is_a_choice",
    "system_prompt_file": f"{PROMPTS}::test_the_system_prompt_of_a_file_is_computed_once",
    "recipe": "tests/plan/test_plan_settings.py::test_the_recipe_names_the_engine",
    "power_mode": "tests/doctor/test_doctor_checks.py::test_fc43_wanted_power_mode_is_set_by_its_number_on_this_image",
    "quant": "tests/plan/test_plan_settings.py::test_settings_of_a_choice_choose_another_file",
    "prefer": "tests/plan/test_plan_settings.py::test_settings_of_a_choice_choose_another_file",
    "min_tokens_s": "tests/plan/test_plan_settings.py::test_a_model_that_writes_slower_than_asked_is_not_chosen",
}
BASE: dict[str, Any] = {"n_ctx": 4096, "partial_offload": True, "cache_ram": 1 << 30}
# By key: a value where none follows from its type.
VALUES: dict[str, Any] = {
    "args": ("--keep", "4"),
    "gpus": ("1",),
    "tensor_split": (1.0, 2.0),
    "lora": ("/l/a.gguf",),
    "warmup_tokens": (1, 2),
    "cpus": (0,),
    "reserve": "3GiB",
    "chat_template_kwargs": {"a": 1},
}


def changed(key: str) -> list[Any]:
    """Values of a key other than the one in BASE, by its type."""
    if key in VALUES:
        return [VALUES[key]]
    kind, now = SETTINGS[key].type.__origin__, getattr(Preset(**BASE), key)
    if get_origin(kind) is Literal:
        return [each for each in get_args(kind) if each != now]
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, int):
        return [7, now + 1, now * 2 + 512]
    return [now + 0.5] if isinstance(now, float) else [True, 0.5, 3] if now is None else ["/x/y"]


def seen(**preset: Any) -> str:
    """Everything that a launch with these settings shows: the plan, the prompts it keeps, its process and its warm-up.

    On a machine whose two cards are too small for the model together, and on a Jetson.
    """
    found: list[Any] = []
    for board in (shapes.gpu_board(3, 3), shapes.jetson(16)):
        asked = Preset(**BASE | preset)
        profile, config = Profile("test", "", asked), Config(models=(ModelConfig("m", "m"),))
        models = {"m": (candidate_of(shapes.model()), ModelConfig("m", "m"))}
        engine = replace(shapes.engine(cuda=True), flags=REAL.flags)
        extras = Extras(prompts=PromptFolder("/p", durable=True))
        try:
            plan = make_plan(board, shapes.memory(board), profile, engine, models, EnvFacts("/h", "/c"), extras)
        except DoesNotFitError as error:
            found.append(str(error))
            continue
        launches = plan.models["m"].ladder.plans
        terms = terms_of(Prepared(config, board, profile, plan), plan.models["m"])
        found += [plan_document(plan), [to_builtins(each.saved_prompts) for each in launches]]
        found += [to_builtins(terms, enc_hook=str), [gives_pages_back(each, asked) for each in launches]]
    return json.dumps(found, sort_keys=True, default=str)


PLAIN = seen()


@pytest.mark.parametrize("key", [key for key in SETTINGS if key not in ELSEWHERE])
def test_each_setting_changes_what_is_launched(key: str) -> None:
    assert any(seen(**{key: value}) != PLAIN for value in changed(key)), key


def test_what_is_seen_elsewhere_is_seen_there() -> None:
    for key, place in ELSEWHERE.items():
        file, _, name = place.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text and key in text, key


def test_the_recipe_names_the_engine() -> None:
    """The hint names what to build, where the engine that is here has no CUDA."""
    board = shapes.gpu_board(24)
    models = {"m": (candidate_of(shapes.model()), ModelConfig("m", "m"))}
    for recipe, named in (("", "test"), ("orin", "orin")):
        asked = Profile("test", "", Preset(backend="cuda", recipe=recipe))
        with pytest.raises(EngineMissingError) as caught:
            make_plan(board, shapes.memory(board), asked, shapes.engine(), models, EnvFacts("/h", "/c"))
        assert caught.value.recipe == named and f"edgellm build -p {named}" in (caught.value.hint or "")


def offers(*kinds: tuple[str, str, int]) -> dict[str, tuple[DownloadCandidate, Any]]:
    """Files in the store by name and quantization, each with its number of layers; the first has the best rank."""
    found = {}
    for rank, (name, quant, layers) in enumerate(kinds):
        it = candidate_of(shapes.model(name, shapes.meta(layers=layers, quant=quant)))
        found[it.file.path] = (DownloadCandidate(name, quant, it.file.bytes, it.file.path, rank=rank), it)
    return found


def test_settings_of_a_choice_choose_another_file() -> None:
    board = shapes.jetson(32)
    where = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    here = offers(("A", "Q4_K_M", 8), ("A", "Q5_K_M", 8), ("A", "Q8_0", 8))

    def taken(**preset: Any) -> str:
        return select(
            [one for one, _ in here.values()], Preset(**preset), where, lambda o: here[str(o.path)][1]
        ).offer.quant

    assert taken(quant="Q4_K_M") == "Q4_K_M" and taken(quant="Q8_0") == "Q8_0"
    assert len({taken(prefer=way) for way in ("quality", "balanced", "speed")}) > 1


def test_a_model_that_writes_slower_than_asked_is_not_chosen() -> None:
    """A board of 50 GB/s writes nine tokens a second with the first one, by its memory bandwidth."""
    board = replace(shapes.jetson(32), bandwidth_bytes_s=50e9)
    where = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    here = offers(("Large", "Q5_K_M", 32), ("Small", "Q5_K_M", 4))

    def taken(least: float) -> str:
        asked = Preset(min_tokens_s=least)
        return select([one for one, _ in here.values()], asked, where, lambda o: here[str(o.path)][1]).offer.name

    assert (taken(2.0), taken(12.0)) == ("Large", "Small")
