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
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

SCHEMA = 1
SOCKET = "/run/jtop.sock"  # fixed in jtop.service.JTOP_PIPE
START_DEADLINE_S = 10.0  # the client's start() waits without limit when the service is frozen
SLOWEST_S = 10.0  # longer intervals save nothing: the service costs 3.7 % of a core at 1 s
QUIET_S = 4.0  # the service stops its timer after max(3 s, three intervals) without a client
TRIES = 3  # for our interval, before that of another client is accepted
LATE_FACTOR = 3.0  # a sample later than this many intervals is late (jtop's own measure)
FEWEST_LATE_S = 5.0  # a slow `nvpmodel -q` makes the service skip a second now and then
OFFLINE_C = -256.0  # jtop's value of a sensor that is off (FC-62)
MAX_RAIL_W = 500.0  # almost four times the largest module
LARGEST = 1e15  # no sensor's value; JSON has no infinity
# What a field of another shape raises.
ODD = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
# What the connection raises: a client's own errors begin as one of KINDS.
CONNECTION = (ConnectionError, TimeoutError, EOFError)
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


class Frozen(Exception):
    """The service holds its socket and sends nothing."""


def accepts() -> bool:
    """Return whether the service's socket takes connections: the kernel takes them for a frozen process too."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(SOCKET)
        except OSError:
            return False
    return True


def kind_of(error: BaseException) -> str:
    """Return a stable word for an error of the client, which raises raw socket errors too."""
    text = str(error)
    for beginning, kind in KINDS:
        if text.startswith(beginning):
            return kind
    if isinstance(error, Frozen):
        return "frozen"
    if isinstance(error, ImportError):
        return "not_installed"
    return "lost" if isinstance(error, (OSError, EOFError)) else "failed"


def of_connection(error: BaseException) -> bool:
    """Return whether an error of a property is the service's end, not a fault of that property.

    multiprocessing raises a plain OSError for a closed handle, without a number.
    """
    known = any(str(error).startswith(beginning) for beginning, _ in KINDS)
    return known or isinstance(error, CONNECTION) or (isinstance(error, OSError) and error.errno is None)


def write_line(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


# -- from jtop's shapes to ours ---------------------------------------------------------------------------------------


def number(value: Any) -> Any:
    """Return a finite number. Raises TypeError or ValueError for anything else, a text and NaN among it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.40} is no number")
    if not abs(value) <= LARGEST:
        raise ValueError(f"{value!r:.40} is out of range")
    return value


def each(items: Iterable[Any], convert: Callable[..., Any]) -> list[Any]:
    """Convert items; one of another shape is left out, and so is one that converts to None."""
    rows = []
    for item in items:
        try:
            row = convert(*item)
        except ODD:
            continue
        if row is not None:
            rows.append(row)
    return rows


def filled(row: dict[str, Any], source: Any, names: dict[str, Any], factor: float = 1) -> dict[str, Any]:
    """Add the values of `source` that are numbers: `names` maps ours to theirs."""
    for ours, theirs in names.items():
        try:
            row[ours] = number(source[theirs]) * factor
        except ODD:
            continue
    return row


