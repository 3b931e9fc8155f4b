"""Read and write calibration.json in the state folder: calibrations by engine id and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import convert, to_builtins

from edge.linux.files import read_json
from edge.models.meta import ModelMeta
from edge.paths import Folders
from edge.plan.calibration import Calibration, calibrate, calibration_key
from edge.plan.plan import LaunchPlan, Measured

SCHEMA = 2  # 1 had one factor for each architecture


def calibration_path(folders: Folders) -> Path:
    return folders.state / "calibration.json"


def load(path: Path, engine_id: str) -> dict[str, Calibration]:
    """Return the calibrations of this engine by key; none from a missing or damaged file, or one of another schema."""
    return {key: _calibration(row) for key, row in _read(path).get(engine_id, {}).items()}


def record(
    path: Path, engine_id: str, arch: str, plan: LaunchPlan, measured: Measured, meta: ModelMeta | None = None
) -> Calibration:
    """Calibrate by one start and save; `meta` as for `calibrate`. Raises OSError when the file cannot be written."""
    from edge.linux.files import write_shared  # late: only reading is on the path of a start

    engines = _read(path)
    engine = engines.setdefault(engine_id, {})
    key = calibration_key(arch, plan.settings)
    new = calibrate(_calibration(engine.get(key)), plan, measured, meta)
    engine[key] = to_builtins(new)
    write_shared(path, json.dumps({"schema": SCHEMA, "engines": engines}, indent=1, sort_keys=True) + "\n")
    return new


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return {}
    engines = document.get("engines")
    found = engines.items() if isinstance(engines, dict) else ()
    return {engine: rows for engine, rows in found if isinstance(rows, dict)}


def _calibration(row: object) -> Calibration:
    try:
        return convert(row, Calibration)
    except ValueError:  # msgspec's ValidationError, or a lone surrogate that no UTF-8 can hold
        return Calibration()


# The memory of engines beside llama.cpp, claims.json in the state folder: bytes of their last starts.


def read_claims(folders: Folders) -> dict[str, dict[str, int]]:
    """Return bytes by fingerprint and domain; empty from a missing or damaged file."""
    try:
        document = read_json(folders.state / "claims.json")
        return convert(document["engines"], dict[str, dict[str, int]]) if document["schema"] == 1 else {}
    except (OSError, ValueError, KeyError, TypeError):  # msgspec's ValidationError is a ValueError
        return {}


def keep_claim(folders: Folders, fingerprint: str, measured: Mapping[str, int]) -> None:
    """Write the memory of one engine, if the disk allows."""
    from edge.linux.files import write_shared

    engines = {**read_claims(folders), fingerprint: dict(measured)}
    text = json.dumps({"schema": 1, "engines": engines}, sort_keys=True) + "\n"
    with suppress(OSError):
        write_shared(folders.state / "claims.json", text)
