"""Tell whether an engine holds machine code for a GPU, or the driver must compile its PTX first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# CUDA C++ Programming Guide, binary compatibility: code for sm_XY runs on later minors of the same major, except on
# Tegra, where it must match exactly.
_TEGRA = frozenset({53, 62, 72, 87, 101, 110})


def runs(archs: Sequence[int], wanted: int) -> bool:
    """Return whether machine code for `archs` runs on `wanted` (sm_87 is 87)."""
    if wanted in archs:
        return True
    return wanted not in _TEGRA and any(arch // 10 == wanted // 10 and arch <= wanted for arch in archs)


def describe(archs: Sequence[int], capability: str | None) -> str | None:
    """Return `code for sm_87` or `JIT from PTX of sm_80`; None when either side is unknown."""
    if not archs or capability is None or not capability.replace(".", "").isdigit():
        return None
    wanted = int(capability.replace(".", ""))
    if runs(archs, wanted):
        return f"code for sm_{wanted}"
    older = [arch for arch in archs if arch <= wanted]
    return f"JIT from PTX of sm_{max(older)}" if older else f"no code for sm_{wanted}"
