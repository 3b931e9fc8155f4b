"""docs/json.md against documents of a running edgellm and of its commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import msgspec
import pytest
from typer.main import get_command

from edge.cli.app import build
from tests.docs import json_page
from tests.docs.documents import Documents, collect
from tests.fakes.fake_jetson.tree import fake_board


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Documents:
    with fake_board("agx-orin-64") as board:
        return collect(tmp_path_factory.mktemp("documents"), board, smollm2)


def test_the_page_and_the_schema_are_as_the_shapes_write_them() -> None:
    assert json_page.DOCS.read_text(encoding="utf-8") == json_page.page(), "run python -m tests.docs.json_page"
    assert json_page.SCHEMA.read_text(encoding="utf-8") == json.dumps(json_page.schema(), indent=1) + "\n"


@pytest.mark.e2e
@pytest.mark.parametrize("name", [name for name, _, _ in json_page.DOCUMENTS])
def test_real_documents_have_the_documented_shape(documents: Documents, name: str) -> None:
    (shape,) = [shape for each, _, shape in json_page.DOCUMENTS if each == name]
    assert documents[name]
    for document in documents[name]:
        read = msgspec.convert(document, shape, strict=True)
        # A field that the shape lacks would be lost, one that the document lacks would be added.
        assert json.loads(msgspec.json.encode(read)) == document


@pytest.mark.e2e
def test_real_documents_are_valid_by_the_published_schema(documents: Documents) -> None:
    schema = json.loads(json_page.SCHEMA.read_text(encoding="utf-8"))
    for name, _, shape in json_page.DOCUMENTS:
        if name == "up":
            continue  # one of several
        validator = jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{shape.__name__}"})
        for document in documents[name]:
            validator.validate(document)


def test_every_command_with_json_is_on_the_page() -> None:
    def walk(command: Any, name: str) -> set[str]:
        if isinstance(command, click.Group) or hasattr(command, "commands"):
            return {found for key, each in command.commands.items() for found in walk(each, f"{name} {key}".strip())}
        return {name} if any("--json" in option.opts for option in command.params) else set()

    page = json_page.page()
    printing = walk(get_command(build()), "")
    assert len(printing) > 30
    documented = {name for name, _, _ in json_page.DOCUMENTS} | set(json_page.OTHERS)
    assert {name for name in printing if name not in documented} == set(), page[:80]
    assert {name for name in json_page.OTHERS if name not in printing} == set()


# Zero is what these may have: counters, places in a list, settings, shares by the kernel's own counters, sizes of what
# is not there, moments and durations by edgellm's clock (gates, samples, all `_s`). Every other number is measured by a
# sensor, and null on a machine without one.
ZERO = (
    "rung|chosen|restarts|open_requests|priority|in_flight|queued|waiting|requests|prompt_tokens|completion_tokens|arity",
    "ok|warn|bad|unknown|id|progress|value|values|n_expert|cpu_expert_layers|ctx_checkpoints|n_gpu_layers|n_threads|nice",
    "rope_scale|cache_ram|driver|context|backend|weights|kv_cache|warm|samples|swap_bytes|swap_used_bytes|swap_total_bytes",
    "cpu_load_ratio|load_ratio|resident_ratio|read_bytes|claim_bytes|page_cache_bytes|prompt_cache_bytes|cache_ram_bytes",
    "adapter_bytes|drafter_bytes|mmproj_bytes|gpu_buffers_bytes|cache_n|cached_tokens|rate|index",
)
ZEROS = frozenset("|".join(ZERO).split("|"))


def zeros(name: str, value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of numbers that stand for unknown: 0, and the -256 of a thermal zone that is off."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from zeros(key, each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from zeros(name, each, f"{path}[]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and value in (0, -256):
        own = name in ZEROS or (name.endswith("_s") and name != "gap_s")
        if value or not own:
            yield path


@pytest.mark.e2e
def test_no_document_shows_zero_where_nothing_can_be_measured(tmp_path: Path, smollm2: Path) -> None:
    """A board without a power rail, a thermal zone, a GPU load or a fan: every one of its documents says null."""
    with fake_board("agx-orin-64") as board:
        for folder in ("class/hwmon", "class/thermal", "class/devfreq", "bus/i2c", "devices/platform"):
            shutil.rmtree(board.sys / folder, ignore_errors=True)
        found = collect(tmp_path, board, smollm2)
    assert set(found) >= {name for name, _, _ in json_page.DOCUMENTS}
    assert {f"{name}{path}" for name, documents in found.items() for path in zeros("", documents)} == set()
    for telemetry in found["/telemetry"]:
        assert telemetry["power"] is telemetry["temp_c"] is telemetry["energy"]["joules"] is None
        assert telemetry["energy"]["gap_s"] is None