def rails_of(power: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert rails from mW, mV and mA, without the USB-C ports (ucsi…) that 4.3.2 lists as rails."""

    def convert(name: str, rail: dict[str, Any]) -> dict[str, Any] | None:
        watts = number(rail["power"]) / 1000
        if not rail.get("online", True) or name.lower().startswith("ucsi") or not 0 <= watts <= MAX_RAIL_W:
            return None
        return filled({"name": name, "power_w": watts}, rail, {"voltage_v": "volt", "current_a": "curr"}, 1 / 1000)

    return each(power.get("rail", {}).items(), convert)


def power_of(power: dict[str, Any], rails: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the total: the rail that jtop names, else the sum of the rails."""
    total = power.get("tot", {})
    if total.get("name") and 0 <= number(total.get("power", -1)) / 1000 <= MAX_RAIL_W:
        return {"power_w": total["power"] / 1000, "rail": total["name"], "parts": [total["name"]]}
    if not rails:
        return None
    parts = [rail["name"] for rail in rails]
    return {"power_w": sum(rail["power_w"] for rail in rails), "rail": "sum of rails", "parts": parts}


def temps_of(temperature: dict[str, Any]) -> dict[str, float]:
    """Return online zones in °C. "tmp451 tboard" (7.x) and "tboard" (4.3) are the same sensor."""

    def convert(name: str, zone: dict[str, Any]) -> tuple[str, float] | None:
        if not zone.get("online", True) or number(zone["temp"]) <= OFFLINE_C:
            return None
        return name.split()[-1].lower(), float(zone["temp"])

    return dict(each(temperature.items(), convert))


def gpu_of(name: str, gpu: dict[str, Any]) -> dict[str, Any]:
    status, freq = gpu.get("status", {}), gpu.get("freq", {})
    names = {"temp_c": "temperature", "power_w": "power_draw"}
    names.update({"memory_used_bytes": "memory_used", "memory_total_bytes": "memory_total"})
    row = filled({"name": name}, status, names)
    load = filled({}, status, {"load_ratio": "load"}).get("load_ratio", -1)
    if 0 <= load <= 100:
        row["load_ratio"] = load / 100
    for ours, khz in filled({}, freq, {"clock_hz": "cur", "max_clock_hz": "max"}).items():
        if KHZ_RANGE[0] <= khz <= KHZ_RANGE[1]:
            row[ours] = khz * 1000
    return row


def memory_of(memory: dict[str, Any]) -> dict[str, Any]:
    """Return the EMC and the GPU's part of the RAM. jtop knows no MemAvailable, so RAM comes from other sources."""
    row: dict[str, Any] = filled({}, memory.get("RAM", {}), {"gpu_used_bytes": "shared"}, 1024)
    emc = memory.get("EMC", {})
    if isinstance(emc, dict) and emc.get("cur") and emc.get("online", True):
        filled(row, emc, {"emc_clock_hz": "cur"}, 1000)
        load = filled({}, {"val": 0, **emc}, {"emc_load_ratio": "val"}, 1 / 100)
        row.update({name: min(1.0, value) for name, value in load.items()})
    return row


def fan_of(fans: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first fan of which something is known."""
    for fan in fans.values():
        row: dict[str, Any] = {}
        for ours, theirs, unit in (("speed_ratio", "speed", 1 / 100), ("rpm", "rpm", 1)):
            try:
                row[ours] = number(fan[theirs][0]) * unit
            except ODD:
                continue
        if row:
            return row
    return None


def process_of(*row: Any) -> dict[str, Any]:
    """Return pid, name and GPU memory of a row of ten columns; 4.3.2 and 7.x give the memory in kB."""
    return filled({"pid": int(number(row[0])), "name": str(row[9])}, row, {"gpu_memory_bytes": 8}, 1024)


def describe(client: Any) -> dict[str, Any]:
    """Return one sample of a connected client in our units. Fields of another shape are left out (`odd`)."""
    sample: dict[str, Any] = {}
    odd: list[str] = []

    def add(name: str, read: Callable[[], Any]) -> None:
        try:
            value = read()
        except Exception as error:
            if of_connection(error):
                raise
            odd.append(f"{name}: {type(error).__name__}: {error!s:.80}")
        else:
            sample.update({} if value is None else {name: value})

    add("rails", lambda: rails_of(client.power))
    add("power", lambda: power_of(client.power, sample.get("rails", [])))
    add("temps_c", lambda: temps_of(client.temperature))
    add("gpus", lambda: each(client.gpu.items(), gpu_of))
    add("fan", lambda: fan_of(client.fan))
    add("power_mode", lambda: client.nvpmodel and {"id": int(client.nvpmodel.id), "name": str(client.nvpmodel.name)})
    add("jetson_clocks", lambda: None if client.jetson_clocks is None else bool(client.jetson_clocks))
    add("processes", lambda: each(client.processes, process_of))
    add("memory", lambda: memory_of(client.memory))
    sample.update(sample.pop("memory", {}))
    if odd:
        sample["odd"] = odd
    return sample


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
                    raise Frozen("the service stopped sending") if accepts() else EOFError("the service ended")
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
