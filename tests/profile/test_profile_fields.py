"""The kinds of value, and the formula of the reserve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.profile.fields import Field
from edge.profile.reserve import reserve_bytes
from edge.units import GIB, MIB

KINDS = {
    "boolean": st.booleans(),
    "integer": st.integers(-(10**9), 10**9),
    "number": st.floats(-1e6, 1e6, allow_nan=False),
    "integers": st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
    "texts": st.lists(st.text("abc.:-", min_size=1, max_size=8), max_size=5).map(tuple),
}


@given(st.data())
def test_text_and_toml_mean_the_same(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    value = data.draw(KINDS[kind])
    field = Field(kind, "")
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    assert field.parse(text) == field.read(list(value) if isinstance(value, tuple) else value) == value


@given(st.sampled_from(["boolean", "integer", "number", "size", "text", "reserve", "texts"]), st.text(max_size=12))
def test_any_text_is_a_value_or_says_what_is_wanted(kind: str, text: str) -> None:
    try:
        Field(kind, "").parse(text)
    except ValueError as error:
        assert "want" in str(error) or "not a size" in str(error)


def test_a_number_is_no_boolean_and_a_boolean_no_number() -> None:
    with pytest.raises(ValueError, match="true or false"):
        Field("boolean", "").read(1)
    with pytest.raises(ValueError, match="whole number"):
        Field("integer", "").read(True)
    with pytest.raises(ValueError, match="whole number"):
        Field("integer", "").parse("nan")


@pytest.mark.parametrize(
    ("formula", "total", "wanted"),
    [
        ("max(1GiB, 10%)", 7 * GIB, GIB),
        ("max(1GiB, 10%)", 64 * GIB, 64 * GIB // 10),
        ("min(1GiB, 10%)", 64 * GIB, GIB),
        ("512MiB", 7 * GIB, 512 * MIB),
        ("25%", 8 * GIB, 2 * GIB),
        ("0", 8 * GIB, 0),
    ],
)
def test_reserve(formula: str, total: int, wanted: int) -> None:
    assert reserve_bytes(formula, total) == wanted


@pytest.mark.parametrize("formula", ["", "max(1GiB)x", "10 percent", "95%", "max(,)", "-1GiB"])
def test_a_bad_reserve_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match="wants"):
        reserve_bytes(formula, GIB)
