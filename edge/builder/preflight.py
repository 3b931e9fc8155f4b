"""Judge before the start whether a build can succeed: one sentence a finding. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from edge.builder.recipe import Recipe
from edge.builder.toolchain import (
    BuildFinding,
    Tool,
    Toolchain,
    Toolkit,
    choose_host_compiler,
    choose_toolkit,
    dotted,
    fail,
    numbers,
    ok,
    toolkit_row,
    warn,
)
from edge.units import format_bytes, parse_size


class BuildHost(Struct, frozen=True):
    """Measurements of the machine that builds. Times are epoch seconds."""

    toolchain: Toolchain
    build_free_bytes: int
    tmp_free_bytes: int
    memory_available_bytes: int
    cores: int
    now_s: float
    newest_source_s: float
    same_disk: bool = False  # the build folder and TMPDIR share one
    glibc: str | None = None  # "2.36"
    patched: bool = False  # the CUDA headers declare the functions of a new glibc as it does


class BuildNeeds(Struct, frozen=True):
    """The requested build. `board_cuda`: the CUDA of its JetPack, or the newest that its driver supports."""

    recipe: Recipe
    arch: tuple[int, ...]
    board_cuda: tuple[int, ...] | None
    cuda_min: tuple[int, ...]
    cuda_proven: tuple[int, ...]
    cmake_min: tuple[int, ...]
    gcc_min: int
    jobs: int | None = None


class Preflight(Struct, frozen=True):
    """The findings, and the choices made with them."""

    findings: tuple[BuildFinding, ...]
    toolkit: Toolkit | None
    host_compiler: Tool | None
    jobs: int

    @property
    def failed(self) -> tuple[BuildFinding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "fail")


def preflight(wanted: BuildNeeds, machine: BuildHost, table: Mapping[str, Any]) -> Preflight:
    findings: list[BuildFinding] = [_machine(wanted, machine), *_tools(wanted, machine)]
    toolkit, host = None, machine.toolchain.cxx[0] if machine.toolchain.cxx else None
    if wanted.recipe.cuda:
        toolkit, about = choose_toolkit(
            machine.toolchain.toolkits, wanted.board_cuda, wanted.cuda_min, wanted.cuda_proven
        )
        findings.append(about)
        if toolkit is not None:
            findings.append(_architecture(toolkit, wanted.arch, table))
            host, about = choose_host_compiler(machine.toolchain.cxx, toolkit, wanted.gcc_min, table)
            findings.append(about)
            findings.append(_glibc(toolkit, machine, table))
    jobs = choose_jobs(wanted, machine, table)
    findings.append(ok("jobs", _jobs_sentence(jobs, wanted, machine)))
    findings += _disk(wanted, machine, jobs, table)
    findings.append(_clock(machine))
    return Preflight(tuple(findings), toolkit, host, jobs)


def _machine(wanted: BuildNeeds, machine: BuildHost) -> BuildFinding:
    recipe = wanted.recipe
    if recipe.machine and recipe.machine != machine.toolchain.machine:
        return fail(
            "machine",
            f"the recipe {recipe.name} builds on {recipe.machine}, and this machine is {machine.toolchain.machine}",
            "run it on the board; --dry-run shows what it would do",
        )
    return ok("machine", f"{machine.toolchain.machine}")


def _tools(wanted: BuildNeeds, machine: BuildHost) -> Iterator[BuildFinding]:
    tools = machine.toolchain
    fetch = "run it again with --fetch-tools (takes cmake and ninja from PyPI)"
    if tools.cmake is None:
        yield fail("cmake", "cmake is not installed", fetch)
    elif tools.cmake.version < wanted.cmake_min:
        need = dotted(wanted.cmake_min)
        yield fail("cmake", f"cmake {tools.cmake.text} is too old: {need} or newer is needed", fetch)
    else:
        yield ok("cmake", f"cmake {tools.cmake.text}")
    if tools.ninja is None:
        yield fail("ninja", "ninja is not installed", f"sudo apt install ninja-build, or {fetch}")
    if not tools.cxx or tools.cc is None:
        yield fail("compiler", "no C++ compiler is installed", "sudo apt install build-essential")
    elif not wanted.recipe.cuda and tools.cxx[0].version[0] < wanted.gcc_min:
        too_old = f"gcc {tools.cxx[0].text} is too old: {wanted.gcc_min} or newer is needed"
        yield fail("compiler", too_old, f"sudo apt install g++-{wanted.gcc_min}")
    elif not wanted.recipe.cuda:
        yield ok("compiler", f"gcc {tools.cxx[0].text}")
    if tools.ccache is None:
        yield warn("ccache", "ccache is not installed: a rebuild starts from nothing", "sudo apt install ccache")


def compilable(toolkit: Toolkit, arch: tuple[int, ...], table: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the architectures that this nvcc compiles for: by its own list, else by its release's limits."""
    row, known = toolkit_row(toolkit.version, table), toolkit.archs
    return tuple(a for a in arch if (a in known if known else row["arch_min"] <= a <= row["arch_max"]))


