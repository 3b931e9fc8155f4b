"""Engines and models of a service: copied or linked, verified; nothing that other users can change is run."""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
from hashlib import sha256
from pathlib import Path

import pytest

from edge.engine.engine import Engine
from edge.engine.installed import ids, manifest, read_selection
from edge.errors import BadDataError, ConfigError, UsageError
from edge.models.open import open_model
from edge.models.store import Store
from edge.paths import folders
from edge.service.contents import Contents, check_engine_path, has_engine, has_model, install_engine, install_model
from edge.service.request import InstallRequest
from edge.service.takeover import OfflineBundle
from edge.service.units import UnitSettings
from tests.fakes.gguf_writer import Gguf, save_set
from tests.models.test_models_install import damage

SERVER = b"#!/bin/sh\necho llama-server\n"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """engines/ of a user, with one engine."""
    engines = tmp_path / "user/engines"
    (engines / "abc-cpu-1/bin").mkdir(parents=True)
    (engines / "abc-cpu-1/bin/llama-server").write_bytes(SERVER)
    files = {"bin/llama-server": {"sha256": sha256(SERVER).hexdigest(), "bytes": len(SERVER)}}
    document = {
        "schema": 1,
        "id": "abc-cpu-1",
        "kind": "llama-server",
        "source": {"commit": "abc"},
        "recipe": {"name": "cpu"},
        "target": {"machine": os.uname().machine},
        "flags": {},
        "proof": {"devices": []},
        "files": files,
    }
    (engines / "abc-cpu-1/engine.json").write_text(json.dumps(document))
    return engines


def test_an_engine_is_copied_verified_and_selected(built: Path, tmp_path: Path) -> None:
    target = tmp_path / "system/engines"
    assert not has_engine("abc-cpu-1", built, target)
    install_engine("abc-cpu-1", built, target)
    assert has_engine("abc-cpu-1", built, target)
    assert read_selection(target).current == "abc-cpu-1"
    copied = target / "abc-cpu-1/bin/llama-server"
    assert copied.read_bytes() == SERVER
    assert copied.stat().st_ino != (built / "abc-cpu-1/bin/llama-server").stat().st_ino  # its owner could write to it
    install_engine("abc-cpu-1", built, target)
    assert [entry.name for entry in target.iterdir() if not entry.name.startswith(".")].count("abc-cpu-1") == 1


@pytest.mark.parametrize("mode", [0o4755, 0o6777, 0o777])
def test_no_mode_of_an_engines_former_owner_is_kept(built: Path, tmp_path: Path, mode: int) -> None:
    """The copy is root's: with the bit of setuid(2) each user would run it as root, others could write to it."""
    (built / "abc-cpu-1/bin/llama-server").chmod(mode)
    install_engine("abc-cpu-1", built, tmp_path / "engines")
    assert (tmp_path / "engines/abc-cpu-1/bin/llama-server").stat().st_mode & 0o7777 == 0o755


def test_an_engine_that_was_changed_is_refused(built: Path, tmp_path: Path) -> None:
    (built / "abc-cpu-1/bin/llama-server").write_bytes(b"#!/bin/sh\necho something\n")
    target = tmp_path / "system/engines"
    with pytest.raises(BadDataError, match="not what its manifest says"):
        install_engine("abc-cpu-1", built, target)
    assert read_selection(target).current is None
    document = manifest(built, "abc-cpu-1")
    document["files"] = {"../../../etc/x": {"sha256": "", "bytes": 0}}
    (built / "abc-cpu-1/engine.json").write_text(json.dumps(document))
    with pytest.raises(BadDataError, match="lists"):
        install_engine("abc-cpu-1", built, target)


def test_an_engine_path_that_others_can_change_is_refused(tmp_path: Path) -> None:
    for path in ("/home/ann/llama.cpp/build/bin/llama-server", "/tmp/llama-server", "/root/llama-server"):
        with pytest.raises(UsageError, match="cannot see"):
            check_engine_path(Engine("x", "llama-server", path))
    check_engine_path(Engine("x", "llama-server", os.path.realpath("/bin/sh")))


def test_a_model_is_linked_where_that_is_safe_and_copied_elsewhere(smollm2: Path, tmp_path: Path) -> None:
    mine = tmp_path / "user"
    mine.mkdir()
    (mine / smollm2.name).write_bytes(smollm2.read_bytes())
    (mine / smollm2.name).chmod(0o644)
    file = open_model(mine / smollm2.name)
    linked, copied, shared = tmp_path / "linked", tmp_path / "copied", tmp_path / "shared"
    for models, owners in ((linked, {os.getuid()}), (copied, {987_654}), (shared, {os.getuid()})):
        if models == shared and os.geteuid() == 0:  # members of its group could change it after its hash was checked
            os.chown(file.path, -1, 12345)
            Path(file.path).chmod(0o664)
        assert not has_model(file, models)
        install_model(file, models, frozenset(owners))
        assert has_model(file, models)
    assert next(linked.glob("*/*.gguf")).stat().st_ino == (mine / smollm2.name).stat().st_ino
    assert next(shared.glob("*/*.gguf")).stat().st_nlink == 1 or os.geteuid() != 0
    assert next(copied.glob("*/*.gguf")).stat().st_ino != (mine / smollm2.name).stat().st_ino


