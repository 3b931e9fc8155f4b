"""Device nodes of every kind of board, on copied trees; who may open them; and for how long one waits (FC-74)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.board import device_nodes
from edge.board.board import Board, Cpu, Gpu, only_gpus, visible
from edge.board.probe import probe
from edge.errors import ConfigError
from tests.trees.trees import copy, write

CPU = Cpu("x", 4, 4)
DISCRETE = Board("x86_64", "box", None, "9.0", 1 << 35, False, CPU, (Gpu("H", "GPU-1"),))


@pytest.mark.parametrize(
    "name", ["orin-nano-8", "agx-orin-64", "agx-orin-64-jp5", "xavier-nx", "thor", "rtx-4090", "wsl2"]
)
def test_fc74_a_board_is_ready_when_its_nodes_open(name: str, tmp_path: Path) -> None:
    root = copy(name, tmp_path)
    board = probe(root)
    for node in ("nvmap", "nvhost-ctrl-gpu", "nvgpu/igpu0/ctrl", "nvidia0", "nvidiactl", "dxg"):
        (root / "dev" / node).unlink(missing_ok=True)
    found = device_nodes.check_nodes(board, root)
    assert not found.ready and found.sentence.endswith("is not there") and found.hint
    needed = {
        "wsl2": ["dxg"],
        "rtx-4090": ["nvidiactl", "nvidia0"],
        "thor": ["nvidia0"],
    }.get(name, ["nvmap", "nvhost-ctrl-gpu"])
    for node in needed:
        assert not device_nodes.check_nodes(board, root).ready
        write(root, f"dev/{node}", "")
    found = device_nodes.check_nodes(board, root)
    assert found.ready
    expected = {
        "wsl2": "/dev/dxg opens",
        "rtx-4090": "/dev/nvidiactl opens; the driver lists NVIDIA GeForce RTX 4090",
        "thor": "/dev/nvidia0 may be opened",
    }
    assert found.evidence == expected.get(name, "/dev/nvhost-ctrl-gpu opens"), "what was not tried is not claimed"


def test_the_newer_name_of_the_same_gpu(tmp_path: Path) -> None:
    root = copy("orin-nano-8", tmp_path)
    (root / "dev/nvhost-ctrl-gpu").unlink(missing_ok=True)
    write(root, "dev/nvmap", "")
    write(root, "dev/nvgpu/igpu0/ctrl", "")
    assert device_nodes.check_nodes(probe(root), root).evidence == "/dev/nvgpu/igpu0/ctrl opens"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_node_that_this_user_may_not_open_is_named_with_its_cure(short_dir: Path) -> None:
    root = copy("orin-nano-8", short_dir)
    short_dir.chmod(0o755)
    for node in ("nvmap", "nvhost-ctrl-gpu"):
        write(root, f"dev/{node}", "").chmod(0o440)
    board = probe(root)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        found = device_nodes.check_nodes(board, root)
        os._exit(0 if not found.ready and "may not open" in found.sentence and "video" in found.hint else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_patience_is_for_the_time_after_boot(tmp_path: Path) -> None:
    write(tmp_path, "proc/uptime", "12.50 20.00\n")
    assert device_nodes.wait_limit_s(tmp_path) == device_nodes.WAIT_S
    write(tmp_path, "proc/uptime", "90000.00 20.00\n")
    assert device_nodes.wait_limit_s(tmp_path) == device_nodes.WAIT_LATER_S
    assert device_nodes.wait_limit_s(tmp_path / "nowhere") == device_nodes.WAIT_S


def test_a_discrete_gpu_on_the_bus_without_a_driver_is_late_soon_after_boot_only(tmp_path: Path) -> None:
    board = Board("x86_64", "box", None, None, 1 << 35, False, CPU)
    write(tmp_path, "proc/uptime", "12.50 20.00\n")
    assert not device_nodes.driver_pending(board, tmp_path)
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    assert device_nodes.driver_pending(board, tmp_path)
    assert not device_nodes.driver_pending(DISCRETE, tmp_path), "its driver answers"
    write(tmp_path, "proc/uptime", "90000.00 20.00\n")
    assert not device_nodes.driver_pending(board, tmp_path)


def two() -> Board:
    gpus = (
        Gpu("B", "GPU-bbb", 1, "0000:02:00.0", compute_capability="9.0"),
        Gpu("A", "GPU-aaa", 0, "0000:01:00.0", compute_capability="9.0"),
    )
    return Board("x86_64", "box", None, "9.0", 1 << 35, False, CPU, gpus)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ["B", "A"]),
        ("0", ["A"]),
        ("1,0", ["B", "A"]),
        ("GPU-b", ["B"]),
        ("0,7,1", ["A"]),
        ("GPU-", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("A", []),
        ("0,A,1", ["A"]),
    ],
)
def test_cuda_visible_devices_of_our_environment(value: str | None, names: list[str]) -> None:
    """In PCI order, whole or cut UUIDs; what is no GPU ends the list, as in CUDA, which takes no names."""
    found = visible(two(), value)
    assert [gpu.name for gpu in found.gpus] == names
    assert (found.refused is not None) == (not names)


def test_a_board_without_gpus_has_none_to_hide() -> None:
    board = Board("x86_64", "box", None, None, 1 << 35, False, CPU)
    assert visible(board, "") == board


def test_hidden_gpus_are_named_and_the_newest_visible_one_counts() -> None:
    board = replace(two(), gpus=(replace(two().gpus[0], compute_capability="3.5"), two().gpus[1]))
    found = visible(board, "GPU-b")
    assert (found.compute_capability, found.notes) == ("3.5", ("CUDA_VISIBLE_DEVICES hides A",))
    assert visible(board, "1,0").compute_capability == "9.0", "an old card beside a new one decides nothing"


@pytest.mark.parametrize(
    ("selectors", "names"),
    [((), ["B", "A"]), (("1",), ["B"]), (("GPU-a",), ["A"]), (("a", "B"), ["B", "A"]), (("0", "GPU-aaa"), ["A"])],
)
def test_gpus_are_chosen_by_uuid_index_or_name(selectors: tuple[str, ...], names: list[str]) -> None:
    assert [gpu.name for gpu in only_gpus(two(), selectors).gpus] == names


def named(*names: str) -> Board:
    gpus = tuple(Gpu(name, f"GPU-{i}0", i, f"0000:0{i + 1}:00.0") for i, name in enumerate(names))
    return replace(two(), gpus=gpus)


RTX = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA RTX A4000 16GB")


@pytest.mark.parametrize(
    ("selector", "indexes"),
    [
        ("4090", [1]),
        ("RTX 4090", [1]),
        ("rtx 4090", [1]),
        ("GeForce", [0, 1]),
        ("A4000", [2]),
        ("4000", [2]),
        ("2", [2]),
        (" 1 ", [1]),
        ("GPU-10", [1]),
        ("16", [2]),
        ("40", []),
        ("409", []),
        ("3", []),
        ("00", [0]),
    ],
)
def test_a_number_is_an_index_that_exists_or_a_number_in_a_name(selector: str, indexes: list[int]) -> None:
    board = named(*RTX)
    if indexes:
        assert [gpu.index for gpu in only_gpus(board, (selector,)).gpus] == indexes
    else:
        with pytest.raises(ConfigError, match=f"no GPU is '{selector}'") as caught:
            only_gpus(board, (selector,))
        assert "1: NVIDIA GeForce RTX 4090 (GPU-10)" in (caught.value.hint or "")


def test_an_index_wins_over_a_number_in_a_name() -> None:
    board = named("Tesla 1", "Tesla 0", "Tesla 7")
    assert [gpu.index for gpu in only_gpus(board, ("1",)).gpus] == [1]
    assert [gpu.index for gpu in only_gpus(board, ("7", "0")).gpus] == [0, 2]
    hidden = visible(board, "0")
    assert [gpu.name for gpu in hidden.gpus] == ["Tesla 1"]
    assert [gpu.name for gpu in only_gpus(hidden, ("1",)).gpus] == ["Tesla 1"], "the only one that is visible"


@pytest.mark.parametrize("selector", ["7", "GPU-x", "RTX 4090", ""])
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(selector: str) -> None:
    with pytest.raises(ConfigError, match="no GPU is") as caught:
        only_gpus(two(), ("0", selector))
    assert "0: A (GPU-aaa)" in (caught.value.hint or "")
