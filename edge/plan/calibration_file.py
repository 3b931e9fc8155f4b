"""Read and write calibration.json in the state folder: calibrations by engine id and architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from edge.paths import Folders
from edge.plan.calibration import Calibration, calibrate
from edge.plan.plan import LaunchPlan, Measured

SCHEMA = 1


def calibration_path(folders: Folders) -> Path:
    return folders.state / "calibration.json"


def load(path: Path, engine_id: str) -> dict[str, Calibration]:
    """Return the calibrations of this engine by architecture; none from a missing, damaged or newer file."""
    engine = _read(path).get(engine_id, {})
    return {arch: _calibration(row) for arch, row in engine.items() if isinstance(row, dict)}


def record(path: Path, engine_id: str, arch: str, plan: LaunchPlan, measured: Measured) -> Calibration:
    """Calibrate by one start and save. Raises OSError when the file cannot be written."""
    from edge.linux.files import write_shared  # late: only reading is on the path of a start

    engines = _read(path)
    engine = engines.setdefault(engine_id, {})
    new = calibrate(_calibration(engine.get(arch, {})), plan, measured)
    engine[arch] = to_builtins(new, enc_hook=str)
    write_shared(path, json.dumps({"schema": SCHEMA, "engines": engines}, indent=1, sort_keys=True) + "\n")
    return new


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return {}
    engines = document.get("engines", {})
    return (
        {key: value for key, value in engines.items() if isinstance(value, dict)} if isinstance(engines, dict) else {}
    )


def _calibration(row: object) -> Calibration:
    if not isinstance(row, dict):
        return Calibration()

    def number(name: str, default: float) -> float:
        value = row.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    context, last = row.get("context_bytes"), row.get("last")
    known = (
        {key: value for key, value in last.items() if key in Measured.__struct_fields__}
        if isinstance(last, dict)
        else None
    )
    return Calibration(
        compute=min(4.0, max(0.25, number("compute", 1.0))),
        context_bytes=context if isinstance(context, int) else None,
        samples=int(number("samples", 0)),
        last=Measured(**known) if known is not None else None,
    )
