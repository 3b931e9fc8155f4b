from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import UsageError
from edge.units import GIB, counted, format_bytes, format_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("7.4GiB", int(7.4 * GIB)), ("512 MiB", 512 << 20), ("8GB", 8_000_000_000), ("1024", 1024), ("2k", 2000)],
)
def test_sizes_as_people_write_them(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1.2.3MB", "7,4GiB", "8 XB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_printed_size_reads_back_within_its_precision(count: int) -> None:
    assert parse_size(format_bytes(count)) == pytest.approx(count, rel=0.06, abs=1)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.012, "12 ms"), (3.21, "3.2 s"), (75, "1 min 15 s"), (3660, "1 h 01 min"), (0, "0 ms")]
)
def test_times(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "forms", "text"),
    [
        (1, ("value",), "1 value"),
        (0, ("value",), "0 values"),
        (2, ("process", "processes"), "2 processes"),
        (1, ("process", "processes"), "1 process"),
    ],
)
def test_a_count_agrees_with_its_noun(count: int, forms: tuple[str, ...], text: str) -> None:
    assert counted(count, *forms) == text
