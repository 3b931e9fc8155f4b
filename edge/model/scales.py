"""Positions of the floating-point scales in ggml's blocks: a NaN there spoils every answer. Data only.

Source: ggml 0.25.3, ggml/src/ggml-common.h. `f16`, `f32` and `bf16` are tested by their exponent, `e8m0` by 255.
"""

from __future__ import annotations

# Type -> (offset in the block, format) of each scale.
SCALES: dict[str, tuple[tuple[int, str], ...]] = {
    "F32": ((0, "f32"),),
    "F16": ((0, "f16"),),
    "BF16": ((0, "bf16"),),
    "F64": ((0, "f64"),),
    "Q1_0": ((0, "f16"),),
    "Q2_0": ((0, "f16"),),
    "Q4_0": ((0, "f16"),),
    "Q4_1": ((0, "f16"), (2, "f16")),
    "Q5_0": ((0, "f16"),),
    "Q5_1": ((0, "f16"), (2, "f16")),
    "Q8_0": ((0, "f16"),),
    "Q8_1": ((0, "f16"), (2, "f16")),
    "Q2_K": ((80, "f16"), (82, "f16")),
    "Q3_K": ((108, "f16"),),
    "Q4_K": ((0, "f16"), (2, "f16")),
    "Q5_K": ((0, "f16"), (2, "f16")),
    "Q6_K": ((208, "f16"),),
    "Q8_K": ((0, "f32"),),
    "IQ1_S": ((0, "f16"),),
    "IQ2_XXS": ((0, "f16"),),
    "IQ2_XS": ((0, "f16"),),
    "IQ2_S": ((0, "f16"),),
    "IQ3_XXS": ((0, "f16"),),
    "IQ3_S": ((0, "f16"),),
    "IQ4_NL": ((0, "f16"),),
    "IQ4_XS": ((0, "f16"),),
    "TQ1_0": ((52, "f16"),),
    "TQ2_0": ((64, "f16"),),
    "MXFP4": ((0, "e8m0"),),
    # IQ1_M spreads its scale over four words and NVFP4's cannot be NaN: they are hashed, not scanned.
}

# Format -> (numpy type, mask of what is looked at, value from which it is infinite or no number).
FORMATS: dict[str, tuple[str, int, int]] = {
    "f16": ("<u2", 0x7FFF, 0x7C00),
    "bf16": ("<u2", 0x7FFF, 0x7F80),
    "f32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "f64": ("<u8", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "e8m0": ("u1", 0xFF, 0xFF),
}
