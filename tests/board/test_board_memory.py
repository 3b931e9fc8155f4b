"""What is available is MemAvailable within the limits that hold here, and nothing else."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.board import memory
from edge.board.memory import assumed, snapshot
from edge.board.named import board_by_id
from edge.board.probe import probe
from edge.units import GIB, MIB
from tests.trees.trees import copy, tree, write

KIB = 1024


def test_fc17_a_full_page_cache_gives_the_same_answer_as_an_empty_one(tmp_path: Path) -> None:
    root = copy("orin-nano-8", tmp_path)
    readings = []
    for free, cached in ((300_000, 5_500_000), (5_800_000, 100_000)):
        lines = f"MemTotal: 7969177 kB\nMemFree: {free} kB\nMemAvailable: 6501171 kB\nCached: {cached} kB\n"
        write(root, "proc/meminfo", lines)
        readings.append(snapshot(root, probe(root)))
    assert readings[0] == readings[1]
    assert readings[0].available_bytes == {"unified": 6501171 * KIB}


def test_fc17_without_memavailable_the_estimate_is_said_and_below_free_plus_cache(tmp_path: Path) -> None:
    root = copy("orin-nano-8", tmp_path)
    write(root, "proc/meminfo", "MemTotal: 7969177 kB\nMemFree: 300000 kB\nCached: 5500000 kB\nShmem: 100000 kB\n")
    reading = snapshot(root, probe(root))
    assert 300_000 * KIB < reading.available_bytes["unified"] < 5_700_000 * KIB
    assert any("MemAvailable" in note for note in reading.notes)


def test_swap_is_shown_and_never_counted() -> None:
    root = tree("agx-orin-64")
    reading = snapshot(root, probe(root))
    assert reading.swap_bytes == 32174808 * KIB
    assert reading.available_bytes["unified"] == 58720256 * KIB


def test_memory_given_by_hand_replaces_what_is_available() -> None:
    root = tree("orin-nano-8")
    reading = snapshot(root, probe(root), available_bytes=4 * GIB)
    assert reading.available_bytes == {"unified": 4 * GIB}
    assert reading.total_bytes == {"unified": 7802736 * KIB}


def test_cgroup_v2_limit_counts_and_its_file_cache_is_free(tmp_path: Path) -> None:
    root = copy("x86-vm", tmp_path)
    write(root, "proc/self/cgroup", "0::/system.slice/edgellm.service\n")
    unit = "sys/fs/cgroup/system.slice/edgellm.service"
    write(root, f"{unit}/memory.max", f"{4 * GIB}\n")
    write(root, f"{unit}/memory.current", f"{3 * GIB}\n")
    write(root, f"{unit}/memory.stat", f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n")
    write(root, "sys/fs/cgroup/memory.max", "max\n")
    reading = snapshot(root, probe(root))
    assert reading.total_bytes["host"] == 4 * GIB
    assert reading.available_bytes["host"] == 4 * GIB - 3 * GIB // 2
    assert any("cgroup v2 /system.slice/edgellm.service" in note for note in reading.notes)


def test_memory_high_bounds_a_plan_as_memory_max_does(tmp_path: Path) -> None:
    """Above memory.high the kernel throttles the group (ollama/ollama#15474)."""
    root = copy("x86-vm", tmp_path)
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", "max\n")
    write(root, "sys/fs/cgroup/memory.high", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file 0\nactive_file 0\n")
    reading = snapshot(root, probe(root))
    assert (reading.total_bytes["host"], reading.available_bytes["host"]) == (4 * GIB, 3 * GIB)
    assert any("(memory.high) allows 4.0 GiB" in note for note in reading.notes)
    write(root, "sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    assert snapshot(root, probe(root)).total_bytes["host"] == 2 * GIB


def test_cgroup_v2_limit_of_a_parent_counts_too(tmp_path: Path) -> None:
    root = copy("x86-vm", tmp_path)
    write(root, "proc/self/cgroup", "0::/user.slice/session.scope\n")
    write(root, "sys/fs/cgroup/user.slice/memory.max", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/user.slice/memory.current", "0\n")
    assert snapshot(root, probe(root)).available_bytes["host"] == 2 * GIB


def test_cgroup_v1_limit_in_a_container_whose_path_is_not_visible(tmp_path: Path) -> None:
    root = copy("x86-vm", tmp_path)
    write(root, "proc/self/cgroup", "4:memory:/docker/0123\n2:cpu,cpuacct:/docker/0123\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{600 * MIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n")
    reading = snapshot(root, probe(root))
    assert reading.available_bytes["host"] == GIB - 500 * MIB
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert snapshot(root, probe(root)).available_bytes["host"] > 20 * GIB


def test_gpu_memory_is_a_domain_of_its_own() -> None:
    root = tree("rtx-4090")
    reading = snapshot(root, probe(root))
    uuid = "GPU-11111111-2222-3333-4444-555555555555"
    assert reading.available_bytes == {"host": 27262976 * KIB, uuid: 23506 * MIB}
    assert reading.total_bytes[uuid] == 24564 * MIB


def test_gpu_whose_driver_does_not_tell_is_left_out_and_named(tmp_path: Path) -> None:
    root = copy("rtx-4090", tmp_path)
    (root / "nvidia-smi.csv").unlink()
    board = probe(root)
    assert [gpu.name for gpu in board.gpus] == ["NVIDIA GeForce RTX 4090"]
    assert board.driver == "570.133.07"
    reading = snapshot(root, board)
    assert set(reading.available_bytes) == {"host"}
    assert any("RTX 4090" in note for note in reading.notes)


def test_named_board_has_an_assumed_headless_memory() -> None:
    nano, thor = assumed(board_by_id("orin-nano-8")), assumed(board_by_id("thor"))
    # Measured on a headless Orin Nano: 6245596 kB available.
    assert abs(nano.available_bytes["unified"] - 6245596 * KIB) < 0.03 * 6245596 * KIB
    assert 115 * GIB < thor.available_bytes["unified"] < thor.total_bytes["unified"]
    given = assumed(board_by_id("cuda-24"), 8 * GIB)
    assert given.available_bytes["host"] == 8 * GIB
    assert given.available_bytes["GPU-0"] > 23 * GIB


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300))
def test_meminfo_reads_any_text(text: str) -> None:
    values = memory.parse(text)
    available, _ = memory.mem_available_bytes(values)
    assert all(value >= 0 for value in values.values())
    assert available >= 0
