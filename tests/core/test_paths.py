from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.builder.download import pip_command
from edge.daemon import consent
from edge.errors import UnavailableError
from edge.paths import ROOT_CACHE, SOCKET_PATH_MAX_BYTES, folders, system_folders
from edge.resources import module_command


def test_a_user_has_the_folders_of_the_desktop_standard() -> None:
    env = {"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/7", "XDG_CACHE_HOME": "relative-is-ignored"}
    found = folders(env, root_user=False)
    assert found.data == Path("/home/u/.local/share/edgellm")
    assert found.cache == Path("/home/u/.cache/edgellm")
    assert found.run == Path("/run/user/7/edgellm")


def test_root_has_the_systems_and_a_state_dir_beats_both() -> None:
    assert folders({"HOME": "/root"}, root_user=True) == system_folders()._replace(cache=ROOT_CACHE)
    given_one = folders({"EDGELLM_STATE_DIR": "/srv/a"}, Path("/srv/b"), root_user=True)
    assert given_one.state == Path("/srv/b/state") and given_one.config == Path("/srv/b/config")
    assert folders({"EDGELLM_STATE_DIR": "/srv/a"}).data == Path("/srv/a/data")


def test_home_may_be_unset() -> None:
    """FC-77: nothing crashes where a unit has no HOME."""
    assert folders({}, root_user=False).cache == Path("/nonexistent/.cache/edgellm")


def test_a_deep_state_dir_gets_a_short_run_folder() -> None:
    deep = Path("/srv") / ("x" * 90)
    found = folders({}, deep)
    assert found.data.is_relative_to(deep) and not found.run.is_relative_to(deep)
    assert found.run == folders({}, deep).run != folders({}, deep / "y").run


@given(st.text(min_size=1, max_size=200))
def test_a_models_socket_always_fits_and_is_one_file_name(model_id: str) -> None:
    path = folders({}, Path("/srv") / ("d" * 40)).model_socket(model_id)
    assert len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES
    assert path.parent.name == "main" and path.name.endswith(".sock") and path.name not in (".sock", "control.sock")


def test_ids_that_look_alike_get_different_sockets() -> None:
    found = folders({}, Path("/srv"))
    names = {found.model_socket(name).name for name in ("a/b", "a_b", "a b", "chat", "control")}
    assert len(names) == 5


def test_no_model_takes_the_place_of_a_file_of_ours() -> None:
    """control-Q4_0.gguf had the control socket for its engine's, and access-Q4_0.gguf the access log for its log."""
    found = folders({}, Path("/srv"))
    names = [found.model_socket(name) for name in ("access", "control")]
    assert (
        found.control_socket not in names and [each.stem for each in names if each.stem in ("access", "control")] == []
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_named_folder_that_another_user_prepared_is_refused(short_dir: Path) -> None:
    """In /tmp any user may make it first: its edgellm.toml names the program that root would run."""
    open_to_all, home = short_dir / "tmp", short_dir / "home"
    for folder in (open_to_all, home):
        (folder / "x/deeper").mkdir(parents=True)
        os.chown(folder / "x", 12345, 12345)
    open_to_all.chmod(0o1777)
    (open_to_all / "link").symlink_to(home)
    os.chown(open_to_all / "link", 12345, 12345, follow_symlinks=False)
    for named in ("x", "x/deeper", "x/not-yet/there", "link", "link/x"):
        with pytest.raises(UnavailableError, match="user 12345 made"):
            folders({}, open_to_all / named)
        with pytest.raises(UnavailableError):
            folders({"EDGELLM_STATE_DIR": str(open_to_all / named)})
        with pytest.raises(UnavailableError):
            folders({"HOME": "/home/u", "XDG_CONFIG_HOME": str(open_to_all / named)}, root_user=False)
    (home / "cache").symlink_to(home / "once-more")
    (home / "once-more").symlink_to(open_to_all / "x")  # a cache folder kept in /tmp, which is empty after a reboot
    with pytest.raises(UnavailableError, match="user 12345 made"):
        folders({"XDG_CACHE_HOME": str(home / "cache")}, root_user=False)
    (home / "round").symlink_to(home / "round")
    assert folders({"XDG_CACHE_HOME": str(home / "round")}, root_user=False)
    assert folders({"SUDO_UID": "12345"}, open_to_all / "x").state == open_to_all / "x/state"
    assert folders({}, home / "x").state == home / "x/state", "a closed folder: its owner decides"
    assert folders({"XDG_DATA_HOME": str(home / "x")}, root_user=False).data == home / "x/edgellm"
    assert folders({}, open_to_all / "mine").state == open_to_all / "mine/state"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules of another user, as /tmp may be; returns what they would write."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.chdir(tmp_path)
    ran = tmp_path / "ran"
    for name in ("edge", "pip", "runpy", "typer", "httpx", "h2", "sitecustomize"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\n")
    return ran


def test_a_command_of_ours_imports_nothing_from_the_current_folder(planted: Path) -> None:
    consent._run(["model", "list", "--json"], planted.parent / "state")
    assert (
        subprocess.run([*pip_command(), "--version"], check=True, capture_output=True, text=True).stdout[:4] == "pip "
    )
    arguments = subprocess.run([*module_command("json.tool"), "-h"], check=True, capture_output=True, text=True).stdout
    assert "infile" in arguments
    assert not planted.exists(), planted.read_text()
