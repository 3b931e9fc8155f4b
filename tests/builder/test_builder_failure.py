"""Why a build failed (FC-07, FC-08, FC-14; D-01 … D-26)."""

from __future__ import annotations

import pytest

from edge.builder.compile import diagnose
from edge.resources import data_dir, load_toml

_FAILURES = load_toml(data_dir("build") / "llama.cpp.toml")["failures"]

LINES = {
    "disk-full": ["/tmp/cc1.s: fatal error: error writing to /tmp/cc1.s: No space left on device"],  # FC-14
    "out-of-memory": [
        "c++: fatal error: Killed signal terminated program cc1plus",  # D-21
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",  # D-14
        "cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes",
        "collect2: fatal error: ld terminated with signal 9 [Killed]",
        "g++: internal compiler error: Killed (program cc1plus)",
        "FAILED: [code=137] bin/llama-server",
        "make: *** [Makefile:9: x.o] Error 137",
        "Killed",
        "collect2: error: ld returned 137 exit status",
        "ninja: subcommand exited with code 137",
        "process didn't exit successfully: (signal: 9, SIGKILL: kill)",
        "/bin/sh: line 1: 4242 Killed                  /usr/bin/c++ -O3",
        "nvcc error   : 'cudafe++' died with status 137",
        "/usr/bin/ld: memory exhausted",
        "LLVM ERROR: out of memory",
        "LLVM ERROR: Allocation failed",
        "clang++: error: unable to execute command: Killed",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "ptxas fatal   : Memory allocation failure",
        "ld.gold: out of memory",
        "cc1plus: fatal error: out of memory",
        "FAILED: [code=-9] x.o",
        "sccache: Compiler killed by signal 9",
        "mold: fatal: mmap failed: Cannot allocate memory",
        "g++: fatal error: Killed signal terminated program as",
        "c++: error: vfork: Resource temporarily unavailable",
        "/bin/sh: 0: Cannot fork",
    ],
    "glibc-too-new": [
        "/usr/include/bits/mathcalls.h(79): error: exception specification is incompatible with that of previous "
        'function "cospi" (declared at line 2601 of /usr/local/cuda/include/crt/math_functions.h)',
    ],
    "libstdcxx-too-new": [
        '/usr/include/c++/15/type_traits(2741): error: identifier "__is_pointer" is undefined',
        "/usr/lib/gcc/x86_64-linux-gnu/14/include/c++/14/bits/move.h(37): error: type name is not allowed",
    ],
    "header-mismatch": [
        "arm_neon.h:6: error: inlining failed in call to 'always_inline' 'vdotq_s32': target specific option mismatch"
    ],
    "neon-missing": [
        "error: implicit declaration of function 'vld1q_s8_x4'; did you mean 'vld1q_s8_x2'?"
    ],  # D-05, D-25
    "arm-neon-in-nvcc": ['arm_neon.h(44): error: identifier "__Poly8x8_t" is undefined'],  # D-15
    "arch-too-new": [
        "nvcc fatal   : Unsupported gpu architecture 'compute_120a'",  # D-01, D-18, FC-08
        "ptxas fatal : Value 'sm_110a' is not defined for option 'gpu-name'",  # D-19
    ],
    "no-nvcc": ["  No CMAKE_CUDA_COMPILER could be found.", "CMake Error: CUDA Toolkit not found"],  # D-02
    "cublas-missing": ['Target "ggml-cuda" links to: CUDA::cublas but the target was not found.'],
    "driver-stub-missing": [
        "    CUDA::cuda_driver",
        "/usr/bin/ld: cannot find -lcuda: No such file or directory",
        "ggml-cuda.cu: undefined reference to `cuMemCreate'",
    ],
    "cuda-dialect": ['Target "ggml-cuda" requires the language dialect "CUDA17" (with compiler extensions).'],  # D-07
    "cuda-too-old": [
        "error: identifier 'CUBLAS_TF32_TENSOR_OP_MATH' not found",  # D-06
        '"__builtin_assume" is undefined',  # D-09
        "cuda.h:6:10: fatal error: cuda_bf16.h: No such file or directory",  # D-10
    ],
    "host-compiler": ["#error -- unsupported GNU version! gcc versions later than 13 are not supported!"],
    "no-gpu-for-native": ['  CUDA_ARCHITECTURES is set to "native", but no NVIDIA GPU was detected.'],
    "filesystem-library": [
        "x.cpp:(.text+0x1): undefined reference to `std::filesystem::__cxx11::path::_M_split_cmpts()'"
    ],
    "ptxas": ["ptxas fatal   : Ptx assembly aborted due to errors"],
    "ccache-full-of-errors": ["ccache: error: Failed to create temporary file"],
    "renamed-option": ["  LLAMA_CUBLAS is deprecated, use GGML_CUDA instead"],  # D-03
    "dirty-manifest": ["ninja: error: manifest 'build.ninja' still dirty after 100 tries"],
    "clock": ["make: warning:  Clock skew detected.  Your build may be incomplete."],  # FC-13
    "compiler-crash": [
        "x.cpp:1:1: internal compiler error: Segmentation fault",
        "nvcc error   : 'cicc' died due to signal 11 (Invalid memory reference)",
        "clang++: error: clang frontend command failed due to signal (use -v to see invocation)",
    ],
}


