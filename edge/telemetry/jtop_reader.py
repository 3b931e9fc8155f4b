"""Read jtop's service and print JSON lines: a program of its own, run with the interpreter that has jetson-stats.

    python jtop_reader.py [--interval 5]     lines on stdout; commands ("interval S") on stdin; ends when stdin does

It imports nothing of edgellm and needs Python 3.8 only, because client and service must agree on their version and on
Python's pickle (FC-65), because a client can hang without limit, stays broken after a restart of the service (FC-70),
changes multiprocessing's start method, and is under the AGPL. It ends after any fault with an error line; its parent
starts a new one.

A sample: {"event": "sample", "at_s": CLOCK_MONOTONIC, "interval_s", "power", "rails", "temps_c", "gpus", "memory", ...}
The last line of a reader that ends: {"event": "error", "kind": KIND, "message": TEXT}
Units are in the names: W, °C, Hz, bytes, ratios. Unknown values are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import threading
import time
from typing import Any

SCHEMA = 1
START_DEADLINE_S = 10.0  # the client's start() waits without limit when the service is frozen
SLOWEST_S = 10.0
QUIET_S = 4.0
TRIES = 3  # for our interval, before that of another client is accepted
LATE_FACTOR = 3.0  # a sample later than this many intervals is late (jtop's own measure)
FEWEST_LATE_S = 5.0
OFFLINE_C = -256.0
MAX_RAIL_W = 500.0
KHZ_RANGE = (10000, 10000000)  # jtop gives Thor's clocks in MHz or kHz: a value outside is not trusted

# Beginnings of the messages of JtopException, the only class it has. Later words differ between 4.3.2 and 7.2.2.
KINDS = (
    ("The jtop.service is not active", "not_active"),
    ("I can't access jtop.service", "no_access"),
    ("Mismatch version", "version_mismatch"),
    ("Mismatch of Python", "python_mismatch"),
    ("Authentication", "authentication"),
    ("Lost connection", "lost"),
)


def kind_of(error: BaseException) -> str:
    """Return a stable word for an error of the client, which raises raw socket errors too."""
    text = str(error)
    for beginning, kind in KINDS:
        if text.startswith(beginning):
            return kind
    if isinstance(error, ImportError):
        return "not_installed"
    return "lost" if isinstance(error, (OSError, EOFError)) else "failed"


def write_line(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


# -- from jtop's shapes to ours ---------------------------------------------------------------------------------------


def rails_of(power: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert rails from mW, mV and mA, without the USB-C ports (ucsi…) that 4.3.2 lists as rails."""
    rails = []
    for name, rail in power.get("rail", {}).items():
        watts = rail.get("power", -1) / 1000
        if rail.get("online", True) and not name.lower().startswith("ucsi") and 0 <= watts <= MAX_RAIL_W:
            row = {"name": name, "power_w": watts}
            for ours, theirs in (("voltage_v", "volt"), ("current_a", "curr")):
                if theirs in rail:
                    row[ours] = rail[theirs] / 1000
            rails.append(row)
    return rails


