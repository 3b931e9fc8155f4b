"""Layers, precedence and origins of the configuration; faults name file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.board.named import board_by_id
from edge.config import load, resolve_profile
from edge.errors import ConfigError, UsageError
from edge.paths import Folders, folders


@pytest.fixture
def places(tmp_path: Path) -> Folders:
    found = folders({}, tmp_path)
    found.config.mkdir(parents=True)
    return found


def write(places: Folders, text: str) -> Path:
    path = places.config / "edgellm.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_configured_is_the_defaults(places: Folders) -> None:
    config = load(places, {}, {})
    assert (config.profile, config.listen, config.models) == ("auto", ("127.0.0.1:8080",), ())
    assert config.gateway.hold.seconds == 900
    assert config.origins == {}


def test_each_layer_beats_the_one_below(places: Folders, tmp_path: Path) -> None:
    """Flag > --set > environment > user's file > system's file > user's profile > shipped profile."""
    system = tmp_path / "etc"
    (system / "profiles").mkdir(parents=True)
    (places.config / "profiles").mkdir()
    (places.config / "profiles" / "mine.toml").write_text("[restart]\nstable_s = 1\n")

    def stable(flags: dict[str, object], env: dict[str, str]) -> tuple[float, str]:
        config = load(places, {"profile": "mine", **flags}, env, system)
        return config.restart.stable_s, config.origins.get("restart.stable_s", "default")

    assert stable({}, {})[0] == 1
    assert stable({}, {})[1].endswith("mine.toml")
    (system / "edgellm.toml").write_text("[restart]\nstable_s = 2\n")
    assert stable({}, {}) == (2, str(system / "edgellm.toml"))
    path = write(places, "[restart]\nstable_s = 3\n")
    assert stable({}, {}) == (3, str(path))
    env = {"EDGELLM_RESTART__STABLE_S": "4"}
    assert stable({}, env) == (4, "env EDGELLM_RESTART__STABLE_S")
    assert stable({"set": ["restart.stable_s=5"]}, env) == (5, "--set")


def test_a_flag_beats_set(places: Folders) -> None:
    config = load(places, {"listen": ["0.0.0.0:1"], "set": ["listen=127.0.0.1:2"]}, {})
    assert (config.listen, config.origins["listen"]) == (("0.0.0.0:1",), "flag")


def test_wishes_become_overrides_with_their_origin(places: Folders) -> None:
    path = write(places, '[set]\nn_ctx = 4096\n[memory]\nreserve = "2GiB"\n')
    config = load(places, {"set": ["kv_type_k=q8_0"]}, {"EDGELLM_N_CTX": "2048"})
    assert {key: (value.value, value.origin) for key, value in config.overrides.items()} == {
        "n_ctx": (2048, "env EDGELLM_N_CTX"),
        "reserve": ("2GiB", str(path)),
        "kv_type_k": ("q8_0", "--set"),
    }
    assert config.memory.reserve == "2GiB"


def test_lists_and_sizes_are_read_from_text(places: Folders) -> None:
    env = {
        "EDGELLM_LISTEN": "127.0.0.1:1, [::1]:2",
        "EDGELLM_GATEWAY__MAX_BODY_BYTES": "16MiB",
        "EDGELLM_STRICT": "yes",
    }
    config = load(places, {}, env)
    assert config.listen == ("127.0.0.1:1", "[::1]:2")
    assert config.gateway.max_body_bytes == 16 * 1024**2
    assert config.strict is True


def test_files_of_settings_are_absolute(places: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine runs in another folder, where a name that was found here would be none."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/x")
    here = str(tmp_path / "here")
    table = "chat_template_file = 't.jinja'\nlora = ['a.gguf:0.5', '/b.gguf']\nmmproj = '~/p.gguf'\n"
    write(places, f"[[model]]\nref = 'a'\n{table}set = {{ system_prompt_file = '../s.txt' }}\n[[model]]\nref = 'b'\n")
    config = load(places, {"set": ["chat_template_file=u.jinja", "mmproj=none", "lora=c.gguf"]}, {})
    assert config.models[0].set == {
        "chat_template_file": f"{here}/t.jinja",
        "lora": (f"{here}/a.gguf:0.5", "/b.gguf"),
        "mmproj": "/home/x/p.gguf",
        "system_prompt_file": f"{here}/../s.txt",
    }
    flags = {key: config.overrides[key].value for key in ("chat_template_file", "mmproj", "lora")}
    assert flags == {"chat_template_file": f"{here}/u.jinja", "mmproj": "none", "lora": (f"{here}/c.gguf",)}
    assert load(places, {"set": ["mmproj=auto", "chat_template_file="]}, {}).overrides["chat_template_file"].value == ""


