"""GPUs through NVML's C interface, with a compiled stand-in for the library (no NVIDIA driver here)."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from edge.board import nvidia, nvml
from tests.needs import compiler

SOURCE = Path(__file__).with_name("fake_nvml.c")
GIB = 2**30


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    cc = compiler("the stand-in for NVML cannot be built")
    out = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run([cc, "-shared", "-fPIC", "-w", "-o", str(out), str(SOURCE)], check=True)
    return str(out)


def _read(library: str, monkeypatch: pytest.MonkeyPatch, *rows: str) -> nvml.Reading | None:
    monkeypatch.setenv("FAKE_NVML", ";".join(rows))
    return nvml.read(("libnothing-here.so.1", library))


def test_two_gpus_by_uuid_with_free_memory(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = f"NVIDIA GeForce RTX 3090,GPU-aa,00000000:01:00.0,{24 * GIB},{23 * GIB},8,6,0"
    two = f"NVIDIA GeForce RTX 4090,GPU-bb,00000000:41:00.0,{24 * GIB},{20 * GIB},8,9,9"
    reading = _read(library, monkeypatch, one, two)
    assert reading is not None
    assert (reading.driver, reading.cuda, reading.source) == ("580.95.05", "13.0", "nvml")
    first, second = reading.gpus
    assert (first.gpu.uuid, first.gpu.pci_bus_id, first.free_bytes) == ("GPU-aa", "00000000:01:00.0", 23 * GIB)
    assert (second.gpu.name, second.gpu.memory_bytes, second.gpu.compute_capability) == (
        "NVIDIA GeForce RTX 4090",
        24 * GIB,
        "8.9",
    )
    assert not first.gpu.mig
    assert (first.persistence, second.persistence) == (False, True)
    assert reading.notes == ()


def test_a_library_without_some_entry_points_costs_what_they_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cc, old = compiler("the stand-in for NVML cannot be built"), tmp_path / "libnvidia-ml.so.1"
    subprocess.run([cc, "-DOLD", "-shared", "-fPIC", "-w", "-o", str(old), str(SOURCE)], check=True)
    reading = _read(str(old), monkeypatch, f"NVIDIA H200,GPU-cc,00000000:01:00.0,{(1 << 64) - 1},{GIB},9,0,0")
    assert reading is not None
    (found,) = reading.gpus
    assert (found.gpu.name, found.gpu.uuid, reading.cuda) == ("NVIDIA H200", "GPU-cc", "13.0")
    assert (found.gpu.compute_capability, found.persistence, reading.driver) == (None, None, "\ufffd580")
    assert (found.gpu.memory_bytes, found.free_bytes) == (None, None), "all ones stand for unknown"


def test_a_question_waits_for_the_one_that_hangs_and_not_for_long(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine's memory is asked for every few seconds: a driver that hangs would collect threads."""
    hang = tmp_path / "hang"
    hang.touch()
    monkeypatch.setenv("FAKE_NVML_HANG", str(hang))
    monkeypatch.setattr(nvml, "_ASKING_S", 0.01)
    first = threading.Thread(target=nvml.process_bytes, args=(1, (library,)))
    first.start()
    try:
        while first.is_alive() and not nvml._asking.locked():
            threading.Event().wait(0.001)
        assert nvml.process_bytes(1, (library,)) is None
        assert first.is_alive()
    finally:
        hang.unlink()
        first.join()