def test_what_was_damaged_in_the_services_folders_is_not_installed_already(built: Path, tmp_path: Path) -> None:
    """With the right size and time: another shard than the first, the projector, an engine."""
    models, target = tmp_path / "models", tmp_path / "engines"
    shards = save_set(tmp_path / "user", "Big-Q5_K_M", 3)
    Gguf("clip").projector().save(tmp_path / "user" / "mmproj-F16.gguf")
    file = open_model(shards[0])
    install_model(file, models, frozenset())
    stored = Store(models).resolve("Big:Q5_K_M")
    for path in (stored.shards[1], stored.mmproj):
        assert path and has_model(file, models)
        damage(path)
        assert not has_model(file, models)
        install_model(file, models, frozenset())
    assert has_model(file, models) and len(Store(models).list()) == 2, "the model and its projector, once"
    install_engine("abc-cpu-1", built, target)
    damage(target / "abc-cpu-1/bin/llama-server")
    assert not has_engine("abc-cpu-1", built, target)
    install_engine("abc-cpu-1", built, target)
    assert (target / (read_selection(target).current or "") / "bin/llama-server").read_bytes() == SERVER
    assert has_engine("abc-cpu-1", built, target), "the one that replaced it is done"
    install_engine("abc-cpu-1", built, target)
    assert len(ids(target)) == 2
    (tmp_path / "user" / "mmproj-F16.gguf").unlink()
    Gguf("clip").projector().set("general.description", "another").save(tmp_path / "user" / "mmproj-BF16.gguf")
    assert has_model(open_model(shards[0]), models), "another projector"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
def test_a_model_of_a_user_with_a_group_of_its_own_is_linked(tmp_path: Path) -> None:
    """Ubuntu's umask of 002 makes a model 0664."""
    try:
        user = next(each for each in pwd.getpwall() if each.pw_uid and grp.getgrnam(each.pw_name).gr_gid == each.pw_gid)
    except (StopIteration, KeyError):
        pytest.skip("no user has a group of its own")
    path = Gguf("llama").model().save(tmp_path / "user" / "m-Q5_K_M.gguf")
    os.chown(path, user.pw_uid, user.pw_gid)
    path.chmod(0o664)
    install_model(open_model(path), tmp_path / "models", frozenset({user.pw_uid}))
    assert path.stat().st_nlink == 2


def test_another_model_of_the_same_name_and_size_is_not_taken_for_this_one(tmp_path: Path) -> None:
    models = tmp_path / "models"
    path = Gguf("llama").model().save(tmp_path / "user" / "m-Q5_K_M.gguf")
    install_model(open_model(path), models, frozenset())
    damage(path)  # trained on: the same header
    os.utime(path)
    assert not has_model(open_model(path), models)
    with pytest.raises(BadDataError, match="another model") as caught:
        install_model(open_model(path), models, frozenset())
    assert "model remove m:Q5_K_M" in (caught.value.hint or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file away")
def test_keys_that_others_could_write_are_closed_before_they_are_given_away(tmp_path: Path) -> None:
    request = InstallRequest(folders({}, tmp_path / "source"), run_as="nobody", root=tmp_path)
    path = tmp_path / "etc/edgellm/keys.toml"
    path.parent.mkdir(parents=True)
    path.write_text("schema = 1\n")
    path.chmod(0o664)
    for done in (False, True):
        step = Contents(request, UnitSettings(), None)._keys()
        assert step.done is done
        step.apply()
        assert (stat.S_IMODE(path.stat().st_mode), path.owner()) == (0o600, "nobody")


@pytest.mark.parametrize("kind", ["link", "fifo", "deep"])
def test_keys_of_an_offline_folder_show_no_file_of_roots(tmp_path: Path, kind: str) -> None:
    """The service's user reads what becomes its file of keys: /etc/shadow behind a link was copied for it."""
    (tmp_path / "models").mkdir()
    offered = tmp_path / "keys.toml"
    if kind == "link":
        (tmp_path / "shadow").write_text("root:$6$abc:1:0:99999:7:::\n")
        offered.symlink_to(tmp_path / "shadow")
    elif kind == "fifo":
        os.mkfifo(offered)
    else:
        offered.write_text("key = " + "[" * 100_000)
    request = InstallRequest(folders({}, tmp_path / "source"), root=tmp_path)
    with pytest.raises(ConfigError, match="is no file of keys"):
        Contents(request, UnitSettings(), OfflineBundle(tmp_path))._keys()
    offered.unlink()
    offered.write_text("schema = 1\n")
    assert Contents(request, UnitSettings(), OfflineBundle(tmp_path))._offered_keys() == "schema = 1\n"
