"""Layers on other boards: when they are used, how they are divided, and which rpc-servers a plan is made without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.config.devices import DeviceConfig
from edge.config.values import ModelConfig, Preset, Profile
from edge.engine.engine import Engine, Flag
from edge.errors import ConfigError, DoesNotFitError, EngineMissingError, RemoteMissingError
from edge.linux import rpc
from edge.linux.rpc import DeviceMemory
from edge.paths import folders
from edge.plan.argv import EnvFacts
from edge.plan.inputs import candidate_of
from edge.plan.plan import LaunchPlan, Plan
from edge.plan.planner import Extras, make_plan
from edge.plan.remotes import Remotes, find_remotes
from edge.units import GIB
from tests.plan import shapes

FIRST, SECOND = "10.0.0.2:50052", "10.0.0.3:50052"
META = shapes.meta()  # 8 B parameters, 5.7 GB of weights


def engine(*, cuda: bool = False, rpc: bool = True) -> Engine:
    known = shapes.engine(cuda=cuda)
    return replace(known, rpc=rpc, flags=known.flags | {"--rpc": Flag("--rpc", 1)})


def remote(*gib: float, endpoint: str = FIRST) -> dict[str, tuple[DeviceMemory, ...]]:
    return {endpoint: tuple(DeviceMemory(int(size * GIB), int(size * 1.25 * GIB)) for size in gib)}


def planned(board: shapes.Board, servers: dict[str, tuple[DeviceMemory, ...]], **preset: Any) -> Plan:
    asked = Preset(**{"reserve": "512MiB", "kv_type_min": "f16", "n_ctx_min": 8192, "cache_ram": 0, **preset})
    models = {"chat": (candidate_of(shapes.model(header=META)), ModelConfig("chat", "m"))}
    memory = shapes.memory(board)
    cuda = bool(board.gpus)
    extras = Extras(remotes=Remotes(servers))
    return make_plan(board, memory, Profile("test", "", asked), engine(cuda=cuda), models, EnvFacts("/h", "/c"), extras)


def chosen(plan: Plan) -> LaunchPlan:
    ladder = plan.models["chat"].ladder
    return ladder.plans[ladder.chosen]


BOARDS = {
    "cpu": shapes.cpu_board(4),
    "jetson": shapes.jetson(4),
    "gpu": shapes.gpu_board(4.0),
}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_model_larger_than_this_board_gets_layers_on_another(board: shapes.Board) -> None:
    with pytest.raises(DoesNotFitError):
        planned(board, {})
    it = chosen(planned(board, remote(8.0)))
    assert it.fits and it.settings.rpc == (FIRST,)
    assert it.settings.devices[0] == "RPC0" and f"RPC0[{FIRST}]" in it.budget
    assert it.budget[f"RPC0[{FIRST}]"].weights_bytes > 0
    line = list(it.argv)
    assert line[line.index("--rpc") + 1] == FIRST
    assert line.index("--rpc") < line.index("--device"), "llama.cpp reads its options in their order"
    assert line[line.index("--device") + 1] == ",".join(it.settings.devices)
    assert any(reason.subject == "rpc" for reason in it.reasons)


@pytest.mark.parametrize("memory_gib", [16, 32])
def test_a_model_that_fits_alone_stays_on_its_board(memory_gib: int) -> None:
    for board in (shapes.cpu_board(memory_gib), shapes.jetson(memory_gib), shapes.gpu_board(float(memory_gib))):
        it = chosen(planned(board, remote(64.0)))
        assert it.settings.rpc == () and "--rpc" not in it.argv
        assert not any(name.startswith("RPC") for name in it.budget)


def test_the_local_gpu_is_last_and_cuda_sees_no_remote_one() -> None:
    it = chosen(planned(shapes.gpu_board(4.0), remote(8.0)))
    assert it.settings.devices == ("RPC0", "CUDA0")
    assert it.env["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert sum(it.settings.tensor_split) == META.n_layer + 1
    assert it.settings.n_gpu_layers == META.n_layer + 1


def test_a_cpu_keeps_the_layers_that_the_servers_do_not_hold() -> None:
    it = chosen(planned(shapes.cpu_board(6), remote(3.5), offload="none"))
    assert it.settings.devices == ("RPC0",)
    assert 0 < it.settings.n_gpu_layers <= META.n_layer
    assert it.budget["host"].weights_bytes > 0


def test_a_second_server_is_used_only_where_the_first_is_not_enough() -> None:
    board = shapes.cpu_board(3)
    both = remote(9.0) | remote(9.0, endpoint=SECOND)
    assert chosen(planned(board, both)).settings.rpc == (FIRST,)
    small = remote(5.0) | remote(5.0, endpoint=SECOND)
    it = chosen(planned(board, small))
    assert it.settings.rpc == (FIRST, SECOND) and it.settings.devices == ("RPC0", "RPC1")
    assert set(it.budget) == {"host", f"RPC0[{FIRST}]", f"RPC1[{SECOND}]"}


def test_devices_are_numbered_over_all_servers_as_llama_cpp_does() -> None:
    it = chosen(planned(shapes.cpu_board(3), remote(2.0, 2.0) | remote(5.0, endpoint=SECOND)))
    assert it.settings.devices == ("RPC0", "RPC1", "RPC2")
    assert f"RPC2[{SECOND}]" in it.budget


def test_one_server_serves_one_model() -> None:
    """rpc-server answers one client at a time: a second engine would wait for it without end."""
    board, servers = shapes.cpu_board(6), remote(64.0)
    models = {
        name: (candidate_of(shapes.model(name, META)), ModelConfig(name, name, priority=priority))
        for name, priority in (("first", 1), ("second", 0))
    }
    asked = Preset(reserve="512MiB", kv_type_min="f16", n_ctx_min=8192, cache_ram=0)
    with pytest.raises(DoesNotFitError, match="second"):
        make_plan(
            board,
            shapes.memory(board),
            Profile("test", "", asked),
            engine(),
            models,
            EnvFacts("/h", "/c"),
            Extras(remotes=Remotes(servers)),
        )


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(BOARDS)),
    st.lists(st.lists(st.floats(0.5, 12), min_size=1, max_size=2), min_size=1, max_size=3),
)
def test_no_domain_is_overcommitted_and_every_layer_has_one_place(name: str, sizes: list[list[float]]) -> None:
    servers: dict[str, tuple[DeviceMemory, ...]] = {}
    for number, row in enumerate(sizes):
        servers |= remote(*row, endpoint=f"10.0.0.{number + 2}:50052")
    try:
        it = chosen(planned(BOARDS[name], servers))
    except DoesNotFitError:
        return
    assert it.fits and it.settings.rpc == tuple(servers)[: len(it.settings.rpc)]
    if it.settings.tensor_split:
        assert sum(it.settings.tensor_split) == it.settings.n_gpu_layers
        assert len(it.settings.tensor_split) == len(it.settings.devices)
    weights = sum(domain.weights_bytes for domain in it.budget.values())
    assert weights >= META.tensor_bytes


# --- asking ----------------------------------------------------------------------------------------------------------

HALF_FREE = (DeviceMemory(4 * GIB, 8 * GIB),)
ON_A_CPU = (DeviceMemory(8 * GIB, 8 * GIB),)


def tunnel(**values: Any) -> DeviceConfig:
    return DeviceConfig(**{"rpc": "127.0.0.1:50052", **values})


@pytest.fixture(autouse=True)
def no_engine_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of this machine: another process may use the port of these tests."""
    monkeypatch.setattr(rpc, "connected", lambda *_: False)


