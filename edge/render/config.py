"""Text of `edgellm config show`."""

from __future__ import annotations

from collections.abc import Iterable

from edge.config.show import Row, toml_value
from edge.render.plan import columns


def config_lines(rows: Iterable[Row]) -> list[str]:
    """Return `key = value   origin` lines, aligned."""
    return columns([(f"{row.key} = {toml_value(row.value)}", row.origin) for row in rows])
