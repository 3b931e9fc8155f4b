"""The profile of a configuration on a board, and `config show`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge import resources
from edge.cli import main
from edge.config import load, resolve_profile
from edge.config.load import file_layer
from edge.config.show import config_schema, reference, rows, toml_value
from edge.config.values import CONFIG_KEYS, MODEL_KEYS, SETTINGS, Preset
from edge.errors import ConfigError
from edge.paths import folders
from edge.resources import data_dir, load_toml
from tests.config.publish import DOCS, SCHEMAS
from tests.plan import shapes


def test_auto_takes_the_profile_of_the_board_and_its_tier(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    profile = resolve_profile(load(places, {}, {}), shapes.jetson(8), places)
    assert (profile.name, profile.tier) == ("orin", "8GB")
    assert profile.preset.n_ctx == 16384
    assert profile.origins["n_ctx"] == "profile orin, tier 8GB"
    assert profile.notes == ("profile auto means orin on this board",)


def test_what_is_configured_beats_the_tier(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    profile = resolve_profile(
        load(places, {"set": ["n_ctx=1024", "memory.reserve=3GiB"]}, {}), shapes.jetson(8), places
    )
    assert (profile.preset.n_ctx, profile.preset.reserve) == (1024, "3GiB")
    assert profile.origins["n_ctx"] == profile.origins["reserve"] == "--set"


def test_show_names_every_key_and_its_origin(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    config = load(places, {"set": ["gateway.hold.requests=7", "reserve=2GiB"], "model": ["a=b"]}, {})
    found = {row.key: row for row in rows(config, resolve_profile(config, shapes.cpu_board(), places))}
    assert set(found) == {*CONFIG_KEYS, *(f"set.{key}" for key in SETTINGS), *(f"model.a.{key}" for key in MODEL_KEYS)}
    assert (found["model.a.ref"].origin, found["model.a.ttl_s"].origin) == ("flag", "default")
    assert (found["gateway.hold.requests"].value, found["gateway.hold.requests"].origin) == (7, "--set")
    assert (found["memory.reserve"].value, found["memory.reserve"].origin) == ("2GiB", "--set")
    assert found["set.offload"].origin == "profile cpu"
    assert found["strict"].origin == "default"


def test_the_published_page_is_made_of_the_keys() -> None:
    """Written by `python -m tests.config.publish`."""
    assert DOCS.read_text(encoding="utf-8") == reference()


def test_the_published_schemas_are_those_of_the_keys() -> None:
    """Written by `python -m tests.config.publish`."""
    for name, made in SCHEMAS.items():
        assert json.loads((data_dir("profiles") / name).read_text(encoding="utf-8")) == made(), name
    table = config_schema()["properties"]["model"]["items"]["properties"]
    own = {key for key, field in SETTINGS.items() if field.one_model}
    assert set(table) == {*MODEL_KEYS, *own, "set"} and {"args", "draft", "lora", "mmproj"} <= own
    assert set(table["set"]["properties"]) == set(SETTINGS)


EXAMPLES = [
    (page.name, index, block.split("```")[0])
    for page in sorted(DOCS.parent.glob("*.md"))
    for index, block in enumerate(page.read_text(encoding="utf-8").split("```toml\n")[1:])
]


@pytest.mark.parametrize(("page", "index", "text"), EXAMPLES, ids=[f"{name}-{n}" for name, n, _ in EXAMPLES])
def test_the_examples_of_the_pages_follow_the_schema(page: str, index: int, text: str, tmp_path: Path) -> None:
    path = tmp_path / "edgellm.toml"
    path.write_text(text, encoding="utf-8")
    assert file_layer(path) is not None
    jsonschema.validate(load_toml(path), config_schema())


@pytest.mark.parametrize(
    "text",
    [
        "n_ctx = 4096",
        "[gateway.hold]\nrequest = 1",
        "[set]\nn_ctxt = 1",
        "[[model]]\nid = 'a'",
        "[[model]]\nref = 'a'\nn_ctx = 4096",
        "[[model]]\nref = 'a'\nset = { reasoning = 'maybe' }",
        "[[model]]\nref = 'a'\nargs = '--n-cpu-moe 12'",
        "[[model]]\nref = 'a'\nroutes = ['/v1']",
        "[[model]]\nid = 'a'\nref = 'a'\ncommand = ['x', '{port}']\nmemory = 1",
        "[[model]]\nid = 'a'\ncommand = ['x', '{port}']",
        "[[device]]\ninterface = 'eth1'",
        "[model]\nref = 'a'",
        "schema = 2",
    ],
)
def test_the_schema_of_edgellm_toml_refuses_what_the_loader_refuses(text: str, tmp_path: Path) -> None:
    path = tmp_path / "edgellm.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        file_layer(path)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(load_toml(path), config_schema())


def test_every_key_says_what_it_is_for_and_its_default_is_allowed() -> None:
    for key, field in {**CONFIG_KEYS, **MODEL_KEYS, **SETTINGS}.items():
        assert field.help, key
        assert field.default is None or field.read(field.default) == field.default, key
    assert list(SETTINGS) == list(Preset.__annotations__)


def test_config_show_prints_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "-p", "cpu", "--set", "n_ctx=2048", "--state-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert any(line.split() == ["set.n_ctx", "=", "2048", "--set"] for line in printed.splitlines())
    assert main(["config", "show", "--json", "--state-dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert {"key": "strict", "value": False, "origin": "default"} in document["values"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_and_any_name_are_values_of_toml(text: str) -> None:
    """JSON's text is TOML's but for DEL and for names beyond the basic plane."""
    document = resources.tomllib.loads(f"text = {toml_value(text)}\ntable = {toml_value({text: text})}\n")
    assert document == {"text": text, "table": {text: text}}


def test_config_init_writes_every_key_and_config_check_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state-dir", str(tmp_path)]
    assert main(["config", "init", "-p", "orin", *state]) == 0
    path = tmp_path / "config" / "edgellm.toml"
    text = path.read_text(encoding="utf-8")
    assert main(["config", "check", *state]) == 0
    assert "valid: 0 values" in capsys.readouterr().out
    assert main(["config", "init", *state]) == 64
    assert path.read_text(encoding="utf-8") == text
    # Each commented key is accepted where it stands: the file with all comments taken off is valid too.
    bare = "\n".join(line.removeprefix("#") for line in text.splitlines() if not line.startswith("# "))
    path.write_text(bare, encoding="utf-8")
    places = folders({}, tmp_path)
    config = load(places, {}, {})
    jsonschema.validate(load_toml(path), config_schema())
    assert set(CONFIG_KEYS) | set(SETTINGS) <= set(config.origins) | {"memory.reserve"}
    assert config.models[0].ref == "NAME:Q5_K_M"


def test_config_check_names_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "edgellm.toml"
    path.write_text("hosts = []\n", encoding="utf-8")
    assert main(["config", "check", str(path), "--state-dir", str(tmp_path / "state")]) == 78
    assert "it belongs into [gateway]" in capsys.readouterr().err
    assert main(["config", "check", str(tmp_path / "none.toml"), "--state-dir", str(tmp_path)]) == 64


def test_a_fault_exits_with_the_configuration_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--set", "n_cxt=1", "--state-dir", str(tmp_path)]) == 78
    assert "did you mean n_ctx?" in capsys.readouterr().err
