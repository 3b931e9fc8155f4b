"""Discrete GPUs through the real nvidia-ml-py, over a library that answers from a file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def read(library: Path, *states: str, **options: Any) -> list[dict[str, Any]]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(library / "state")}
    (library / "state").write_text(states[0])
    command = [sys.executable, "-c", PROGRAM, json.dumps(options), json.dumps(states)]
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


def test_several_gpus_are_summed_or_chosen(library: Path) -> None:
    both = f"{H200}\n{SECOND}\n"
    assert read(library, both)[0]["power"]["power_w"] == pytest.approx(712.345)
    assert read(library, both)[0]["throttled"] == ["gpu-power-cap"]
    (chosen,) = read(library, both, uuids=["GPU-aaaa"])
    assert chosen["power"]["parts"] == ["GPU-aaaa"]
    assert chosen["throttled"] == []


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


def test_without_a_driver_it_says_so() -> None:
    command = [sys.executable, "-c", PROGRAM, "{}", json.dumps([""])]
    env = {**os.environ, "FAKE_NVML": os.devnull}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["error"].startswith("NVMLError_")
