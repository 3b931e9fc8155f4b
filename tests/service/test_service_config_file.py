"""edgellm.toml of a service: what was there stays, and a person can go on writing in it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import ConfigError, UsageError
from edge.paths import folders
from edge.service.config_file import Served, config_text, merge, read_base
from edge.service.request import InstallRequest, unit_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BEFORE = {
    "schema": 1,
    "strict": True,
    "gateway": {"hold": {"seconds": 30}},
    "model": [{"id": "chat", "ref": "./m.gguf", "aliases": ["gpt"], "set": {"n_ctx": 4096, "kv_type_k": "q8_0"}}],
}


def test_the_rest_stays() -> None:
    after = merge(BEFORE, [Served("chat", "M:Q4_0")], profile="orin", listen=(), dirs=("/mnt/models",))
    assert after["profile"] == "orin"
    assert after["store"] == {"dirs": ["/mnt/models"]}
    assert after["model"] == [{**BEFORE["model"][0], "ref": "M:Q4_0"}]  # type: ignore[index]
    assert after["gateway"] == BEFORE["gateway"]
    assert "listen" not in after
    assert BEFORE["model"][0]["ref"] == "./m.gguf"  # type: ignore[index]
    again = merge(after, [Served("chat", "M:Q4_0")], profile=None, listen=(), dirs=("/mnt/models",))
    assert again == after


def test_it_can_be_read_and_written_on() -> None:
    after = merge(BEFORE, [Served("chat", "M:Q4_0"), Served("embed", 'a "b" \\c')], profile=None, listen=(), dirs=())
    written = config_text(after, Path("/home/ann/edgellm.toml"))
    assert tomllib.loads(written) == after
    assert "from /home/ann/edgellm.toml" in written.splitlines()[0]
    added = tomllib.loads(written + '\n[[model]]\nid = "third"\nref = "x.gguf"\n')
    assert [model["id"] for model in added["model"]] == ["chat", "embed", "third"]


KEYS = st.text(max_size=8)
VALUES = st.recursive(
    st.one_of(st.text(max_size=20), st.integers(-(2**53), 2**53), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.text(max_size=20))
def test_any_model_and_any_origin_keep_the_structure(model: dict[str, Any], origin: str) -> None:
    document = {"schema": 1, "model": [model, {"id": "second"}]}
    assert tomllib.loads(config_text(document, Path(origin))) == document


def test_the_first_that_is_there(tmp_path: Path) -> None:
    second = tmp_path / "edgellm.toml"
    second.write_text("schema = 1\n")
    assert read_base([tmp_path / "none", second]) == ({"schema": 1}, second)
    assert read_base([tmp_path / "none"]) == ({}, None)
    second.write_text("schema = ")
    with pytest.raises(ConfigError, match=r"edgellm\.toml"):
        read_base([second])


@pytest.mark.parametrize("listen", ["8080", '"127.0.0.1:80"', "[1]", '[["a"]]', "{a = 1}"])
def test_addresses_of_another_type_are_named(tmp_path: Path, listen: str) -> None:
    source = folders({}, tmp_path)
    source.config.mkdir()
    (source.config / "edgellm.toml").write_text(f"listen = {listen}")
    with pytest.raises(ConfigError, match="listen wants"):
        unit_settings(InstallRequest(source=source, root=tmp_path))


@pytest.mark.parametrize("option", [{"model_dirs": (Path("/srv/\udcff"),)}, {"power_mode": "\udcff"}])
def test_what_no_unit_file_can_hold_is_refused_before_the_first_step(tmp_path: Path, option: dict) -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        unit_settings(InstallRequest(source=folders({}, tmp_path), root=tmp_path, **option))
