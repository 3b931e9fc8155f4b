"""Combine sampler, governor and energy meter into the telemetry of one running application.

telemetry = Telemetry.of(board, config.telemetry, config.thermal, models_folder)
telemetry.on_limit(...)          admission and supervisor follow the governor
await telemetry.run()            the task
telemetry.document()             /telemetry; summary() for /healthz
telemetry.energy                 begin and end of requests
with telemetry.trace() as points ten samples a second while a model starts
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from edge.board.board import Board
from edge.config.values import TelemetryConfig, ThermalConfig
from edge.telemetry import nvml
from edge.telemetry.document import energy_document, governor_document, history_document, notes, sample_document
from edge.telemetry.energy import SLEEP_MEAN_S, SLEEP_SETTLES_S, EnergyMeter, SleepPower, mean_power_w
from edge.telemetry.governor import DWELL_S, AdmissionLimit, ChangeReporter, Decision, Governor, Level
from edge.telemetry.host import HostSource
from edge.telemetry.jtop import JtopSource
from edge.telemetry.sample import Sample
from edge.telemetry.sampler import Sampler, TracePoint
from edge.telemetry.source import Clock, SensorSource
from edge.telemetry.sysfs import SysfsSource, sensors_of

log = logging.getLogger("edge.telemetry")

JTOP_SHARE = Path("/run/edgellm-jtop/share.sock")  # edgellm-jtop.service


class Telemetry:
    """The telemetry of one application, used on one event loop."""

    def __init__(self, sampler: Sampler, governor: Governor) -> None:
        self.sampler = sampler
        self.governor = governor
        self.decision = Decision(Level.UNKNOWN, AdmissionLimit(), "nothing measured yet")
        self.slots: Callable[[], int] = lambda: 1  # how many requests the engines take at once
        self.missing: dict[str, tuple[str, str]] = {}  # sources that this board should have: (because, hint)
        self._pauses_s = (10.0, 300.0)  # before sampling restarts after a failure: the first, and the longest
        self._listeners: list[Callable[[AdmissionLimit], None]] = []
        self._history: dict[str, Any] | None = None
        self._changes = ChangeReporter()
        self._asleep_s: dict[str, float] = {}  # models that sleep, since when
        self.sleep_power: dict[str, SleepPower] = {}  # by model, of its last sleep
        sampler.on_sample(self._judge)

    @classmethod
    def of(
        cls,
        board: Board,
        settings: TelemetryConfig | None = None,
        thermal: ThermalConfig | None = None,
        disk: Path = Path("/"),
        *,
        root: Path = Path("/"),
        jtop: JtopSource | None = None,
        dwell_s: float = DWELL_S,
        clock: Clock = time.monotonic,
    ) -> Telemetry:
        """Build the telemetry of a board. `root`, `jtop`, `dwell_s` and `clock` replace the real ones in tests."""
        settings, thermal = settings or TelemetryConfig(), thermal or ThermalConfig()
        sources: list[SensorSource] = [SysfsSource(root, board), HostSource(disk)]
        # NVML reports the integrated GPU of a Thor (JetPack 7), and not that of an Orin.
        thor = board.soc is not None and "thor" in board.soc.lower()
        asked = root == Path("/") and (thor or (bool(board.gpus) and board.soc is None))
        if asked and nvml.installed():
            sources.append(nvml.NvmlSource(integrated=board.unified_memory))
        if jtop is None and settings.jtop == "auto" and board.soc is not None:
            jtop = JtopSource(share=JTOP_SHARE, total=sensors_of(board).total)
        sampler = Sampler(sources, jtop, interval_s=settings.interval_s, clock=clock)
        telemetry = cls(sampler, Governor(thermal, dwell_s))
        if asked and not nvml.installed():
            telemetry.missing["nvml"] = ("nvidia-ml-py is not installed", "pip install 'edgellm[nvml]'")
        return telemetry

    def follow(self, other: Telemetry) -> None:
        """Read the sensors of `other`, which was made for a board that was not known completely before."""
        self.sampler.follow(other.sampler)
        self.missing = other.missing

    @property
    def energy(self) -> EnergyMeter:
        return self.sampler.energy

    @property
    def latest(self) -> Sample | None:
        return self.sampler.latest

    async def run(self) -> None:
        """Sample until cancelled. A failure is logged and sampling restarts; meanwhile nothing is limited."""
        pause_s = self._pauses_s[0]
        while True:
            began_s = self.sampler.clock()
            try:
                await self.sampler.run()
            except Exception as error:  # any: a level that is no longer updated is worse than none
                log.warning("telemetry failed and restarts: %s: %s", type(error).__name__, error)
            self._decide(Decision(Level.UNKNOWN, AdmissionLimit(), "nothing is measured: telemetry failed"))
            # It ran for a while: the next failure is a new one and gets the short pause again.
            if self.sampler.clock() - began_s > self._pauses_s[1]:
                pause_s = self._pauses_s[0]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pauses_s[1])

    def trace(self) -> AbstractContextManager[list[TracePoint]]:
        return self.sampler.trace()

    def falls_asleep(self, model_id: str) -> None:
        """Note that a model begins to go to sleep: what power that saves is known SLEEP_MEAN_S after it settled."""
        now = self._asleep_s[model_id] = self.sampler.clock()
        self.sleep_power[model_id] = SleepPower(self._mean_w(now - SLEEP_MEAN_S, now))

    def wakes(self, model_id: str) -> None:
        """Note that a model starts. A sleep that was too short to be measured has no power of its own."""
        self._asleep_s.pop(model_id, None)

    def _measure_sleep(self) -> None:
        for model_id, began_s in list(self._asleep_s.items()):
            settled_s = began_s + SLEEP_SETTLES_S
            if self.sampler.clock() >= settled_s + SLEEP_MEAN_S:
                del self._asleep_s[model_id]
                after_w = self._mean_w(settled_s, settled_s + SLEEP_MEAN_S)
                self.sleep_power[model_id] = SleepPower(self.sleep_power[model_id].before_w, after_w)

    def _mean_w(self, from_s: float, to_s: float) -> float | None:
        points = ((point.at_s, point.power_w) for point in self.sampler.history.seconds)
        return mean_power_w(points, from_s, to_s)

    def on_limit(self, listener: Callable[[AdmissionLimit], None]) -> None:
        """Register a callback for changes of the governor's limit, on the event loop."""
        self._listeners.append(listener)

    def summary(self) -> dict[str, Any]:
        """Build the `telemetry` of /healthz."""
        latest = self.latest
        age_s = None if latest is None else round(latest.age_s(self.sampler.clock()), 2)
        return {"source": latest.source if latest else "none", "age_s": age_s, "thermal": self.decision.level.name}

    def status(self) -> dict[str, Any]:
        """Build the summary with power and temperature, for `edgellm status`."""
        latest = self.latest
        power = latest.power if latest else None
        figures = {"power_w": power.power_w if power else None, "rail": power.rail if power else None}
        return {**self.summary(), **figures, "temp_c": latest.temp_c if latest else None}

    def document(self, *, history: bool = True) -> dict[str, Any]:
        """Build /telemetry. Each call makes jtop be polled every second for a while."""
        self.sampler.watched()
        sampler, now = self.sampler, self.sampler.clock()
        rate = sampler.tokens_per_s()
        document = {
            "schema": 1,
            **sample_document(sampler.latest, now),
            "thermal": self.decision.level.name,
            "governor": governor_document(self.decision, self.governor.config),
            "tokens_per_s": rate,
            "energy": energy_document(sampler.energy),
            "sleep": {model: to_builtins(power) for model, power in self.sleep_power.items()},
            "sources": self._sources(now),
            "notes": notes(sampler.latest, sampler.fresh(now), rate),
        }
        if history:
            self._history = self._history or history_document(sampler.history, sampler.wall() - now)
            document["history"] = self._history
        return document

    def _sources(self, now: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: {"state": "unavailable", "age_s": None, "because": because, "hint": hint}
            for name, (because, hint) in self.missing.items()
        }
        for reader in self.sampler.readers:
            state = "failed" if reader.error else "ok" if reader.fresh(now) else "silent"
            found[reader.name] = {
                "state": state,
                "age_s": _age(reader.latest, now),
                "because": reader.error,
                "hint": None,
            }
        jtop = self.sampler.jtop
        if jtop is not None:
            fault = jtop.fault
            state = "unavailable" if fault else "ok" if jtop.fresh(now) else "silent"
            because, hint = (fault.because, fault.hint) if fault else (None, None)
            found["jtop"] = {"state": state, "age_s": _age(jtop.latest, now), "because": because, "hint": hint}
        return found

    def _judge(self, sample: Sample | None) -> None:
        """Judge a sample: decide, log one line per change, pass limits on."""
        self._history = None
        self._measure_sleep()
        before = self.decision
        slots = max(1, self.slots())
        decision = self.governor.decide(sample, self.sampler.clock(), active=self.energy.open(), slots=slots)
        if decision.changed:
            write = log.warning if decision.level > before.level else log.info
            write("thermal: %s: %s%s", decision.level.name, decision.because, _effect(decision.limit, slots))
        if decision.warning is not None and before.warning is None:
            log.warning("thermal: %s", decision.warning)
        self._decide(decision)
        if sample is not None:
            self._log(sample)

    def _log(self, sample: Sample) -> None:
        mode = self._changes.mode(sample)
        if mode is not None:
            log.info("%s", mode)
        for line in self._changes.warnings(sample, self.sampler.clock(), self.sampler.tokens_per_s()):
            log.warning("%s", line)

    def _decide(self, decision: Decision) -> None:
        before, self.decision = self.decision, decision
        if decision.limit != before.limit:
            for listener in self._listeners:
                try:
                    listener(decision.limit)
                except Exception as error:  # the other listeners must still get the limit
                    log.warning("thermal: a listener failed: %s: %s", type(error).__name__, error)


def _effect(limit: AdmissionLimit, slots: int) -> str:
    """Describe a limit of temperature for the log; that of power is in its reason."""
    if limit.cause == "power":
        return ""
    if limit.drain:
        return "; the engine is stopped until the board is cool"
    if limit.hold_new:
        return "; new requests wait"
    return "; fewer requests at once" if max(1, int(slots * limit.fraction)) < slots else ""


def _age(sample: Sample | None, now: float) -> float | None:
    return None if sample is None else round(sample.age_s(now), 2)
