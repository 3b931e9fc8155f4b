"""A configuration as text."""

from __future__ import annotations

import json
from collections.abc import Iterable

from edge.config.show import Row
from edge.render.plan import columns


def config_lines(rows: Iterable[Row]) -> list[str]:
    """key = value   origin"""
    return columns([(f"{row.key} = {toml_value(row.value)}", row.origin) for row in rows])


def toml_value(value: object) -> str:
    """As it would be written in TOML; None is written as nothing there."""
    return "(none)" if value is None else json.dumps(value, ensure_ascii=False)
