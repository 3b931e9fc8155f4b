"""`edgellm up` whose sensors are a fake board's: up_on_board.py ROOT SECONDS [--act] [--watts=N] [options of up].

SECONDS is the governor's dwell time, so that tests need not wait for boards to cool. All else is the product's own.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from edge.board.probe import probe
from edge.config.values import TelemetryConfig, ThermalConfig
from edge.daemon import app, launch
from edge.telemetry.jtop import JtopSource
from edge.telemetry.telemetry import Telemetry


def main(root: Path, dwell_s: float, act: bool, watts: float | None, arguments: list[str]) -> int:
    def run(launched: app.Launched) -> int:
        thermal = ThermalConfig(act=act, max_watts=watts)
        jtop = JtopSource(pauses_s=(0.2, 1.0))
        settings = TelemetryConfig(interval_s=1.0 if dwell_s >= 1 else 0.1)
        telemetry = Telemetry.of(probe(root), settings, thermal, root=root, dwell_s=dwell_s, jtop=jtop)
        return asyncio.run(app.App(launched, telemetry).run())

    app.run = run
    return launch.up(arguments)


if __name__ == "__main__":
    given = sys.argv[3:]
    most = next((float(word.partition("=")[2]) for word in given if word.startswith("--watts=")), None)
    rest = [word for word in given if word != "--act" and not word.startswith("--watts=")]
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), "--act" in given, most, rest))