def _architecture(toolkit: Toolkit, arch: tuple[int, ...], table: Mapping[str, Any]) -> BuildFinding:
    if not arch:
        hint = "name it: --arch 90"
        return fail("architecture", "no GPU answers, so its architecture is unknown", hint)
    row, known = toolkit_row(toolkit.version, table), toolkit.archs
    able = compilable(toolkit, arch, table)
    text = ", ".join(f"sm_{a}" for a in arch)
    if len(able) == len(arch):
        return ok("architecture", f"{text}, which this nvcc compiles")
    listed = ", ".join(map(str, known)) if known else f"{row['arch_min']} to {row['arch_max']}"
    hint = "install the toolkit that belongs to this board"
    return fail("architecture", f"nvcc {toolkit.text} cannot compile for {text}: it knows {listed}", hint)


def _glibc(toolkit: Toolkit, machine: BuildHost, table: Mapping[str, Any]) -> BuildFinding:
    """Check the C library against the toolkit's headers: they declare the same functions in another way."""
    most = toolkit_row(toolkit.version, table)["glibc_max"]
    if machine.glibc is None or machine.patched or numbers(machine.glibc) <= numbers(most):
        return ok("glibc", f"glibc {machine.glibc or 'of unknown version'}")
    sentence = f"CUDA {toolkit.text} compiles with glibc up to {most}, and this system has {machine.glibc}"
    hint = "install a newer CUDA toolkit, or patch crt/math_functions.h as llama.cpp's build guide shows"
    # What is listed was reported; a release after the newest row may well be mended.
    newer = toolkit.version > numbers(max(table["toolkits"], key=lambda row: numbers(row["cuda"]))["cuda"])
    return (warn if newer else fail)("glibc", sentence, hint)


def choose_jobs(wanted: BuildNeeds, machine: BuildHost, table: Mapping[str, Any]) -> int:
    """Return --jobs, else what memory allows, at least one and at most the number of cores."""
    if wanted.jobs is not None:
        return max(1, wanted.jobs)
    # Memory bounds the jobs before cores do: cicc takes 2 GiB on the largest template files.
    return max(1, min(machine.cores, machine.memory_available_bytes // _per_job(wanted, table)))


def _per_job(wanted: BuildNeeds, table: Mapping[str, Any]) -> int:
    return parse_size(table["costs"]["memory_per_cuda_job" if wanted.recipe.cuda else "memory_per_job"])


def _jobs_sentence(jobs: int, wanted: BuildNeeds, machine: BuildHost) -> str:
    if wanted.jobs is not None:
        return f"{jobs} at once, as requested"
    limit = "cores" if jobs == machine.cores else "memory"
    available = format_bytes(machine.memory_available_bytes)
    return f"{jobs} at once: {machine.cores} cores, {available} available ({limit} decides)"


def _disk(wanted: BuildNeeds, machine: BuildHost, jobs: int, table: Mapping[str, Any]) -> Iterator[BuildFinding]:
    """Check the space of the build folder and TMPDIR, together if they share a disk (FC-14)."""
    build = wanted.recipe.disk_bytes
    tmp = jobs * parse_size(table["costs"]["tmp_per_job"])
    need = build + (tmp if machine.same_disk else 0)
    yield _space("disk", "the build folder", machine.build_free_bytes, need, "free some space")
    if not machine.same_disk:
        hint = "free some space, or set TMPDIR to a folder on a larger disk"
        yield _space("tmpdir", "TMPDIR", machine.tmp_free_bytes, tmp, hint)


def _space(name: str, where: str, free: int, need: int, hint: str) -> BuildFinding:
    if free < need:
        return fail(name, f"{where} has {format_bytes(free)} free and needs {format_bytes(need)}", hint)
    return ok(name, f"{where} has {format_bytes(free)} free, {format_bytes(need)} needed")


def _clock(machine: BuildHost) -> BuildFinding:
    """Check the clock: a board without a battery boots in the past, and ninja then rebuilds without end (FC-13)."""
    # A minute of slack: file systems and NTP round.
    if machine.now_s + 60 < machine.newest_source_s:
        days = (machine.newest_source_s - machine.now_s) / 86400
        return fail(
            "clock",
            f"the clock is {days:.1f} days before the newest source file",
            "set the time first: sudo timedatectl set-ntp true",
        )
    return ok("clock", "the clock is later than the sources")