def find(tmp_path: Path, device: DeviceConfig, ask: Any, *, here: bool = True, wait: bool = True) -> Remotes:
    return find_remotes([device], engine(), folders({}, tmp_path), here=here, wait=wait, ask=ask)


def missing(*, busy: bool = False) -> Any:
    def ask(host: str, port: int) -> tuple[DeviceMemory, ...]:
        raise RemoteMissingError(f"no rpc-server at {host}:{port}", "start it", busy=busy)

    return ask


def test_the_server_is_asked(tmp_path: Path) -> None:
    found = find(tmp_path, tunnel(), lambda *_: HALF_FREE)
    assert found.memory == {"127.0.0.1:50052": HALF_FREE} and found.all_notes == ()


def test_a_cpu_does_not_tell_what_is_free(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not tell what is free"):
        find(tmp_path, tunnel(), lambda *_: ON_A_CPU)
    stated = find(tmp_path, tunnel(memory=3 * GIB), lambda *_: ON_A_CPU)
    assert stated.memory["127.0.0.1:50052"][0].free_bytes == 3 * GIB


def test_stated_memory_is_divided_over_the_devices_of_a_server(tmp_path: Path) -> None:
    two = (DeviceMemory(GIB, 2 * GIB), DeviceMemory(GIB, 6 * GIB))
    found = find(tmp_path, tunnel(memory=4 * GIB), lambda *_: two).memory["127.0.0.1:50052"]
    assert [device.free_bytes for device in found] == [GIB, 3 * GIB]


def test_a_server_that_does_not_answer_is_waited_for_or_left_out_and_named(tmp_path: Path) -> None:
    with pytest.raises(RemoteMissingError) as waited:
        find(tmp_path, tunnel(), missing())
    assert waited.value.patience_s > 0 and waited.value.kind == "remote_missing"
    for found in (
        find(tmp_path, tunnel(absent="without"), missing()),
        find(tmp_path, tunnel(), missing(), wait=False),
    ):
        assert found.memory == {} and found.absent[0].endpoint == "127.0.0.1:50052"
        assert "planned without the rpc-server" in found.all_notes[0]


def test_a_busy_server_counts_with_its_last_answer(tmp_path: Path) -> None:
    """It serves an engine, this board's own before a reload as a rule."""
    with pytest.raises(RemoteMissingError):
        find(tmp_path, tunnel(), missing(busy=True))
    find(tmp_path, tunnel(), lambda *_: HALF_FREE)
    found = find(tmp_path, tunnel(), missing(busy=True))
    assert found.memory == {"127.0.0.1:50052": HALF_FREE} and "last answer" in found.all_notes[0]


def test_another_machines_plan_asks_nothing(tmp_path: Path) -> None:
    found = find(tmp_path, tunnel(memory=GIB), missing(), here=False)
    assert found.memory["127.0.0.1:50052"][0].free_bytes == GIB
    assert find(tmp_path, tunnel(), missing(), here=False).memory == {}


def test_an_address_that_is_reached_over_another_interface_is_refused(tmp_path: Path) -> None:
    device = DeviceConfig(rpc="10.0.0.2:50052", interface="nosuch0")
    with pytest.raises(ConfigError, match="nosuch0 has no IPv4 address"):
        find(tmp_path, device, lambda *_: HALF_FREE)
    with pytest.raises(ConfigError, match="not reached over lo"):
        find(tmp_path, replace(device, interface="lo"), lambda *_: HALF_FREE)


@pytest.mark.parametrize("kind", ["embedded", "llama-server"])
def test_an_engine_without_rpc_is_refused_with_the_command_to_build_one(tmp_path: Path, kind: str) -> None:
    lacking = replace(engine(rpc=False), kind=kind)
    with pytest.raises(EngineMissingError, match="RPC") as refused:
        find_remotes([tunnel()], lacking, folders({}, tmp_path), here=True, wait=True)
    assert "edgellm build --rpc" in str(refused.value.hint)
    assert find_remotes([], lacking, folders({}, tmp_path), here=True, wait=True) == Remotes()