def test_an_index_or_the_value_of_an_option_may_be_a_number(places: Folders) -> None:
    text = "[set]\ngpus = [0, 'RTX 4090']\n[[model]]\nref = 'a'\nargs = ['--keep', 4, '--xtc-probability', 0.25]\n"
    write(places, text)
    config = load(places, {}, {})
    assert config.overrides["gpus"].value == ("0", "RTX 4090")
    assert config.models[0].set["args"] == ("--keep", "4", "--xtc-probability", "0.25")
    told = load(places, {"set": ['args=["--keep", -1]', "gpus=1"]}, {})
    assert (told.overrides["args"].value, told.overrides["gpus"].value) == (("--keep", "-1"), ("1",))
    write(places, "[set]\ngpus = [true]\n")
    with pytest.raises(ConfigError, match="gpus wants text, got a boolean True"):
        load(places, {}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stric = true\n", "unknown key stric; did you mean strict?"),
        ("[gateway]\nhold = { second = 1 }\n", "unknown key gateway.hold.second; did you mean gateway.hold.seconds?"),
        ('strict = "yes"\n', "strict wants true or false, got text 'yes'"),
        ("listen = 8080\n", "listen wants a list, got a whole number 8080"),
        ("listen = [8080]\n", "listen wants text, got a whole number 8080"),
        ("[telemetry]\ninterval_s = 0\n", "telemetry.interval_s wants at least 0.1, got 0"),
        ('[gateway]\nunknown_model = "onyl"\n', "did you mean only?"),
        ('[memory]\nreserve = "lots"\n', "memory.reserve wants a size"),
        ("schema = 2\n", "schema 2 is newer than this edgellm knows (1)"),
        ("schema = true\n", "schema True is newer"),
        ("[set]\nn_ctxx = 1\n", "set: unknown key n_ctxx; did you mean n_ctx?"),
        ("[[model]]\nid = 'a'\n", "model 1: ref is missing"),
        (
            "[[model]]\nref = 'a'\nset = { n_ctx = 'many' }\n",
            "model 1: set: n_ctx wants a whole number, got text 'many'",
        ),
        ("[[model]]\nref = 'a'\nwarm_at = '8 am'\n", "warm_at wants a time like 08:00, got '8 am'"),
        ("[model]\nref = 'a'\n", "model wants tables, written [[model]]"),
        ("strict = \n", "edgellm.toml: "),
    ],
)
def test_a_fault_in_the_file_names_file_and_key(places: Folders, text: str, said: str) -> None:
    path = write(places, text)
    with pytest.raises(ConfigError) as caught:
        load(places, {}, {})
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("hosts = ['box.local']\n", "[gateway] of edgellm.toml: hosts = …"),
        ("[gateway]\nstrictly = true\n", None),
        ("[gateway]\nstrict = true\n", "the top of edgellm.toml: strict = …"),
        ("n_ctx = 4096\n", "[set], or for one model: set = { n_ctx = … }"),
        ("ttl_s = 60\n", "[[model]]: ttl_s = …"),
        ("[[model]]\nref = 'a'\nn_ctx = 4096\n", "[set], or for one model: set = { n_ctx = … }"),
        ("[[model]]\nref = 'a'\nlisten = []\n", "the top of edgellm.toml: listen = …"),
        ("[set]\nqueue = 4\n", "[gateway] of edgellm.toml: queue = …"),
        ("[gateway]\nlisten = []\n", "the top of edgellm.toml: listen = …"),
        ("[gateway]\nact = true\n", "[thermal] of edgellm.toml: act = …"),
        ("[models.chat]\nref = 'a'\n", "[[model]]: ref = …"),
        ("[thermal.x]\nn_ctx = 1\n", "[set], or for one model: set = { n_ctx = … }"),
    ],
)
def test_a_key_in_the_wrong_section_names_the_right_one(places: Folders, text: str, place: str | None) -> None:
    write(places, text)
    with pytest.raises(ConfigError) as caught:
        load(places, {}, {})
    if place is None:
        assert "unknown key gateway.strictly" in str(caught.value)
    else:
        assert "is not a key of this section" in str(caught.value)
        assert caught.value.hint == f"it belongs into {place}"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({}, True),
        ({"listen": ["[::1]:1", "localhost:2", "127.0.0.2"]}, True),
        ({"listen": ["127.0.0.1:1", "0.0.0.0:1"]}, False),
        ({"listen": ["[::]:1"]}, False),
        ({"listen": ["192.168.1.2:1"]}, False),
        ({"listen": ["0.0.0.0:1"], "set": ["ui=true"]}, True),
        ({"set": ["ui=false"]}, False),
    ],
)
def test_the_engines_page_is_for_this_machine_unless_set(
    places: Folders, flags: dict[str, list[str]], shown: bool
) -> None:
    config = load(places, flags, {})
    assert resolve_profile(config, board_by_id("cpu-16"), places).preset.ui is shown


