"""Watts and tokens per joule on a real NVIDIA GPU: python -m tests.gpu.telemetry URL [OUT.json]

URL is a running edgellm on that GPU. One long completion is made through it while this process reads NVML by itself,
ten times a second, and the driver's own energy counter. Fails unless edgellm's figures agree with both. Needs
nvidia-ml-py.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pynvml

from edge.telemetry.energy import EnergyMeter
from edge.telemetry.nvml import NvmlSource

TOKENS = 2000
FEWEST_S = 8.0  # so that some samples at 1 Hz fall inside
IDLE_S = 5.0


class Watch(threading.Thread):
    """The product's own NVML source at 10 Hz."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.meter, self.source, self.ended = EnergyMeter(), NvmlSource(), threading.Event()
        self.watts: list[tuple[float, float]] = []
        self.hottest_c = 0.0
        self.reasons: set[str] = set()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            sample = self.source.read(time.monotonic())
            assert sample.power_w is not None, "NVML tells no power"
            self.meter.add(sample.at_s, sample.power_w)
            self.watts.append((sample.at_s, sample.power_w))
            self.hottest_c = max(self.hottest_c, sample.temp_c or 0.0)
            self.reasons |= set(sample.throttled)

    def between(self, start_s: float, end_s: float) -> list[float]:
        return [power for at, power in self.watts if start_s <= at <= end_s]


def counter_joules() -> float:
    """The driver's own count over all GPUs, in joules."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000


def complete(url: str, tokens: int) -> int:
    """One answer of that length; the tokens that the engine counted."""
    body = {"prompt": "Write a long story.", "n_predict": tokens, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{url}/completion", json=body, timeout=300)
    answer.raise_for_status()
    return int(answer.json()["tokens_predicted"])


def measure(url: str) -> dict[str, Any]:
    watch = Watch()
    watch.start()
    time.sleep(IDLE_S)
    idle = watch.between(time.monotonic() - IDLE_S + 1, time.monotonic())
    before = telemetry(url)
    counted, began, tokens = counter_joules(), time.monotonic(), 0
    while time.monotonic() - began < FEWEST_S:
        tokens += complete(url, TOKENS)
    ended, counted = time.monotonic(), counter_joules() - counted
    time.sleep(1.5)
    after = telemetry(url)
    watch.ended.set()
    watch.join()
    ours = watch.meter.request(began, ended, tokens)
    assert ours is not None
    busy = watch.between(began, ended)
    (model,) = after["energy"]["models"]
    use, earlier = after["energy"]["models"][model], before["energy"]["models"].get(model, {"joules": 0.0, "tokens": 0})
    return {
        "schema": 1,
        "gpus": [gpu["name"] for gpu in after["gpus"]],
        "seconds": round(ended - began, 2),
        "tokens": tokens,
        "idle_w": round(sum(idle) / len(idle), 1),
        "busy_w": {"mean": round(sum(busy) / len(busy), 1), "highest": round(max(busy), 1)},
        "joules": {"trapezoid_10_hz": round(ours, 1), "driver_counter": round(counted, 1)},
        "edgellm": {"joules": round(use["joules"] - earlier["joules"], 1), "tokens": use["tokens"] - earlier["tokens"]},
        "tokens_per_joule": round(tokens / ours, 3),
        "hottest_c": watch.hottest_c,
        "throttled": sorted(watch.reasons),
        "source": after["source"],
        "rail": after["power"]["rail"],
        "zones": after["temperatures"],
    }


def telemetry(url: str) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{url}/telemetry", timeout=10).json()
    return document


def check(found: dict[str, Any]) -> list[str]:
    """What does not hold."""
    joules, ours = found["joules"], found["edgellm"]
    wrong = []
    if abs(joules["trapezoid_10_hz"] / joules["driver_counter"] - 1) > 0.10:
        wrong.append("the trapezoid at 10 Hz is more than 10 % from the driver's counter")
    if abs(ours["joules"] / joules["trapezoid_10_hz"] - 1) > 0.15:
        wrong.append("edgellm's joules at 1 Hz are more than 15 % from those at 10 Hz")
    if ours["tokens"] != found["tokens"]:
        wrong.append(f"edgellm counted {ours['tokens']} tokens of {found['tokens']}")
    if found["source"] != "nvml":
        wrong.append(f"the source is {found['source']}, not nvml")
    if found["busy_w"]["mean"] <= found["idle_w"]:
        wrong.append("the GPU drew no more than when idle: was it used at all?")
    return wrong


def main(url: str, out: Path | None) -> int:
    found = measure(url.rstrip("/"))
    found["wrong"] = check(found)
    text = json.dumps(found, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None))
