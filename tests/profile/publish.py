"""Writes profiles/profile.schema.json from the tables: `python -m tests.profile.publish`."""

from __future__ import annotations

import json

from edge.profile.schema import schema
from edge.resources import data_dir

if __name__ == "__main__":
    path = data_dir("profiles") / "profile.schema.json"
    path.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