def power_of(power: dict[str, Any], rails: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the total: the rail that jtop names, else the sum of the rails."""
    total = power.get("tot", {})
    if total.get("name") and 0 <= total.get("power", -1) / 1000 <= MAX_RAIL_W:
        return {"power_w": total["power"] / 1000, "rail": total["name"], "parts": [total["name"]]}
    if not rails:
        return None
    parts = [rail["name"] for rail in rails]
    return {"power_w": sum(rail["power_w"] for rail in rails), "rail": "sum of rails", "parts": parts}


def temps_of(temperature: dict[str, Any]) -> dict[str, float]:
    """Return online zones in °C. "tmp451 tboard" (7.x) and "tboard" (4.3) are the same sensor."""
    return {
        name.split()[-1].lower(): float(zone["temp"])
        for name, zone in temperature.items()
        if zone.get("online", True) and zone.get("temp", OFFLINE_C) > OFFLINE_C
    }


def gpu_of(name: str, gpu: dict[str, Any]) -> dict[str, Any]:
    status, freq = gpu.get("status", {}), gpu.get("freq", {})
    row: dict[str, Any] = {"name": name}
    if isinstance(status.get("load"), (int, float)) and 0 <= status["load"] <= 100:
        row["load_ratio"] = status["load"] / 100
    for ours, theirs in (("clock_hz", "cur"), ("max_clock_hz", "max")):
        if KHZ_RANGE[0] <= (freq.get(theirs) or 0) <= KHZ_RANGE[1]:
            row[ours] = freq[theirs] * 1000
    names = {"temp_c": "temperature", "power_w": "power_draw"}
    names.update({"memory_used_bytes": "memory_used", "memory_total_bytes": "memory_total"})
    row.update({ours: status[theirs] for ours, theirs in names.items() if status.get(theirs) is not None})
    return row


def memory_of(memory: dict[str, Any]) -> dict[str, Any]:
    """Return the EMC and the GPU's part of the RAM. jtop knows no MemAvailable, so RAM comes from other sources."""
    row: dict[str, Any] = {}
    emc = memory.get("EMC", {})
    if emc.get("cur") and emc.get("online", True):
        row["emc_clock_hz"] = emc["cur"] * 1000
        row["emc_load_ratio"] = min(1.0, emc.get("val", 0) / 100)
    shared = memory.get("RAM", {}).get("shared")
    if shared is not None:
        row["gpu_used_bytes"] = shared * 1024
    return row


def fan_of(fans: dict[str, Any]) -> dict[str, Any] | None:
    for fan in fans.values():
        row: dict[str, Any] = {}
        if fan.get("speed"):
            row["speed_ratio"] = fan["speed"][0] / 100
        if fan.get("rpm"):
            row["rpm"] = int(fan["rpm"][0])
        return row or None
    return None


def describe(client: Any) -> dict[str, Any]:
    """Return one sample of a connected client in our units."""
    rails = rails_of(client.power)
    mode, clocks = client.nvpmodel, client.jetson_clocks
    sample: dict[str, Any] = {
        "power": power_of(client.power, rails),
        "rails": rails,
        "temps_c": temps_of(client.temperature),
        "gpus": [gpu_of(name, gpu) for name, gpu in client.gpu.items()],
        "fan": fan_of(client.fan),
        "power_mode": None if mode is None else {"id": int(mode.id), "name": str(mode.name)},
        "jetson_clocks": None if clocks is None else bool(clocks),
        "processes": [{"pid": p[0], "gpu_memory_bytes": p[8] * 1024, "name": p[9]} for p in client.processes],
    }
    sample.update(memory_of(client.memory))
    return {key: value for key, value in sample.items() if value is not None}


# -- the loop ---------------------------------------------------------------------------------------------------------


class JtopReader:
    """A thread that samples and may hang, and a deadline beside it.

    The service has one interval for all clients. The first client sets it; it is free again after QUIET_S without any
    client (three of the last interval, if that is longer). To change it we disconnect and wait; while another client
    keeps the service busy, its interval is accepted.
    """

    def __init__(self, interval_s: float) -> None:
        self.requested_s = interval_s
        self.deadline_s = time.monotonic() + START_DEADLINE_S
        self.ended: dict[str, Any] | None = None
        self.done = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            requested_s, interval_s, tries = self.requested_s, self.requested_s, 1
            while True:
                found_s = self._samples(requested_s, interval_s, picky=tries > 0)
                if self.requested_s != requested_s:
                    requested_s = interval_s = self.requested_s
                    tries = TRIES
                elif tries > 0:
                    tries -= 1
                else:
                    interval_s = found_s
                    continue
                if requested_s < found_s:
                    self._connect(requested_s).close()  # it waits for three of the last interval: make that short
                self._alive(2 * QUIET_S)
                time.sleep(QUIET_S)
        except BaseException as error:  # any error of a client, raw socket errors included, ends this process
            self.ended = {"kind": kind_of(error), "message": " ".join(str(error).split()) or type(error).__name__}
        self.done.set()

    def _alive(self, for_s: float) -> None:
        self.deadline_s = time.monotonic() + for_s

    def _connect(self, interval_s: float) -> Any:
        from jtop import jtop  # late: a missing package is reported like any other error

        client = jtop(interval=interval_s)
        self._alive(START_DEADLINE_S + LATE_FACTOR * interval_s)
        client.start()
        return client

    def _samples(self, requested_s: float, interval_s: float, picky: bool) -> float:
        """Sample on one connection until its interval no longer suits; return the service's interval."""
        client = self._connect(interval_s)
        try:
            written_s = float("-inf")
            theirs_s = float(client.interval)
            suits = theirs_s <= 2 * interval_s and not (picky and theirs_s < requested_s / 2)
            while suits and self.requested_s == requested_s:
                self._alive(max(FEWEST_LATE_S, LATE_FACTOR * interval_s))
                if not client.ok():
                    raise EOFError("the service stopped sending")
                now = time.monotonic()
                if now - written_s > 0.8 * requested_s:
                    written_s = now
                    head = {
                        "schema": SCHEMA,
                        "event": "sample",
                        "at_s": now,
                        "interval_s": max(requested_s, interval_s),
                    }
                    write_line({**head, **describe(client)})
            return theirs_s
        finally:
            client.close()

    def watch(self, stdin: int) -> int:
        """Read commands ("interval S") until stdin ends (returns 0), or sampling ends or hangs (returns 1)."""
        rest = b""
        while not self.done.is_set():
            ready, _, _ = select.select([stdin], [], [], 0.25)
            if ready:
                data = os.read(stdin, 4096)
                if not data:
                    return 0
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.command(line)
            if time.monotonic() > self.deadline_s and not self.done.is_set():
                self.ended = {"kind": "frozen", "message": "the jtop service does not answer"}
                break
        write_line({"schema": SCHEMA, "event": "error", **(self.ended or {"kind": "failed", "message": ""})})
        return 1

    def command(self, line: bytes) -> None:
        words = line.split()
        if words[:1] == [b"interval"] and words[1:] and words[1].replace(b".", b"", 1).isdigit():
            self.requested_s = min(SLOWEST_S, max(1.0, float(words[1])))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="jtop's values as JSON lines")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between samples (1 at least)")
    reader = JtopReader(max(1.0, parser.parse_args(arguments).interval))
    reader.start()
    return reader.watch(sys.stdin.fileno())


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a hung client thread must not block the exit
