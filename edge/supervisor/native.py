"""Whether an engine holds machine code for a GPU, or the driver compiles its PTX first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# Machine code of one major runs on later minors of it, except on Tegra, where it must be exact.
_TEGRA = frozenset({53, 62, 72, 87, 101, 110})


def runs(archs: Sequence[int], wanted: int) -> bool:
    """`archs` and `wanted` as in sm_87: 87."""
    if wanted in archs:
        return True
    return wanted not in _TEGRA and any(arch // 10 == wanted // 10 and arch <= wanted for arch in archs)


def describe(archs: Sequence[int], capability: str | None) -> str | None:
    """`code for sm_87`, or that PTX is compiled at the first start; None when either side is unknown."""
    if not archs or capability is None or not capability.replace(".", "").isdigit():
        return None
    wanted = int(capability.replace(".", ""))
    if runs(archs, wanted):
        return f"code for sm_{wanted}"
    older = [arch for arch in archs if arch <= wanted]
    return f"JIT from PTX of sm_{max(older)}" if older else f"no code for sm_{wanted}"
