"""Profiles: shipped ones, a user's over them, one level of extends, tiers and their names."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from edge.board.named import board_by_id, board_ids
from edge.cli import main
from edge.config.profile import check_file, choose, load_profile, profile_names, resolve_tier
from edge.config.show import schema
from edge.config.values import SETTINGS
from edge.errors import ConfigError
from edge.paths import Folders, folders
from edge.resources import data_dir, load_toml
from tests.plan import shapes

SHIPPED = ("agx-orin", "auto", "cpu", "cuda", "multi-gpu", "orin", "orin-nano", "orin-nx", "thor", "wsl2", "xavier")
NOT_PROFILES = ("boards", "models", "ranking")


@pytest.fixture
def places(tmp_path: Path) -> Folders:
    found = folders({}, tmp_path)
    (found.config / "profiles").mkdir(parents=True)
    return found


def user(places: Folders, name: str, text: str) -> Path:
    path = places.config / "profiles" / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_profiles_are_there(places: Folders) -> None:
    assert profile_names(places) == SHIPPED
    for name in SHIPPED:
        assert load_profile(name, places).summary


@pytest.mark.parametrize("board_id", board_ids())
def test_auto_has_a_profile_for_every_known_board(places: Folders, board_id: str) -> None:
    board = board_by_id(board_id)
    name = choose(load_profile("auto", places), board)
    profile = resolve_tier(load_profile(name, places), board)
    assert profile.tier is not None
    assert (profile.preset.backend == "cuda") == (board.compute_capability is not None and board.refused is None)


def test_keys_that_name_files_of_one_model_are_refused_in_a_profile(places: Folders) -> None:
    """A profile is for many models: the hint names the place in edgellm.toml."""
    keys = [key for key, field in SETTINGS.items() if field.one_model]
    assert {"args", "draft", "lora", "mmproj", "chat_template_file"} <= set(keys)
    for key in keys:
        value = '["/m/a.gguf"]' if key in ("args", "lora") else '"/m/a.gguf"'
        for text in (f"{key} = {value}\n", f'[[tier]]\nname = "8GB"\n{key} = {value}\n'):
            user(places, "mine", text)
            with pytest.raises(ConfigError, match=f"mine.toml: .*{key} is not a key of this section") as caught:
                load_profile("mine", places)
            assert caught.value.exit_code == 78
            assert f"or for one model: set = {{ {key} = … }}" in str(caught.value.hint)


def test_a_tier_is_chosen_by_memory_and_may_be_named(places: Folders) -> None:
    orin = load_profile("orin", places)
    found = {memory: resolve_tier(orin, shapes.jetson(memory)).tier for memory in (3.7, 7.4, 15.3, 30.2, 61.3, 200)}
    assert found == {3.7: "4GB", 7.4: "8GB", 15.3: "16GB", 30.2: "32GB", 61.3: "64GB", 200: "64GB"}
    nano = load_profile("orin-nano", places)
    assert [tier.name for tier in nano.tiers] == ["4GB", "8GB"]
    beyond = resolve_tier(nano, shapes.jetson(16))
    assert beyond.tier == "8GB"
    assert beyond.notes


def test_a_tier_of_discrete_gpus_counts_their_memory(places: Folders) -> None:
    board = shapes.gpu_board(24, 24)
    assert resolve_tier(load_profile("cuda", places), board).tier == "24GB"
    assert resolve_tier(load_profile("multi-gpu", places), board).tier == "48GB"
    assert resolve_tier(load_profile("cpu", places), board).tier == "32GB"


def test_a_users_profile_lies_over_the_shipped_one_and_its_tiers(places: Folders) -> None:
    path = user(places, "orin", "n_ctx = 2048\n[thermal]\nmax_watts = 20\n")
    profile = resolve_tier(load_profile("orin", places), shapes.jetson(8))
    assert profile.preset.n_ctx == 2048
    assert profile.origins["n_ctx"] == f"profile {path}"
    assert profile.preset.cache_ram == 128 * 1024**2  # the tier's, untouched
    assert profile.preset.backend == "cuda"
    assert profile.sections == {"thermal.max_watts": 20.0}


def test_extends_goes_one_level_deep(places: Folders) -> None:
    user(places, "lab", 'extends = "orin"\nn_parallel = 3\n')
    profile = load_profile("lab", places)
    assert (profile.name, profile.preset.n_parallel, profile.preset.backend) == ("lab", 3, "cuda")
    user(places, "deeper", 'extends = "wsl2"\n')
    with pytest.raises(ConfigError, match="extends wsl2, which itself extends cuda"):
        load_profile("deeper", places)
    user(places, "lost", 'extends = "orim"\n')
    with pytest.raises(ConfigError, match="extends 'orim', which is no profile; did you mean orin"):
        load_profile("lost", places)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n_ctxt = 1\n", "unknown key n_ctxt; did you mean n_ctx?"),
        ("lora = ['/a.gguf']\n", "lora is not a key of this section"),
        ("offload = 'all'\n", "offload wants one of full, none, got 'all'"),
        ("n_ctx = 1.5\n", "n_ctx wants a whole number, got a number 1.5"),
        ("[[tier]]\nname = 'a'\nmemory_max = 'big'\n", "tier 1: memory_max not a size"),
        ("[[tier]]\nkv_type_k = 'q2_k'\n", "tier 1: kv_type_k wants one of"),
        ("[[use]]\nsocs = ['Orin']\n", "use 1: profile is missing"),
        ("[thermal]\nact = 1\n", "thermal.act wants true or false"),
        ("[gateway]\nhosts = []\n", "unknown key gateway.hosts"),
        ("schema = 9\n", "schema 9 is newer"),
        ("schema = true\n", "schema True is newer"),
        ("tier = 1\n", "tier wants tables, written [[tier]]"),
        ("not toml", "bad.toml: "),
    ],
)
def test_a_bad_profile_names_file_and_key(places: Folders, text: str, said: str) -> None:
    path = user(places, "bad", text)
    with pytest.raises(ConfigError) as caught:
        load_profile("bad", places)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_an_unknown_name_says_which_there_are(places: Folders) -> None:
    with pytest.raises(ConfigError, match=r"no profile 'orni'; did you mean orin\?"):
        load_profile("orni", places)
    with pytest.raises(ConfigError, match="no such profile file"):
        load_profile("./orin.toml", places)


@pytest.mark.parametrize("path", sorted(data_dir("profiles").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_profiles_follow_the_schema(path: Path) -> None:
    if path.stem not in NOT_PROFILES:
        jsonschema.validate(load_toml(path), schema())


@pytest.mark.parametrize(
    "bad", [{"n_ctxt": 1}, {"offload": "all"}, {"n_ctx": 1.5}, {"thermal": {"act": 1}}, {"tier": 1}]
)
def test_the_schema_refuses_what_the_loader_refuses(bad: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, schema())


def test_the_example_of_the_page_is_a_good_profile(places: Folders, tmp_path: Path) -> None:
    text = (data_dir("profiles") / "README.md").read_text(encoding="utf-8")
    path = tmp_path / "robot.toml"
    path.write_text(text.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    assert check_file(path, places).preset.n_ctx == 8192


def test_commands(places: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state-dir", str(tmp_path)]
    assert main(["profile", "list", *state]) == 0
    assert "orin-nano" in capsys.readouterr().out
    assert main(["profile", "show", "agx-orin", *state]) == 0
    shown = capsys.readouterr().out
    assert "tier 64GB (agx-orin), memory up to any size:" in shown
    assert 'recipe = "orin"' in shown
    assert main(["profile", "show", "auto", *state]) == 0
    assert "Orin → orin" in capsys.readouterr().out
    good, bad = user(places, "good", "n_ctx = 4096\n"), user(places, "bad", "n_ctz = 4096\n")
    assert main(["profile", "check", str(good), *state]) == 0
    capsys.readouterr()
    assert main(["profile", "check", str(bad), *state]) == 78
    assert "did you mean n_ctx?" in capsys.readouterr().err
    for command in (["list"], ["show", "orin"], ["check", str(good)]):
        assert main(["profile", *command, "--json", *state]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == 1
