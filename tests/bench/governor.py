"""The power limit on simulated boards: `python -m tests.bench.governor [--hours N]` prints a Markdown table.

Each row is the worst of three request lengths (0.5 to 3, 5 to 30 and 60 to 200 s), with requests always waiting, on a
board of 8 W idle, 26.5 W with one request and 6 W for each further one. `speed` is work per second against the best mix
of two numbers of requests at that mean power. Deterministic; exits with 1 above a limit of the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from edge.config.values import ThermalConfig
from tests.telemetry.plant import Plant, best_speed, simulate

WORK_S = ((0.5, 3.0), (5.0, 30.0), (60.0, 200.0))
MOST_MEAN, MOST_CHANGES = 1.02, 20.0


def rows(hours: float) -> Iterator[tuple[str, bool]]:
    for slots in (1, 4):
        for limit_w in (12.0, 20.0, 30.0, 40.0):
            for tau_s in (10.0, 60.0, 300.0):
                plants = [Plant(slots, power_tau_s=tau_s, work_s=work_s) for work_s in WORK_S]
                results = [simulate(plant, ThermalConfig(max_watts=limit_w), hours=hours) for plant in plants]
                mean = max(result.mean_w for result in results)
                changes = max(result.changes_per_hour for result in results)
                speed = min(r.speed / best_speed(p, limit_w) for p, r in zip(plants, results, strict=True))
                held = mean <= MOST_MEAN * limit_w and changes <= MOST_CHANGES
                text = f"| {slots} | {limit_w:g} W | {tau_s:g} s | {mean:.1f} W | {changes:.1f} | {speed:.0%} |"
                yield text, held


def main() -> int:
    parser = argparse.ArgumentParser(description="the power limit on simulated boards")
    parser.add_argument("--hours", type=float, default=2.0)
    hours = parser.parse_args().hours
    print("| slots | max_watts | time constant | mean power | level changes an hour | speed |")
    print("|---|---|---|---|---|---|")
    good = True
    for text, held in rows(hours):
        print(text, flush=True)
        good = good and held
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
