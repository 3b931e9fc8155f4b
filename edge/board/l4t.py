"""Identify the L4T release and its JetPack and CUDA. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge.board.table import Release

# "# R36 (release), REVISION: 4.7, GCID: 42132812, BOARD: generic, ..." and lines that vendors add.
_RELEASE_FILE = re.compile(r"^#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([0-9.]+)", re.MULTILINE)
_PACKAGE = re.compile(r"^Package: nvidia-l4t-core\n(?:[^\n]+\n)*?Version: (\d+\.\d+(?:\.\d+)?)", re.MULTILINE)
_KERNEL = re.compile(r"Linux version (\d+\.\d+)\S*tegra")
_MAJOR_OF_KERNEL = {"4.9": 32, "5.10": 35, "5.15": 36, "6.8": 38}


@dataclass(frozen=True, slots=True)
class L4t:
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


def major_from_kernel(proc_version: str) -> int | None:
    """Return the L4T major of a tegra kernel, for containers without the release file."""
    match = _KERNEL.search(proc_version)
    return _MAJOR_OF_KERNEL.get(match[1]) if match else None


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