def test_a_file_with_a_byte_order_mark_is_read(places: Folders) -> None:
    (places.config / "edgellm.toml").write_bytes("\ufeffstrict = true\n".encode())
    assert load(places, {}, {}).strict is True


def test_a_list_in_the_environment_may_be_written_as_in_toml(places: Folders) -> None:
    config = load(places, {}, {"EDGELLM_LISTEN": '["127.0.0.1:1", "[::1]:2"]'})
    assert config.listen == ("127.0.0.1:1", "[::1]:2")
    assert load(places, {"set": ["listen=[::1]:8080"]}, {}).listen == ("[::1]:8080",)


def test_variables_of_kubernetes_and_docker_are_ignored_and_named(places: Folders) -> None:
    """A Service called edgellm or edgellm-gpu puts its address into the environment of every container beside it."""
    env = {
        "EDGELLM_PORT": "tcp://10.0.0.1:8080",
        "EDGELLM_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "EDGELLM_PORT_8080_TCP_ADDR": "10.0.0.1",
        "EDGELLM_SERVICE_HOST": "10.0.0.1",
        "EDGELLM_SERVICE_PORT": "8080",
        "EDGELLM_SERVICE_PORT_HTTP": "8080",
        "EDGELLM_GPU_SERVICE_HOST": "10.0.0.2",
        "EDGELLM_GPU_PORT_80_TCP_PROTO": "tcp",
        "EDGELLM_NAME": "/web/edgellm",
        "EDGELLM_ENV_PATH": "/bin",
        "EDGELLM_STRICT": "true",
    }
    config = load(places, {}, env)
    assert config.strict is True
    assert config.notes == (f"made by Kubernetes or Docker, so no settings: {', '.join(sorted(env)[:-1])}",)


def test_a_fault_elsewhere_names_where(places: Folders) -> None:
    with pytest.raises(ConfigError, match=r"environment EDGELLM_N_CTZ: unknown key n_ctz; did you mean n_ctx\?"):
        load(places, {}, {"EDGELLM_N_CTZ": "1"})
    with pytest.raises(ConfigError, match=r"unknown key store_dirs; did you mean store\.dirs\?") as caught:
        load(places, {}, {"EDGELLM_STORE_DIRS": "/srv"})
    assert caught.value.hint is not None and "EDGELLM_STORE__DIRS is store.dirs" in caught.value.hint
    assert load(places, {}, {"EDGELLM_STORE__DIRS": "/srv,/mnt"}).store.dirs == ("/srv", "/mnt")
    with pytest.raises(ConfigError, match="--set: n_ctx wants a whole number"):
        load(places, {"set": ["n_ctx=big"]}, {})
    with pytest.raises(UsageError, match="wants key=value"):
        load(places, {"set": ["n_ctx"]}, {})


def test_variables_of_other_parts_are_left_alone(places: Folders) -> None:
    load(places, {}, {"EDGELLM_STATE_DIR": "/x", "EDGELLM_API_KEY": "secret", "EDGELLM_DEBUG": "1", "OTHER": "1"})


def test_an_unreadable_file_is_a_fault_not_a_silence(places: Folders) -> None:
    (places.config / "edgellm.toml").mkdir()
    with pytest.raises(ConfigError, match=r"edgellm\.toml"):
        load(places, {}, {})
