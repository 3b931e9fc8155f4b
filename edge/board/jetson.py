"""Identify a Jetson by its device tree: by `compatible`, for `model` is text that makers of carrier boards change."""

from __future__ import annotations

import re

from msgspec import Struct

from edge.board.board import PowerMode
from edge.board.tables import BoardRow, Release, Soc, table
from edge.linux.tree import Tree

# NVIDIA's part numbers of modules and carriers, in `compatible` of every L4T release.
_PART = re.compile(r"p\d{4}-\d{4}")
# The second is a link to the first; containers often have only one of them.
_BASE = ("/sys/firmware/devicetree/base", "/proc/device-tree")


class Jetson(Struct, frozen=True):
    """A Jetson. `row` is None for a module that is not in the table: only its chip is known."""

    soc: Soc
    row: BoardRow | None
    super_image: bool  # a device tree with the Super clocks (JetPack 6.2)
    model: str | None
    notes: tuple[str, ...] = ()


def read(tree: Tree, memory_kb: int) -> Jetson | None:
    """Identify the board; None when the device tree is absent or not a Jetson's."""
    compatible = _strings(tree, "compatible")
    if not any(entry.startswith("nvidia,tegra") for entry in compatible):
        return None
    known = table()
    soc = next((known.socs[s] for c in compatible if (s := c.removeprefix("nvidia,")) in known.socs), None)
    if soc is None:
        return None
    row, notes = match(compatible, soc, known.rows, memory_kb)
    is_super = any(entry.endswith("-super") for entry in compatible)
    return Jetson(soc, row, is_super, next(iter(_strings(tree, "model")), None), notes)


def match(
    compatible: list[str], soc: Soc, rows: tuple[BoardRow, ...], memory_kb: int
) -> tuple[BoardRow | None, tuple[str, ...]]:
    """Find the table row by p-number; if several or none match, by MemTotal, with a note."""
    # In "p3768-0000+p3767-0005" the module comes last; the first is the carrier.
    parts = {found[-1] for entry in compatible if (found := _PART.findall(entry))}
    hits = [row for row in rows if parts & set(row.part)]
    if len({row.id for row in hits}) == 1:
        return hits[0], ()
    near = _by_memory(hits or [row for row in rows if row.soc == soc.key], memory_kb)
    if near is None:
        return None, (f"module {', '.join(sorted(parts)) or 'unnamed'} is not in our table: only its chip is known",)
    why = "several modules in one device tree" if hits else f"module {', '.join(sorted(parts)) or 'unnamed'} is unknown"
    return near, (f"{why}: taken as {near.name} because of its memory size",)


def _by_memory(rows: list[BoardRow], memory_kb: int) -> BoardRow | None:
    """Return the nearest row whose memory is within a quarter of this board's."""
    near = min(rows, key=lambda row: abs(row.memory_kb - memory_kb), default=None)
    return near if near is not None and abs(near.memory_kb - memory_kb) <= near.memory_kb / 4 else None


def bandwidth_bytes_s(row: BoardRow, super_image: bool, memory_clock_cap_hz: int | None) -> float:
    """Return the memory bandwidth under nvpmodel's cap of the memory clock; LPDDR moves two bits a cycle and line."""
    most = (row.super_bandwidth_gb_s if super_image else None) or row.bandwidth_gb_s
    if memory_clock_cap_hz and row.bus_bits:
        return min(most * 1e9, 2.0 * memory_clock_cap_hz * row.bus_bits / 8)
    return most * 1e9


def _strings(tree: Tree, name: str) -> list[str]:
    for base in _BASE:
        text = tree.text(f"{base}/{name}")
        if text:
            return [part for part in text.split("\0") if part.strip()]
    return []


# Identify the L4T release and its JetPack and CUDA. Pure.

# "# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, ..." and lines that vendors add.
_RELEASE_FILE = re.compile(r"^#\s*R(\d{1,4})\s*\(release\),\s*REVISION:\s*([0-9.]{1,20})", re.MULTILINE)
_PACKAGE = re.compile(
    r"^Package: nvidia-l4t-core\n(?:[^\n]+\n)*?Version: (\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)", re.MULTILINE
)
_KERNEL = re.compile(r"Linux version (\d+\.\d+)\S*tegra")
# L4T majors by kernel; where there are two, the chip decides: 38 is for Thor only, 39 for Orin and Thor.
_MAJORS_OF_KERNEL = {"4.9": (32,), "5.10": (35,), "5.15": (36,), "6.8": (38, 39)}


