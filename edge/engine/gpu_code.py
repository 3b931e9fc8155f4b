"""Decide whether machine code for some GPU architectures runs on a GPU. Pure.

A binary holds machine code (SASS) for fixed architectures, and perhaps PTX that the driver compiles for newer ones.
"""

from __future__ import annotations

from collections.abc import Sequence

# Tegra SoCs run code of exactly their own architecture; on discrete GPUs code runs on later minors of its major
# (CUDA C++ Programming Guide, "Binary Compatibility"). Architectures: TX1, TX2, Xavier, Orin, Thor before and after
# CUDA 13 renamed it.
TEGRA = frozenset({53, 62, 72, 87, 101, 110})


def architecture(capability: str | None) -> int | None:
    """Return `8.7` as 87 and `11.0` as 110; None where the capability is unknown."""
    return int(capability.replace(".", "")) if capability and capability.replace(".", "").isdigit() else None


def runs(archs: Sequence[int], wanted: int) -> bool:
    """Return whether machine code for `archs` runs on the architecture `wanted` (87 is sm_87)."""
    if wanted in archs:
        return True
    return wanted not in TEGRA and any(arch // 10 == wanted // 10 and arch <= wanted for arch in archs)


def listed(archs: Sequence[int]) -> str:
    """Return `sm_72, sm_87`."""
    return ", ".join(f"sm_{arch}" for arch in archs)


def describe(archs: Sequence[int], capability: str | None) -> str | None:
    """Return `code for sm_87`, or the PTX that is compiled at the first start; None when either side is unknown."""
    wanted = architecture(capability)
    if not archs or wanted is None:
        return None
    if runs(archs, wanted):
        return f"code for sm_{wanted}"
    older = [arch for arch in archs if arch <= wanted]
    return f"JIT from PTX of sm_{max(older)}" if older else f"no code for sm_{wanted}"
