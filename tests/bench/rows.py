"""The rows of a bench, as a table or JSON, checked against their limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def kept(self) -> bool:
        return self.limit is None or self.value <= self.limit


def report(rows: Sequence[Row], *, as_json: bool) -> int:
    """Return the exit code: 1 if a limit is exceeded."""
    if as_json:
        print(json.dumps({"schema": 1, "rows": [vars(row) for row in rows]}, ensure_ascii=False))
    else:
        for row in rows:
            limit = "" if row.limit is None else f"  (≤ {row.limit:g}{'' if row.kept else ': EXCEEDED'})"
            print(f"{row.what:<68} {row.value:9.2f} {row.unit:<4}{limit}")
    return 0 if all(row.kept for row in rows) else 1