class L4t(Struct, frozen=True):
    """A release. `version` is read on the board, JetPack and CUDA in the table; `note` explains a guess."""

    version: str | None
    jetpack: str | None
    cuda: str | None
    note: str | None = None


def from_release_file(text: str) -> str | None:
    """Parse `36.4.7` from /etc/nv_tegra_release."""
    match = _RELEASE_FILE.search(text)
    return f"{match[1]}.{match[2].strip('.')}" if match else None


def from_dpkg_status(text: str) -> str | None:
    """Parse `39.2.1` from the version of package nvidia-l4t-core (39.2.1-20260806224157)."""
    match = _PACKAGE.search(text)
    return match[1] if match else None


def major_from_kernel(proc_version: str, of_chip: tuple[int, ...] = ()) -> int | None:
    """Return the L4T major of a tegra kernel, for containers without the release file.

    `of_chip`: the majors that run on this chip. Of several the oldest is returned: it promises the least CUDA.
    """
    match = _KERNEL.search(proc_version)
    majors = _MAJORS_OF_KERNEL.get(match[1], ()) if match else ()
    return next((major for major in majors if major in of_chip), majors[0] if majors else None)


def identify(version: str | None, kernel_major: int | None, releases: tuple[Release, ...]) -> L4t:
    """Look the release up. An unknown one is treated as the nearest known one, with a note (FC-64)."""
    if version is not None:
        return _by_version(version, releases)
    if kernel_major is None:
        return L4t(None, None, None, "no L4T release file and no tegra kernel: JetPack and CUDA unknown")
    newest = _nearest((kernel_major, 999), releases)
    note = f"no L4T release file here (a container?): JetPack {newest.jetpack} guessed from the kernel"
    return L4t(None, newest.jetpack, newest.cuda, note)


def _by_version(version: str, releases: tuple[Release, ...]) -> L4t:
    wanted = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    wanted += (0,) * (3 - len(wanted))
    for release in releases:
        if release.version == wanted:
            return L4t(version, release.jetpack, release.cuda)
    near = _nearest(wanted, releases)
    note = f"L4T {version} is not in our table: taken as {near.name} (JetPack {near.jetpack}), the nearest known"
    return L4t(version, near.jetpack, near.cuda, note)


def _nearest(wanted: tuple[int, ...], releases: tuple[Release, ...]) -> Release:
    """Return the newest release up to `wanted`, of its major if it has one; else the oldest."""
    older = [release for release in releases if release.version <= wanted]
    same_major = [release for release in releases if release.version[0] == wanted[0]]
    if older and (older[-1].version[0] == wanted[0] or not same_major):
        return older[-1]
    return same_major[0] if same_major else releases[0]


# Parse nvpmodel's state files, without its process and without root. Pure.

# `pmode:0002 fmode:fanNull`, as nvpmodel writes it after each change.
_ACTIVE = re.compile(r"\bpmode:\s*(\d{1,6})\b")
_MODEL = re.compile(r"<\s*POWER_MODEL\s+ID=(\d{1,6})\s+NAME=([^\s>]+)\s*>")


def modes(conf: str) -> tuple[PowerMode, ...]:
    """Return every mode of /etc/nvpmodel.conf. Ids differ by module and image (FC-43)."""
    return tuple(PowerMode(int(number), name) for number, name in _MODEL.findall(conf))


def active(status: str | None, conf: str | None) -> PowerMode | None:
    """Return the mode of `/var/lib/nvpmodel/status` (`pmode:0002 fmode:fanNull`), None before nvpmodel's first run."""
    known = {mode.id: mode for mode in modes(conf or "")}
    match = _ACTIVE.search(status or "")
    if match is None:
        return None
    number = int(match[1])
    return known.get(number) or PowerMode(number, f"mode {number}")