def test_every_signature_has_a_line_here() -> None:
    assert [failure["id"] for failure in _FAILURES] == list(LINES)


@pytest.mark.parametrize("identity", list(LINES))
def test_signature(identity: str) -> None:
    for line in LINES[identity]:
        found = diagnose(["[1/2] Building", line, "ninja: build stopped: subcommand failed."], _FAILURES)
        assert found.id == identity
        assert found.evidence == (line.strip(),)
        assert found.sentence and found.hint


@pytest.mark.parametrize(("code", "kills"), [(-9, 0), (137, 0), (1, 2)])
def test_numbers_decide_before_any_sentence(code: int, kills: int) -> None:
    """The exit code, and the kernel's own count of kills in this control group."""
    found = diagnose(["x.cpp:1: internal compiler error: oh"][:kills], _FAILURES, code=code, oom_kills=kills)
    assert (found.id, found.retry) == ("out-of-memory", "half")
    assert found.evidence


@pytest.mark.parametrize(
    "line",
    [
        "x.cpp:137:5: error: expected ';'",
        "error: in a.c:137",
        "[137/216] Building CXX object x.o",
        "x.cpp:9: warning: signal 90",
        "kill.cpp:3:5: error: use of undeclared identifier 'SIGKILL'",
        "x.cpp:9: error: 'Killed' was not declared in this scope",
        'x.cu(9): error: identifier "SIGKILL" is undefined',
        "  137 |     return 137;",
        "[9/137] Building CXX object signal 9.cpp.o",
        "-- Performing Test HAVE_SIGKILL - Success",
    ],
)
def test_a_number_of_another_meaning_is_no_kill(line: str) -> None:
    assert diagnose([line], _FAILURES).id != "out-of-memory"


def test_the_text_under_a_cmake_error_is_shown() -> None:
    log = [
        "-- Found OpenMP",
        "CMake Error at cmake/x.cmake:12 (message):",
        "  The toolchain has no ISO filesystem library.",
        "",
        "  Install one.",
        "Call Stack (most recent call first):",
        "  CMakeLists.txt:3 (include)",
    ]
    assert diagnose(log, _FAILURES).evidence == (
        "CMake Error at cmake/x.cmake:12 (message): The toolchain has no ISO filesystem library. Install one.",
    )


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            [
                "CMake Warning at a:1 (message):",
                "  An error is likely.",
                "error 2",
                "CMake Error at x:3 (f):",
                "  The cause.",
            ],
            "CMake Error at x:3 (f): The cause.",
        ),
        (
            ["CMake Error in CMakeLists.txt:", '  Imported target "x" includes', "", "    /nowhere"],
            'CMake Error in CMakeLists.txt: Imported target "x" includes /nowhere',
        ),
        (["  CMake Error (dev) at y:3 (message):", "    nested"], "CMake Error (dev) at y:3 (message): nested"),
        (
            ["CMake Error at z:3 (message):", *["  Change Dir: /x"] * 20, "    cc: cannot execute 'cc1'"],
            f"CMake Error at z:3 (message): {'Change Dir: /x ' * 20}cc: cannot execute 'cc1'",
        ),
    ],
)
def test_every_shape_of_a_cmake_error_is_shown_first(log: list[str], shown: str) -> None:
    log = ["-- Found OpenMP", *log, "-- Configuring incomplete, errors occurred!"]
    assert diagnose(log, _FAILURES).evidence[0] == shown


def test_the_cause_is_found_far_above_the_end() -> None:
    """D-11: what the tail shows is only that make gave up."""
    log = [
        LINES["header-mismatch"][0],
        *["[3/9] Building CXX object x.o"] * 500,
        "ninja: build stopped: subcommand failed.",
    ]
    found = diagnose(log, _FAILURES)
    assert (found.id, found.retry) == ("header-mismatch", "baseline")


def test_a_full_disk_explains_what_else_failed() -> None:
    found = diagnose([*LINES["compiler-crash"], *LINES["disk-full"]], _FAILURES)
    assert (found.id, found.retry) == ("disk-full", None)


def test_only_memory_halves_the_jobs() -> None:
    assert {f["id"]: f.get("retry") for f in _FAILURES if f.get("retry")} == {
        "out-of-memory": "half",
        "header-mismatch": "baseline",
        "compiler-crash": "half",
    }


def test_an_unknown_failure_shows_its_first_errors() -> None:
    found = diagnose(["a", "x.cpp:3: error: no member named 'y'", "b", "ninja: build stopped"], _FAILURES)
    assert found.id == "unknown"
    assert found.evidence == ("x.cpp:3: error: no member named 'y'",)
    assert diagnose(["nothing", "said"], _FAILURES).evidence == ("nothing", "said")
