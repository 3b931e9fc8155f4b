"""Ninja's counter → progress and time left."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.builder.compile import BuildMeter


def test_lines_that_are_no_step() -> None:
    meter = BuildMeter()
    for line in ("", "ninja: Entering directory `x'", "FAILED: src/a.o", "/src/a.cpp:1:2: error: x", "[a/b] c"):
        assert meter.read(line, 1.0) is None


def test_a_step_and_its_name() -> None:
    progress = BuildMeter().read("[3/216] Building CXX object src/CMakeFiles/llama.dir/llama-quant.cpp.o\n", 2.0)
    assert progress is not None
    assert (progress.done, progress.total, progress.what, progress.eta_s) == (3, 216, "llama-quant.cpp", None)


def test_time_left_falls_with_even_steps() -> None:
    meter = BuildMeter()
    left = [
        progress.eta_s
        for step in range(1, 101)
        if (progress := meter.read(f"[{step}/100] Building CXX object a.cpp.o", step * 2.0))
        and progress.eta_s is not None
    ]
    assert left == sorted(left, reverse=True)
    assert abs(left[0] - 184) < 1 and left[-1] == 0


def test_cuda_files_to_come_are_weighed() -> None:
    plain, cuda = BuildMeter(), BuildMeter(cuda_steps=50)
    for step in range(1, 21):
        a = plain.read(f"[{step}/100] Building CXX object a.cpp.o", step * 1.0)
        b = cuda.read(f"[{step}/100] Building CXX object a.cpp.o", step * 1.0)
    assert a is not None and b is not None and a.eta_s is not None and b.eta_s is not None
    assert b.eta_s > 3 * a.eta_s


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6)), min_size=1, max_size=60), st.integers(0, 500))
def test_time_left_is_never_negative(steps: list[tuple[bool, float]], cuda_steps: int) -> None:
    meter = BuildMeter(cuda_steps)
    for index, (cuda, at) in enumerate(steps, 1):
        kind = "CUDA" if cuda else "CXX"
        progress = meter.read(f"[{index}/{len(steps)}] Building {kind} object x.o", at)
        assert progress is not None
        assert progress.eta_s is None or progress.eta_s >= 0
        assert 0 < progress.fraction <= 1