def test_mig_is_said_aloud(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = _read(library, monkeypatch, f"NVIDIA H200,GPU-cc,00000000:01:00.0,{141 * GIB},{140 * GIB},9,0,1")
    assert reading is not None
    assert reading.gpus[0].gpu.mig
    assert "MIG" in reading.notes[0]


def test_instances_of_mig_stand_in_for_their_card(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MIG", f"MIG-11,{12 * GIB},{11 * GIB};MIG-22,{24 * GIB},{23 * GIB}")
    reading = _read(library, monkeypatch, f"NVIDIA A100,GPU-cc,00000000:01:00.0,{80 * GIB},{79 * GIB},8,0,1")
    assert reading is not None
    found = [(each.gpu.uuid, each.gpu.memory_bytes, each.free_bytes, each.gpu.mig) for each in reading.gpus]
    assert found == [("MIG-11", 12 * GIB, 11 * GIB, False), ("MIG-22", 24 * GIB, 23 * GIB, False)]
    assert {each.gpu.compute_capability for each in reading.gpus} == {"8.0"}


def test_the_memory_of_one_process_over_all_gpus(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By it the bytes of a CUDA context are known: no log names them."""
    gpu = f"NVIDIA H200,GPU-cc,00000000:01:00.0,{141 * GIB},{140 * GIB},9,0,0"
    monkeypatch.setenv("FAKE_NVML", f"{gpu};{gpu}")
    monkeypatch.setenv("FAKE_PROCESSES", f"100,{GIB};200,{3 * GIB};300,{(1 << 64) - 1}")
    assert nvml.process_bytes(200, (library,)) == 3 * GIB
    assert nvml.process_bytes(300, (library,)) is None, "a driver that may not look"
    assert nvml.process_bytes(4, (library,)) is None
    assert nvml.process_bytes(200, ("libnothing-here.so.1",)) is None


def test_integrated_gpu_tells_no_memory(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = _read(library, monkeypatch, "NVIDIA GB10,GPU-dd,0000000F:01:00.0,0,0,12,1,9")
    assert reading is not None
    assert (reading.gpus[0].gpu.memory_bytes, reading.gpus[0].free_bytes) == (None, None)


def test_library_without_driver_is_no_reading(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAKE_NVML", raising=False)
    assert nvml.read((library,)) is None
    assert nvml.read(("libnothing-here.so.1",)) is None


def test_recorded_answer_of_nvidia_smi() -> None:
    text = (
        "index, uuid, name, pci.bus_id, memory.total [MiB], memory.free [MiB], compute_cap, mig.mode.current,"
        " driver_version\n0, GPU-aa, NVIDIA GB10, 0000000F:01:00.0, [N/A], [Not Supported], 12.1, [N/A], 580.95\n"
        "1, GPU-bb, NVIDIA H100, 00000000:02:00.0, 81559, 80000, 9.0, Enabled, 580.95\n"
    )
    reading = nvidia.from_csv(text)
    assert reading.driver == "580.95"
    assert [found.gpu.memory_bytes for found in reading.gpus] == [None, 81559 * 2**20]
    assert [found.gpu.mig for found in reading.gpus] == [False, True]
    assert "MIG" in reading.notes[0]


def test_a_driver_that_is_slow_is_named_after_a_second(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hang, said = tmp_path / "hang", []
    hang.touch()
    monkeypatch.setenv("FAKE_NVML_HANG", str(hang))
    monkeypatch.setenv("FAKE_NVML", f"NVIDIA H200,GPU-cc,00000000:01:00.0,{141 * GIB},{140 * GIB},9,0,0")
    monkeypatch.setattr(nvml, "NOTICE_S", 0.05)

    def waits(text: str) -> None:
        said.append(text)
        hang.unlink()

    reading = nvml.read((library,), 60.0, waits)
    assert said == [nvml.WAITS]
    assert reading is not None and len(reading.gpus) == 1


def test_a_driver_that_hangs_is_left_behind_and_its_late_answer_is_used(
    library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hang = tmp_path / "hang"
    hang.touch()
    monkeypatch.setenv("FAKE_NVML_HANG", str(hang))
    monkeypatch.setenv("FAKE_NVML", f"NVIDIA H200,GPU-cc,00000000:01:00.0,{141 * GIB},{140 * GIB},9,0,0")
    for _ in range(2):  # the second call does not start another
        with pytest.raises(TimeoutError, match="does not answer"):
            nvml.read((library,), limit_s=0.05)
    assert nvml.hangs() and nvidia.hangs() == nvml.HANGS
    assert [thread.name for thread in threading.enumerate()].count("nvml") == 1
    hang.unlink()
    assert nvml._call is not None
    nvml._call.join(30)
    reading = nvml.read((library,))
    assert reading is not None and reading.gpus[0].free_bytes == 140 * GIB
    assert nvidia.hangs() is None
