"""Machine code in a binary (FC-01: CUDA wanted and really in it)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.engine.binary import PTX, architectures, elf_machine
from tests.fakes.toolchain.elf import MACHINE_CODE, elf, fatbin


def test_architectures_by_kind() -> None:
    data = elf("aarch64", fatbin([(MACHINE_CODE, 87)]) + b"\0" * 8 + fatbin([(PTX, 80), (MACHINE_CODE, 90)]))
    assert elf_machine(data) == "aarch64"
    assert (architectures(data), architectures(data, PTX)) == ({87, 90}, {80})


def test_no_cuda_and_an_empty_section_are_nothing() -> None:
    assert architectures(elf("x86_64")) == set()
    assert architectures(elf("x86_64", b"")) == set()


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + b"\0" * 60, b"\x7fELF\x02\x01" + b"\xff" * 60]
)
def test_what_is_no_elf_file(data: bytes) -> None:
    assert architectures(data) == set()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.binary(min_size=1, max_size=12))
def test_damage_never_breaks_the_reader(tail: bytes, at: int, damage: bytes) -> None:
    data = bytearray(elf("aarch64", fatbin([(MACHINE_CODE, 87), (PTX, 87)]), tail))
    at %= len(data)
    data[at : at + len(damage)] = damage
    architectures(bytes(data))
    architectures(bytes(data[:at]))


@pytest.mark.full
def test_what_a_real_nvcc_writes(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    source = tmp_path / "k.cu"
    source.write_text("__global__ void f(float *a) { a[threadIdx.x] *= 2.f; }\nvoid g(float *a) { f<<<1, 32>>>(a); }\n")
    for codes, expected, ptx in (
        (["-gencode", "arch=compute_87,code=sm_87"], {87}, set()),
        (
            ["-gencode", "arch=compute_87,code=[sm_87,compute_87]", "-gencode", "arch=compute_90,code=sm_90"],
            {87, 90},
            {87},
        ),
    ):
        subprocess.run([nvcc, *codes, "-c", str(source), "-o", str(tmp_path / "k.o")], check=True)
        data = (tmp_path / "k.o").read_bytes()
        assert (architectures(data), architectures(data, PTX)) == (expected, ptx)
