"""Write profiles/profile.schema.json and docs/configuration.md from the keys: `python -m tests.config.publish`."""

from __future__ import annotations

import json
from pathlib import Path

from edge.config.schema import reference, schema
from edge.resources import data_dir

DOCS = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

if __name__ == "__main__":
    path = data_dir("profiles") / "profile.schema.json"
    path.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
    DOCS.write_text(reference(), encoding="utf-8")
