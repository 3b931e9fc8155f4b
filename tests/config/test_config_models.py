"""Which models are served: `[[model]]` and -m."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.config import Config, load
from edge.config.models import id_of
from edge.errors import ConfigError, UsageError
from edge.paths import folders

FILE = """
[[model]]
id = "chat"
ref = "Big:Q5_K_M"
aliases = ["gpt-4"]
ttl_s = 600
set = { n_ctx = 8192 }
[[model]]
id = "embed"
ref = "nomic-embed-text-v1.5"
role = "embedding"
"""


def configured(tmp_path: Path, models: list[str], text: str = FILE) -> Config:
    places = folders({}, tmp_path)
    places.config.mkdir(parents=True, exist_ok=True)
    (places.config / "edgellm.toml").write_text(text)
    return load(places, {"model": models}, {})


def test_without_flags_the_configured_models_are_served(tmp_path: Path) -> None:
    models = configured(tmp_path, []).models
    assert [model.id for model in models] == ["chat", "embed"]
    assert models[0].set == {"n_ctx": 8192}
    assert models[1].role == "embedding"


def test_a_flag_serves_only_what_it_names(tmp_path: Path) -> None:
    (model,) = configured(tmp_path, ["Other:Q4_K_M"]).models
    assert (model.id, model.ref, model.origin) == ("Other", "Other:Q4_K_M", "flag")


def test_a_flag_with_an_id_keeps_what_is_configured_for_it(tmp_path: Path) -> None:
    (model,) = configured(tmp_path, ["chat=/models/x.gguf"]).models
    assert (model.id, model.ref, model.aliases, model.ttl_s) == ("chat", "/models/x.gguf", ("gpt-4",), 600)


def test_a_flag_may_name_a_configured_id(tmp_path: Path) -> None:
    (model,) = configured(tmp_path, ["embed"]).models
    assert model.ref == "nomic-embed-text-v1.5"


@pytest.mark.parametrize(
    ("ref", "wanted"),
    [
        ("SmolLM2-135M-Instruct:Q4_1", "SmolLM2-135M-Instruct"),
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("gpt-oss-120b-mxfp4-00001-of-00003.gguf", "gpt-oss-120b"),
        ("hf://unsloth/Qwen3.5-4B-GGUF:Q5_K_M@main", "Qwen3.5-4B"),
        ("https://host/a/model.gguf?download=true", "model"),
        ("a b/c d.gguf", "c-d"),
    ],
)
def test_an_id_is_made_from_a_reference(ref: str, wanted: str) -> None:
    assert id_of(ref) == wanted


@given(st.text(min_size=1, max_size=40))
def test_an_id_made_from_anything_is_an_id(ref: str) -> None:
    """It is part of URLs and file names."""
    found = id_of(ref)
    assert found
    assert all(c.isascii() and (c.isalnum() or c in "._+-") for c in found)


def test_names_are_unique(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two models have the id 'gpt-4'"):
        configured(tmp_path, [], FILE + '[[model]]\nid = "gpt-4"\nref = "x"\n')
    with pytest.raises(ConfigError, match="'a/b' is no model id"):
        configured(tmp_path, [], '[[model]]\nid = "a/b"\nref = "x"\n')


@pytest.mark.parametrize(
    ("alias", "fine"),
    [
        ("mistralai/mistral-7b", True),
        ("a/b/c:free", True),
        ("/a", False),
        ("a//b", False),
        ("a/../b", False),
        ("a b", False),
    ],
)
def test_an_alias_may_be_owner_and_name(tmp_path: Path, alias: str, fine: bool) -> None:
    text = f'[[model]]\nid = "chat"\nref = "x"\naliases = ["{alias}"]\n'
    if fine:
        assert configured(tmp_path, [], text).models[0].aliases == (alias,)
    else:
        with pytest.raises(ConfigError, match="is no alias"):
            configured(tmp_path, [], text)


def test_an_id_without_a_reference_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the reference after = is missing"):
        configured(tmp_path, ["chat="])


OTHER = '[[model]]\nid = "ears"\ncommand = ["whisper-server", "--port", "{port}"]\nmemory = "1.5GiB"\n'


def test_another_engine_has_a_command_in_place_of_a_reference(tmp_path: Path) -> None:
    text = OTHER + 'routes = ["/v1/audio/"]\nready = "/ok"\nenv = { HF_HOME = "/srv" }\nset = { n_parallel = 2 }'
    (model,) = configured(tmp_path, [], text).models
    assert (model.command[0], model.memory, model.ready) == ("whisper-server", 3 << 29, "/ok")
    assert (model.routes, model.env, model.ref) == (("/v1/audio/",), {"HF_HOME": "/srv"}, "")
    (flagged,) = configured(tmp_path, ["ears=/m.gguf"], text).models
    assert (flagged.ref, flagged.command) == ("/m.gguf", ())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (OTHER.replace("{port}", "8000"), "no {port}"),
        (OTHER.replace('id = "ears"\n', ""), "id is missing"),
        (OTHER.replace('memory = "1.5GiB"\n', ""), "memory is missing"),
        (OTHER + 'ref = "Big"', "exclude each other"),
        (OTHER + 'routes = ["v1/audio"]', "is no path"),
        (OTHER + 'ready = "health"', "is no path"),
        (OTHER + r'ready = "/health\r\nX: y"', "is no path"),
        (OTHER + r'routes = ["/v1/a b"]', "is no path"),
        (OTHER + 'env = { "A=B" = "c" }', "no name of a variable"),
        (OTHER + 'env = { "" = "c" }', "no name of a variable"),
        (OTHER.replace('["whisper-server", "--port", "{port}"]', "[]"), "command is empty"),
        ('[[model]]\nref = "Big"\nmemory = "1GiB"', "memory is for a model with command"),
        ('[[model]]\nref = "Big"\nroutes = ["/v1/x"]', "routes is for a model with command"),
    ],
)
def test_another_engine_that_cannot_be_started_or_planned_is_refused(text: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=wrong):
        configured(tmp_path, [], text)


@pytest.mark.parametrize(
    ("returns", "ttl_s", "ring"),
    [
        ({"a": "b", "b": "a"}, 60, "a -> b -> a"),
        ({"a": "b", "b": "c", "c": "b"}, 60, "b -> c -> b"),
        ({"a": "b", "b": "a"}, 0, None),
        ({"a": "c", "b": "c"}, 60, None),
    ],
)
def test_models_that_would_wake_each_other_without_end_are_refused(
    returns: dict[str, str], ttl_s: int, ring: str | None, tmp_path: Path
) -> None:
    text = "".join(
        f'[[model]]\nid = "{name}"\nref = "/m.gguf"\nttl_s = {ttl_s}\nreturn_to = "{returns.get(name, "")}"\n'
        for name in "abc"
    )
    if ring is None:
        assert len(configured(tmp_path, [], text).models) == 3
        return
    with pytest.raises(ConfigError, match=f"wake each other: {ring}"):
        configured(tmp_path, [], text)


@pytest.mark.parametrize("name", ["chat", "none"])
def test_return_to_names_another_model(name: str, tmp_path: Path) -> None:
    assert configured(tmp_path, [], FILE.replace("ttl_s = 600", 'return_to = "embed"')).models[0].return_to == "embed"
    with pytest.raises(ConfigError, match="return_to names no other model"):
        configured(tmp_path, [], FILE.replace("ttl_s = 600", f'return_to = "{name}"'))
