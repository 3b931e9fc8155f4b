"""The kinds of value, and the formula of the reserve."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Meta

from edge.board.memory import reserve_bytes
from edge.config.fields import Field, fields_of, key
from edge.config.values import Config, Preset
from edge.units import GIB, MIB

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(10**9), 10**9),
    float: st.floats(-1e6, 1e6, allow_nan=False),
    tuple[int, ...]: st.lists(st.integers(0, 10**6), max_size=5).map(tuple),
    tuple[str, ...]: st.lists(st.text("abc.:-", min_size=1, max_size=8), max_size=5).map(tuple),
}
SIZED = Field(Annotated[int, key("", "size", ge=0)])
RESERVED = Field(Annotated[str, key("", "reserve")])


def field(kind: Any) -> Field:
    return Field(Annotated[kind, key("")])


@given(st.data())
def test_text_and_toml_mean_the_same(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(VALUES)))
    value = data.draw(VALUES[kind])
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    assert field(kind).parse(text) == field(kind).read(list(value) if isinstance(value, tuple) else value) == value


@example(field(int), "00")  # a number for Python's int, and none for msgspec
@given(st.sampled_from([*map(field, (bool, int, float, str, tuple[str, ...])), SIZED, RESERVED]), st.text(max_size=12))
def test_any_text_is_a_value_or_says_what_is_wanted(one: Field, text: str) -> None:
    try:
        one.parse(text)
    except ValueError as error:
        assert "want" in str(error) or "not a size" in str(error)


def test_a_number_is_no_boolean_and_a_boolean_no_number() -> None:
    with pytest.raises(ValueError, match="true or false"):
        field(bool).read(1)
    with pytest.raises(ValueError, match="whole number"):
        field(int).read(True)
    with pytest.raises(ValueError, match="whole number"):
        field(int).parse("nan")
    for text in ("nan", "inf", "-inf"):
        with pytest.raises(ValueError, match="a number"):
            field(float).parse(text)
        with pytest.raises(ValueError, match="a number"):
            field(tuple[float, ...]).parse(f"1,{text}")


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Annotated[int, Meta(ge=2)], 1, "wants at least 2, got 1"),
        (Annotated[float, Meta(le=60)], "61", "wants at most 60, got 61"),
        (tuple[Annotated[int, Meta(le=3)], ...], [1, 4], "wants at most 3, got 4"),
        (Annotated[float, Meta(ge=1)] | None, 0, "wants at least 1, got 0"),
        (Literal["auto", "off"], "of", "wants one of auto, off, got 'of'; did you mean off?"),
        (int, 1.5, "wants a whole number, got a number 1.5"),
        (tuple[str, ...], {}, "wants a list, got a table"),
    ],
)
def test_a_limit_is_named(kind: Any, value: object, said: str) -> None:
    made = Field(Annotated[kind, key("x")])
    with pytest.raises(ValueError) as caught:
        made.parse(value) if isinstance(value, str) else made.read(value)
    assert str(caught.value) == said


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


def test_a_deeply_nested_value_is_read() -> None:
    nested: object = "a"
    for _ in range(600):
        nested = [nested]
    assert fields_of(Preset)["chat_template_kwargs"].read({"a": nested}) == {"a": nested}


@pytest.mark.parametrize("value", ["a\0b", ["a", "\0"], {"a": [[{"b": "\0"}]]}])
def test_a_zero_byte_is_no_value(value: object) -> None:
    """TOML may write `\\u0000`; open(2) and execve(2) raise for it, wherever it is used."""
    for field in fields_of(Config).values():
        with pytest.raises(ValueError, match="zero byte"):
            field.read(value)
