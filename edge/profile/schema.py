"""The JSON Schema of a profile, made from the tables that read it; profile.schema.json is the published copy."""

from __future__ import annotations

from typing import Any

from edge.profile.fields import Field
from edge.profile.loader import CHOICE_FIELDS, SCHEMA, TIER_FIELDS
from edge.profile.settings import SECTIONS, SETTINGS

_TYPES: dict[str, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "text": {"type": "string"},
    "reserve": {"type": "string"},
    "size": {"type": ["integer", "string"]},
}


def schema() -> dict[str, Any]:
    """For editors and other tools: JSON Schema 2020-12 of one profile file."""
    tables: dict[str, dict[str, Any]] = {}
    for key, field in SECTIONS.items():
        table, name = key.split(".")
        tables.setdefault(table, _table({}))["properties"][name] = _field(field)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "edgellm profile",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "schema": {"const": SCHEMA},
            "summary": {"type": "string", "description": "one line"},
            "extends": {"type": "string", "description": "another profile, which may not extend a third"},
            **{key: _field(field) for key, field in SETTINGS.items()},
            **tables,
            "tier": {"type": "array", "items": _table({**TIER_FIELDS, **SETTINGS})},
            "use": {"type": "array", "items": {**_table(CHOICE_FIELDS), "required": ["profile"]}},
        },
    }


def _table(fields: dict[str, Field]) -> dict[str, Any]:
    properties = {key: _field(field) for key, field in fields.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _field(field: Field) -> dict[str, Any]:
    if field.kind.endswith("s"):
        return {"type": "array", "items": _limits(field, field.kind[:-1]), "description": field.help}
    return {**_limits(field, field.kind), "description": field.help}


def _limits(field: Field, kind: str) -> dict[str, Any]:
    limits: dict[str, Any] = dict(_TYPES[kind])
    if field.choices:
        limits["enum"] = list(field.choices)
    if field.minimum is not None:
        limits["minimum"] = field.minimum
    if field.maximum is not None:
        limits["maximum"] = field.maximum
    return limits
