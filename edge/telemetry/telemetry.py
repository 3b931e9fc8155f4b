"""Everything about power and temperature of one running edgellm, put together: what the application holds.

telemetry = Telemetry.of(board, config.telemetry, config.thermal, models_folder)
telemetry.on_limit(...)          admission and supervisor follow the governor
await telemetry.run()            the task
telemetry.document()             /telemetry and the summary in /healthz
telemetry.energy                 requests: begin, request
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

from edge.board.board import Board
from edge.config.values import TelemetryConfig, ThermalConfig
from edge.telemetry import nvml
from edge.telemetry.document import energy_document, governor_document, history_document, notes, sample_document
from edge.telemetry.energy import EnergyMeter
from edge.telemetry.governor import AdmissionLimit, Decision, Governor, Level, Limits
from edge.telemetry.host import HostSource
from edge.telemetry.jtop import JtopSource
from edge.telemetry.news import News
from edge.telemetry.sample import Sample
from edge.telemetry.sampler import Sampler, TracePoint
from edge.telemetry.source import Clock, Source
from edge.telemetry.sysfs import SysfsSource

log = logging.getLogger("edge.telemetry")

JTOP_SHARE = Path("/run/edgellm-jtop/share.sock")  # edgellm-jtop.service


class Telemetry:
    """Lives on one event loop."""

    def __init__(self, sampler: Sampler, governor: Governor, *, pauses_s: tuple[float, float] = (10.0, 300.0)) -> None:
        """`pauses_s`: the first and the longest before it is tried again after a fault of ours."""
        self.sampler = sampler
        self.governor = governor
        self.decision = Decision(Level.NOMINAL, AdmissionLimit(), "nothing measured yet")
        self.missing: dict[str, tuple[str, str]] = {}  # sources that this board should have: (because, hint)
        self._pauses_s = pauses_s
        self._listeners: list[Callable[[AdmissionLimit], None]] = []
        self._history: dict[str, Any] | None = None
        self._news = News()
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
        limits: Limits | None = None,
        clock: Clock = time.monotonic,
    ) -> Telemetry:
        """`root` stands in for "/", `jtop` for the service's own and `limits` for those of `thermal` (tests)."""
        settings, thermal = settings or TelemetryConfig(), thermal or ThermalConfig()
        sources: list[Source] = [SysfsSource(root), HostSource(disk)]
        thor = board.soc is not None and "thor" in board.soc.lower()
        asked = root == Path("/") and (thor or (bool(board.gpus) and board.soc is None))
        if asked and nvml.installed():
            sources.append(nvml.NvmlSource(integrated=board.unified_memory))
        guest = jtop or (JtopSource(share=JTOP_SHARE) if settings.jtop == "auto" and board.soc is not None else None)
        sampler = Sampler(sources, guest, interval_s=settings.interval_s, clock=clock)
        telemetry = cls(sampler, Governor(limits or limits_of(thermal)))
        if asked and not nvml.installed():
            telemetry.missing["nvml"] = ("nvidia-ml-py is not installed", "pip install 'edgellm[nvml]'")
        return telemetry

    @property
    def energy(self) -> EnergyMeter:
        return self.sampler.energy

    @property
    def latest(self) -> Sample | None:
        return self.sampler.latest

    async def run(self) -> None:
        """Until cancelled. Nothing in here can stop a model; at worst there are no figures.

        A fault of ours is said, and everything is admitted as if nothing were measured until samples come again.
        """
        pause_s = self._pauses_s[0]
        while True:
            began_s = self.sampler.clock()
            try:
                await self.sampler.run()
            except Exception as error:  # whatever it is: a level that nobody revises any more is worse than none
                log.warning("telemetry failed, and is tried again: %s: %s", type(error).__name__, error)
            self._decide(Decision(Level.NOMINAL, AdmissionLimit(), "nothing is measured: telemetry failed"))
            if self.sampler.clock() - began_s > self._pauses_s[1]:
                pause_s = self._pauses_s[0]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pauses_s[1])

    def trace(self) -> AbstractContextManager[list[TracePoint]]:
        return self.sampler.trace()

    def on_limit(self, listener: Callable[[AdmissionLimit], None]) -> None:
        """Called on the event loop whenever the governor's limit changes."""
        self._listeners.append(listener)

    def summary(self) -> dict[str, Any]:
        """/healthz's `telemetry`."""
        latest = self.latest
        age_s = None if latest is None else round(latest.age_s(self.sampler.clock()), 2)
        return {"source": latest.source if latest else "none", "age_s": age_s, "thermal": self.decision.level.name}

    def status(self) -> dict[str, Any]:
        """The summary with the two figures that people ask for first."""
        latest = self.latest
        power = latest.power if latest else None
        figures = {"power_w": power.power_w if power else None, "rail": power.rail if power else None}
        return {**self.summary(), **figures, "temp_c": latest.temp_c if latest else None}

    def document(self, *, history: bool = True) -> dict[str, Any]:
        """/telemetry. Asking counts as watching: jtop is read every second for a while."""
        self.sampler.watched()
        sampler, now = self.sampler, self.sampler.clock()
        rate = sampler.history.rate()
        limits = self.governor.limits
        document = {
            "schema": 1,
            **sample_document(sampler.latest, now),
            "thermal": self.decision.level.name,
            "governor": governor_document(self.decision, limits.act, limits.max_watts),
            "tokens_per_s": rate,
            "energy": energy_document(sampler.energy),
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
            trouble = jtop.trouble
            state = "unavailable" if trouble else "ok" if jtop.fresh(now) else "silent"
            because, hint = (trouble.because, trouble.hint) if trouble else (None, None)
            found["jtop"] = {"state": state, "age_s": _age(jtop.latest, now), "because": because, "hint": hint}
        return found

    def _judge(self, sample: Sample | None) -> None:
        """With each sample: the level, who follows it, and one line per change."""
        self._history = None
        before = self.decision
        decision = self.governor.decide(sample, self.sampler.clock())
        if decision.changed:
            told = log.warning if decision.level > before.level else log.info
            told("thermal: %s: %s%s", decision.level.name, decision.because, _what(decision.limit))
        self._decide(decision)
        if sample is not None:
            self._tell(sample)

    def _tell(self, sample: Sample) -> None:
        mode = self._news.mode(sample)
        if mode is not None:
            log.info("%s", mode)
        for line in self._news.warnings(sample, self.sampler.clock(), self.sampler.history.rate()):
            log.warning("%s", line)

    def _decide(self, decision: Decision) -> None:
        before, self.decision = self.decision, decision
        if decision.limit != before.limit:
            for listener in self._listeners:
                try:
                    listener(decision.limit)
                except Exception as error:  # one who cannot follow must not keep the others from it
                    log.warning("thermal: a follower failed: %s: %s", type(error).__name__, error)


def _what(limit: AdmissionLimit) -> str:
    if limit.drain:
        return "; the engine is stopped until it is cool"
    if limit.hold_new:
        return "; new requests wait"
    return "; fewer requests at once" if limit.fraction < 1 else ""


def limits_of(thermal: ThermalConfig) -> Limits:
    return Limits(
        act=thermal.act,
        max_watts=thermal.max_watts,
        passive_margin_c=thermal.warn_margin_c,
        hot_margin_c=thermal.act_margin_c,
    )


def _age(sample: Sample | None, now: float) -> float | None:
    return None if sample is None else round(sample.age_s(now), 2)
