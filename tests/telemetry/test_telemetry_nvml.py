"""Discrete GPUs through the real nvidia-ml-py, over a library that answers from a file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from edge.telemetry.nvml import REOPEN_S
from edge.telemetry.sample import Sample, plausible
from tests.fakes.nvml.library import build

H200 = "GPU-aaaa NVIDIA-H200 412345 61 97 90000000000 150000000000 1755 0"
SECOND = "GPU-bbbb NVIDIA-H200 300000 58 40 1000 150000000000 1980 4"

# Runs where LD_LIBRARY_PATH has the library: reads a script of states from argv, prints what the source made of each.
PROGRAM = """
import json, os, sys
from msgspec import to_builtins
from pathlib import Path
from edge.telemetry.nvml import NvmlSource
source = NvmlSource(**json.loads(sys.argv[1]))
for number, state in enumerate(json.loads(sys.argv[2])):
    Path(os.environ["FAKE_NVML"]).write_text(state)
    try:
        print(json.dumps(to_builtins(source.read(float(number)))))
    except Exception as error:
        print(json.dumps({"error": type(error).__name__}))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def read(library: Path, *states: str, program: str = PROGRAM, **options: Any) -> list[dict[str, Any]]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(library / "state")}
    (library / "state").write_text(states[0])
    command = [sys.executable, "-c", program, json.dumps(options), json.dumps(states)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_gpu_by_uuid(library: Path) -> None:
    (sample,) = read(library, H200)
    (gpu,) = sample["gpus"]
    assert (gpu["uuid"], gpu["power_w"], gpu["load_ratio"], gpu["clock_hz"]) == ("GPU-aaaa", 412.345, 0.97, 1755e6)
    assert (gpu["memory_used_bytes"], gpu["memory_total_bytes"]) == (90_000_000_000, 150_000_000_000)
    assert sample["power"]["rail"] == "GPU"
    assert sample["power"]["power_w"] == 412.345
    assert "host is not measured" in sample["power"]["note"]
    assert sample["zones"] == [{"name": "GPU-aaaa", "temp_c": 61, "passive_c": 92, "critical_c": 98, "limits": True}]


def test_several_gpus_are_summed(library: Path) -> None:
    both = f"{H200}\n{SECOND}\n"
    assert read(library, both)[0]["power"]["power_w"] == pytest.approx(712.345)
    assert read(library, both)[0]["throttled"] == ["gpu-power-cap"]


def test_what_a_gpu_does_not_tell_is_absent_and_so_is_the_sum(library: Path) -> None:
    silent = "GPU-cccc Orin -1 -1 -1 -1 -1 -1 -1"
    (sample,) = read(library, f"{H200}\n{silent}\n")
    assert sample["power"] is None
    gpu = sample["gpus"][1]
    assert {gpu[key] for key in ("load_ratio", "clock_hz", "temp_c", "power_w", "memory_used_bytes")} == {None}


def test_an_integrated_gpu_is_the_boards_gpu(library: Path) -> None:
    """Thor: joined with sysfs by having no UUID; its draw is a part of the board's, not the total."""
    (sample,) = read(library, H200, integrated=True)
    assert (sample["gpus"][0]["uuid"], sample["zones"][0]["name"], sample["power"]) == (None, "gpu", None)


def test_a_lost_gpu_fails_and_is_found_again(library: Path) -> None:
    assert [row.get("error", "ok") for row in read(library, H200, f"lost\n{H200}", H200)] == [
        "ok",
        "NVMLError_GpuIsLost",
        "ok",
    ]


@pytest.mark.parametrize("mark", ["hidden", "gone"])
def test_a_gpu_that_does_not_answer_costs_only_itself(library: Path, mark: str) -> None:
    """One that fell off the bus refuses its handle, or every question; the others' values stay, the sum does not."""
    fault = library / f"state.{mark}.GPU-bbbb"
    fault.touch()
    try:
        (sample,) = read(library, f"{H200}\n{SECOND}\n")
        assert [gpu["uuid"] for gpu in sample["gpus"]] == ["GPU-aaaa"]
        assert (sample["gpus"][0]["power_w"], sample["power"]) == (412.345, None)
        assert [note.partition(" does not answer: ")[2] for note in sample["notes"]] == ["GPU is lost"]
        rows = read(library, f"{SECOND}\n")
        assert rows == [{"error": "NVMLError_GpuIsLost"}], "the only GPU"
    finally:
        fault.unlink()


def test_a_gpu_that_came_back_is_found_again(library: Path) -> None:
    (library / "state.gone.GPU-bbbb").touch()
    both = f"{H200}\n{SECOND}\n"
    try:
        late = [both] * (int(REOPEN_S) + 2)
        program = PROGRAM.replace(
            "    try:", "    if number == 1: Path(os.environ['FAKE_NVML'] + '.gone.GPU-bbbb').unlink()\n    try:", 1
        )
        rows = read(library, *late, program=program)
    finally:
        (library / "state.gone.GPU-bbbb").unlink(missing_ok=True)
    assert [len(row["gpus"]) for row in rows] == [1] * int(REOPEN_S) + [2, 2]
    assert rows[-1]["power"]["power_w"] == pytest.approx(712.345)


def test_a_gpu_without_a_name_is_read(library: Path) -> None:
    (library / "state.nameless.GPU-aaaa").touch()
    try:
        (sample,) = read(library, H200)
    finally:
        (library / "state.nameless.GPU-aaaa").unlink()
    assert (sample["gpus"][0]["name"], sample["power"]["power_w"]) == ("NVIDIA GPU", 412.345)


def test_values_of_a_driver_that_no_machine_has_are_absent(library: Path) -> None:
    """All ones in 32 and in 64 bits stand for unknown in the driver's own structures."""
    ones = f"GPU-aaaa NVIDIA-H200 {2**32 - 1} 61 {2**32 - 1} 1000 {2**63 - 1} {2**32 - 1} 0"
    (raw,) = read(library, ones)
    found = plausible(convert(raw, Sample))
    (gpu,) = found.gpus
    assert (gpu.temp_c, gpu.memory_used_bytes) == (61, 1000)
    assert {gpu.power_w, gpu.load_ratio, gpu.clock_hz, gpu.memory_total_bytes, found.power} == {None}


def test_without_a_driver_it_says_so() -> None:
    command = [sys.executable, "-c", PROGRAM, "{}", json.dumps([""])]
    env = {**os.environ, "FAKE_NVML": os.devnull}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["error"].startswith("NVMLError_")
