"""Write the JSON Schemas in profiles/ and docs/configuration.md from the keys: `python -m tests.config.publish`."""

from __future__ import annotations

import json
from pathlib import Path

from edge.config.show import config_schema, reference, schema
from edge.resources import data_dir

DOCS = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

SCHEMAS = {"profile.schema.json": schema, "edgellm.schema.json": config_schema}

if __name__ == "__main__":
    for name, made in SCHEMAS.items():
        (data_dir("profiles") / name).write_text(json.dumps(made(), indent=1) + "\n", encoding="utf-8")
    DOCS.write_text(reference(), encoding="utf-8")
