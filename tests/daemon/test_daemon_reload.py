"""`edgellm reload` and SIGHUP: planned first, applied model by model, and a bad configuration changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins

from edge.errors import ConfigError, EdgeError, ModelMissingError
from tests.daemon.served import Served, served
from tests.fakes.llama_switches import Death, change
from tests.serving import alive, eventually

BAD_FLAG = Death("line", ["error: invalid argument: --nonsense"], code=1)
HELD_MIB = 1200


@pytest.fixture(scope="module")
def chat(smollm2: Path) -> str:
    return f'id = "chat"\nref = "{smollm2}"'


@pytest.fixture(scope="module")
def running(chat: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("r"), chat) as up:
        yield up


@pytest.fixture
def up(running: Served, chat: str) -> Served:
    """One process for all tests that leave it as it was: serving `chat`."""
    running.configure(chat)
    change(running.fake, death=None)
    running.reload()
    running.ready()
    return running


def smaller(chat: str, n_ctx: int = 2048) -> str:
    return f"{chat}\nset = {{ n_ctx = {n_ctx} }}"


def test_nothing_changed_keeps_the_engine(up: Served) -> None:
    pid = up.model()["pid"]
    assert up.reload() == {"schema": 1, "models": {"chat": "kept"}, "failures": {}, "after_restart": []}
    assert up.model()["pid"] == pid


def test_what_is_read_only_at_start_is_named(up: Served, chat: str) -> None:
    up.configure(chat, top='[gateway]\nqueue = 3\n[telemetry]\njtop = "off"')
    said = up.cli("reload")
    assert "chat: unchanged" in said
    assert "gateway.queue, telemetry.jtop: changed, but read only at start" in said
    assert "gateway.queue, telemetry.jtop" in up.output


def test_a_change_that_fits_beside_the_old_one_has_no_pause(up: Served, chat: str) -> None:
    old, before = up.model()["pid"], len(up.events())
    up.configure(smaller(chat))
    assert up.reload()["models"] == {"chat": "beside"}
    assert up.model()["state"] == "READY" and up.model()["pid"] != old
    eventually(lambda: not alive(old), "the old engine goes")
    assert up.chat().status_code == 200
    states = [event["state"] for event in up.events()[before:] if event.get("event") == "state"]
    assert states.index("READY") < states.index("DRAINING"), "first the new one, then the old"


@pytest.mark.parametrize(
    ("more", "words"), [('args = ["--keep", "4"]', ["--keep", "4"]), ("set = { top_k = 7 }", ["--top-k", "7"])]
)
def test_an_option_of_the_engine_is_a_change(up: Served, chat: str, more: str, words: list[str]) -> None:
    old = up.model()["pid"]
    up.configure(f"{chat}\n{more}")
    assert up.reload()["models"] == {"chat": "beside"}
    pid = up.model()["pid"]
    assert pid != old and Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-3:-1] == words
    assert up.reload()["models"] == {"chat": "kept"}


def test_models_come_and_go(up: Served, chat: str, smollm2: Path) -> None:
    other = f'id = "other"\nref = "{smollm2}"'
    up.configure(chat, other)
    assert up.reload()["models"] == {"chat": "kept", "other": "added"}
    assert up.ready("other")["pid"] != up.model()["pid"]
    up.configure(other)
    assert up.reload()["models"] == {"chat": "removed", "other": "kept"}
    assert list(up.status()["models"]) == ["other"]
    assert up.chat(model="other").status_code == 200


def test_a_change_of_one_model_leaves_the_engine_of_the_other_alone(up: Served, chat: str, smollm2: Path) -> None:
    other = f'id = "other"\nref = "{smollm2}"'
    up.configure(chat, other)
    up.reload()
    pids = {name: up.ready(name)["pid"] for name in ("chat", "other")}
    up.configure(smaller(chat), other)
    assert up.reload()["models"] == {"chat": "beside", "other": "kept"}
    assert up.ready()["pid"] != pids["chat"]
    assert up.ready("other")["pid"] == pids["other"]
    assert up.chat(model="other").status_code == 200


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("schema = 1\nprofil = 'cpu'\n", ConfigError),
        ("schema = 1\nprofile = 'cpu'\n[[model]]\nid = 'chat'\nref = '/nowhere/m.gguf'\n", ModelMissingError),
        ("not toml at all", ConfigError),
    ],
)
def test_a_bad_configuration_changes_nothing(up: Served, body: str, error: type[EdgeError]) -> None:
    pid = up.model()["pid"]
    up.config.write_text(body)
    with pytest.raises(error) as caught:
        up.reload()
    assert caught.value.hint
    assert (up.model()["pid"], up.model()["state"]) == (pid, "READY")
    assert up.chat().status_code == 200


def test_a_new_plan_that_does_not_come_up_changes_nothing(up: Served, chat: str) -> None:
    pid = up.model()["pid"]
    change(up.fake, death=BAD_FLAG)
    up.configure(smaller(chat, 4096))
    said = up.cli("reload", rc=1)
    assert "the old engine continues" in said and "bad_flag" in said and "hint:" in said
    assert (up.model()["pid"], up.model()["state"]) == (pid, "READY")
    assert up.chat().status_code == 200


def test_sighup_reloads_and_says_what_was_wrong(up: Served, chat: str) -> None:
    up.configure(smaller(chat, 1024))
    up.process.send_signal(signal.SIGHUP)
    eventually(lambda: "reloaded: chat: beside" in up.output.rpartition('"planned"')[2], lambda: up.output)
    up.config.write_text("bad")
    up.process.send_signal(signal.SIGHUP)
    eventually(lambda: '"model": "reload", "kind": "config"' in up.output, lambda: up.output)
    assert up.chat().status_code == 200


def test_a_failed_model_is_cured_by_a_reload(up: Served) -> None:
    change(up.fake, death=BAD_FLAG)
    up.client.restart()
    eventually(lambda: up.model()["state"] == "FAILED", "it fails")
    answer = up.chat()
    assert answer.status_code == 503 and answer.json()["error"]["kind"] == "bad_flag"
    change(up.fake, death=None)
    assert up.reload()["models"] == {"chat": "after"}
    assert up.chat().status_code == 200


def test_a_sleeping_model_sleeps_on(up: Served, chat: str) -> None:
    up.configure(f"{chat}\nttl_s = 1")
    up.reload()
    eventually(lambda: up.model()["state"] == "SLEEPING", lambda: up.output)
    up.configure(f"{chat}\nttl_s = 60\nset = {{ n_ctx = 2048 }}")
    assert up.reload()["models"] == {"chat": "asleep"}
    assert up.model()["state"] == "SLEEPING"
    assert up.chat().status_code == 200, "and wakes with the new plan"


def test_a_model_that_is_not_preloaded_is_added_asleep(up: Served, chat: str, smollm2: Path) -> None:
    up.configure(chat, f'id = "later"\nref = "{smollm2}"\npreload = false')
    assert up.reload()["models"] == {"chat": "kept", "later": "added"}
    assert up.model("later")["state"] == "SLEEPING" and up.model("later")["pid"] is None
    assert up.healthz()["status"] == "ok"
    assert up.chat(model="later").status_code == 200


def crowded(up: Served, chat: str) -> str:
    """A change that needs more than is free beside the old engine, and less than is free after it: by 500 MiB each.

    So much may other processes of the machine take or give back meanwhile.
    """
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    reserve_mib = int(meminfo["MemAvailable"].split()[0]) // 1024 - 500
    if reserve_mib <= 0:
        pytest.skip("less than 500 MiB are free beside the engine")
    up.configure(
        f'{chat}\nset = {{ n_ctx = 2048, cache_ram = "850MiB" }}', top=f'[memory]\nreserve = "{reserve_mib}MiB"'
    )
    return up.model()["pid"]


def test_what_does_not_fit_beside_waits_for_the_old_one_to_go(short_dir: Path, chat: str) -> None:
    with served(short_dir, chat, hold_mib=HELD_MIB) as up:
        old = crowded(up, chat)
        assert up.reload()["models"] == {"chat": "after"}
        assert up.model()["state"] == "READY" and not alive(old)
        states = [event["state"] for event in up.events() if event.get("event") == "state"]
        assert states[-1] == "READY" and "STOPPED" in states
        assert up.chat().status_code == 200


def test_and_goes_back_to_the_old_one_if_the_new_one_fails(short_dir: Path, chat: str) -> None:
    with served(short_dir, chat, hold_mib=HELD_MIB) as up:
        crowded(up, chat)
        change(up.fake, first_starts=2, first={"death": to_builtins(BAD_FLAG, enc_hook=str)})
        document = up.reload()
        assert (document["models"], document["failures"]["chat"]["kind"]) == ({"chat": "back"}, "bad_flag")
        assert up.ready()["failure"] is None
        assert up.chat().status_code == 200 and len(up.pids) == 3
