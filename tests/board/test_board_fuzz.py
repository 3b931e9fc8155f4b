"""Whatever lies in the files, the probe answers: a board that cannot be read must not stop a start."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.board import jetson
from edge.board.memory import snapshot
from edge.board.probe import expand, probe
from edge.board.tables import table
from edge.doctor.doctor import examine, read_facts
from edge.telemetry.document import sample_document
from edge.telemetry.sysfs import SysfsSource
from tests.doctor.patients import places
from tests.trees.trees import copy, write

FILES = (
    *("proc/cpuinfo", "proc/meminfo", "proc/version", "proc/self/cgroup", "proc/self/mountinfo", "proc/swaps"),
    *("proc/driver/nvidia/version", "proc/driver/nvidia/gpus/0/information", "nvidia-smi.csv", "proc/vmstat"),
    *("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "sys/fs/cgroup/cpu.max"),
    *("sys/fs/cgroup/memory/memory.stat", "sys/devices/system/cpu/online", "sys/kernel/nvpmodel_clk_cap/emc"),
    *("sys/devices/system/cpu/cpu0/topology/core_cpus_list", "sys/class/thermal/thermal_zone0/temp"),
    *("sys/firmware/devicetree/base/compatible", "etc/nv_tegra_release", "etc/nvpmodel.conf"),
    *("var/lib/nvpmodel/status", "var/lib/dpkg/status", "etc/passwd", "etc/group", "etc/fstab"),
    *("usr/local/cuda-12.6/version.json", "mnt/c/Users/x/.wslconfig", "proc/1/status", "sys/class/block/vda/dev"),
)
MACHINES = {
    "nothing": {},
    "jetson": {
        "sys/firmware/devicetree/base/compatible": b"nvidia,p3767-0005\0nvidia,tegra234\0",
        "proc/meminfo": b"MemTotal: 7802736 kB\nMemAvailable: 6245596 kB\n",
        "proc/cpuinfo": b"processor: 0\nFeatures: asimd\n",
    },
    "wsl2": {"proc/version": b"Linux version 5.15 microsoft-standard-WSL2", "dev/dxg": b""},
    "card": {"proc/driver/nvidia/gpus/0/information": b"Model: NVIDIA X\nGPU UUID: GPU-a\n", "proc/meminfo": b""},
}
WORDS = st.sampled_from(
    [
        "0",
        "-1",
        "9" * 400,
        "9" * 5000,
        "max",
        "kB",
        ":",
        "=",
        ",",
        "-",
        " ",
        "\n",
        "\t",
        "\x00",
        "MemTotal",
        "processor",
        "Features",
        "0::/",
        "4:memory:/",
        "nvidia,tegra234\x00",
        "p3767-0005",
        "MIG",
        "[N/A]",
        "R36 (release), REVISION:",
        "inactive_file",
        " - ext4 /dev/vda1",
        "{}",
        "[",
        "99999999999999999999",
        "4.7",
        "index, uuid, name",
        "²",
        "1 2 3:4 / / rw",
    ]
)
GARBAGE = st.one_of(st.binary(max_size=80), st.lists(WORDS, max_size=12).map(lambda words: "".join(words).encode()))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FILES), GARBAGE, max_size=8), st.sampled_from(list(MACHINES)))
def test_garbage_in_any_file_is_no_error(files: dict[str, bytes], base: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, data in (MACHINES[base] | files).items():
            write(root, name, data)
        board = probe(root)
        reading = snapshot(root, board)
        assert all(value >= 0 for value in reading.available_bytes.values())
        assert board.cpu.physical_cores >= 1
        assert examine(read_facts(root, places(Path(folder)), {}, {}, measure=False))


@pytest.mark.parametrize("name", ["orin-nano-8", "rtx-4090", "x86-vm"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_any_length_in_any_file_are_no_error(name: str, digits: int, tmp_path: Path) -> None:
    """400 digits overflow a float, int() refuses 4300: in one file at a time, all of its numbers and only the first."""
    root = copy(name, tmp_path)
    for file in sorted(root.rglob("*")):
        before = b"" if file.is_symlink() or not file.is_file() else file.read_bytes()
        if b"\0" in before or not re.search(rb"\d", before):
            continue
        for count in (0, 1):
            file.write_bytes(re.sub(rb"\d+", b"9" * digits, before, count=count))
            board = probe(root)
            snapshot(root, board)
            json.dumps(sample_document(SysfsSource(root, board).read(0.0), 1.0), allow_nan=False)
            assert examine(read_facts(root, places(tmp_path), {}, {}, measure=False)), file
        file.write_bytes(before)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_every_release_has_a_neighbour_that_is_not_newer_in_its_major(version: list[int]) -> None:
    found = jetson.identify(".".join(map(str, version)), None, table().releases)
    assert found.jetpack is not None
    taken = next(release for release in table().releases if release.jetpack == found.jetpack)
    majors = {release.version[0] for release in table().releases}
    if version[0] in majors:
        assert taken.version[0] == version[0]
    assert (found.note is None) == (tuple([*version, 0, 0][:3]) in {r.version for r in table().releases})


@given(st.sets(st.integers(0, 300), max_size=20))
def test_cpu_lists_are_read_back(numbers: set[int]) -> None:
    assert expand(",".join(map(str, sorted(numbers)))) == numbers


@given(st.text(max_size=60), st.text(max_size=60))
def test_power_state_reads_any_text(status: str, conf: str) -> None:
    jetson.active(status, conf)
    jetson.modes(conf)
