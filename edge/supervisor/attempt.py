"""One child's rise as we observe it: its lines and protocol become gates, facts and spans. No I/O."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge.plan.plan import LaunchPlan
from edge.supervisor.gates import Gates
from edge.supervisor.patterns import Mark, Patterns, Signature, parse_line
from edge.supervisor.truth import Facts
from edge.units import format_bytes

PROTOCOL = "cmd_child_to_router:state:"
KEPT_LINES = 400


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a line told the lifecycle: `loading`, `ready` (to be confirmed by /health), `no_device`."""

    what: str
    signature: Signature | None = None


class Attempt:
    """Feed it lines; read gates, facts, progress and marks. Times are monotonic seconds."""

    def __init__(self, plan: LaunchPlan, patterns: Patterns, spawned_at_s: float, weights_bytes: int) -> None:
        self.plan = plan
        self.plan_bytes = weights_bytes
        self.gates = Gates(spawned_at_s)
        self.facts = Facts()
        self.progress: float | None = None
        self.marks: dict[str, float] = {}  # first time each mark was seen
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        self.lines = 0
        self._patterns = patterns
        self._clock_offset_s: float | None = None
        self._rising = True
        if plan.settings.n_gpu_layers <= 0:
            self.gates = self.gates.open("driver", spawned_at_s, "no GPU wanted")

    @property
    def wants_gpu(self) -> bool:
        return self.plan.settings.n_gpu_layers > 0

    def stderr(self, raw: str, now_s: float) -> Sequence[Sighting]:
        """One log line. Lines of the chat template and the like carry no prefix and mean nothing."""
        self.tail.append(raw)
        self.lines += 1
        if not self._rising:
            return ()
        line = parse_line(raw)
        at_s = self._engine_time(line.engine_s, now_s)
        seen: list[Sighting] = []
        for mark in self._patterns.marks(line.text):
            if mark.name not in self.marks:
                self.marks[mark.name] = at_s
                seen += self._mark(mark, at_s)
        for gate in self._patterns.gates(line.text):
            self._gate(gate, at_s)
        for fact in self._patterns.facts(line.text):
            self._fact(fact, at_s)
        if self.wants_gpu:
            seen += self._device_trouble(line.text)
        return seen

    def stdout(self, raw: str, now_s: float) -> Sequence[Sighting]:
        """The progress protocol of llama-server's router mode; anything else is an ordinary log line."""
        if not raw.startswith(PROTOCOL):
            return self.stderr(raw, now_s)
        try:
            message: Any = json.loads(raw.removeprefix(PROTOCOL))
            state, payload = message["state"], message.get("payload") or {}
        except (ValueError, KeyError, TypeError):
            return self.stderr(raw, now_s)
        if state == "ready":
            return [Sighting("ready")]
        if state == "loading":
            value = payload.get("value")
            if isinstance(value, (int, float)):
                self.progress = max(self.progress or 0.0, min(1.0, float(value)))
            return [Sighting("loading")]
        return ()

    def answered(self, now_s: float) -> None:
        """/health said 200: what no line spoke of is proved by it."""
        self.gates = self.gates.open_up_to("kv_cache", now_s, "the engine reports ready (no log line said so)")
        self.progress = 1.0

    def warmed(self, now_s: float, evidence: str) -> None:
        self.gates = self.gates.open("warm", now_s, evidence)
        self._rising = False

    def _engine_time(self, engine_s: float | None, now_s: float) -> float:
        """We may read lines late (imports). The smallest delay seen ties the engine's clock to ours: what was stamped
        by a larger one is moved."""
        if engine_s is None:
            return now_s
        offset_s = now_s - engine_s
        if self._clock_offset_s is None:
            self._clock_offset_s = offset_s
        elif offset_s < self._clock_offset_s:
            late_s = self._clock_offset_s - offset_s
            self._clock_offset_s = offset_s
            self.marks = {name: max(self.gates.began_s, at_s - late_s) for name, at_s in self.marks.items()}
            self.gates = self.gates.earlier(late_s)
        return max(self.gates.began_s, engine_s + self._clock_offset_s)

    def _mark(self, mark: Mark, at_s: float) -> list[Sighting]:
        match mark.name:
            case "load" | "header":
                if not self.wants_gpu:
                    self.gates = self.gates.open("backend", at_s, "CPU kernels, as planned")
                return [Sighting("loading")]
            case "loaded":
                return [Sighting("ready")]
        return []

    def _gate(self, gate: Mark, at_s: float) -> None:
        if gate.name == "weights":
            self.progress = 1.0
            self.gates = self.gates.open("weights", at_s, f"{format_bytes(self.plan_bytes)} read")
        elif size := gate.groups.get("mib"):
            cells = gate.groups.get("cells")
            self.gates = self.gates.open("kv_cache", at_s, f"{size} MiB" + (f", {cells} cells" if cells else ""))
        else:
            self.gates = self.gates.open("kv_cache", at_s, "allocated")

    def _fact(self, fact: Mark, at_s: float) -> None:
        groups = fact.groups
        match fact.name:
            case "cpu" if not self.wants_gpu:
                self.gates = self.gates.open("context", at_s, f"CPU: {groups['name']}")
            case "device" if self.wants_gpu:
                device = groups["device"]
                if device not in self.facts.devices:
                    self.facts = replace(self.facts, devices=(*self.facts.devices, device))
                name = groups.get("name", device)
                self.gates = self.gates.open("driver", at_s, f"{device} answers", device)
                self.gates = self.gates.open("context", at_s, f"{device}: {name}", device)
            case "offload":
                on_gpu, layers = int(groups["offloaded"]), int(groups["layers"])
                self.facts = replace(self.facts, offloaded=(on_gpu, layers))
                self._offloaded(on_gpu, layers, at_s)
            case "load_mode":
                self.facts = replace(self.facts, load_mode=groups["load_mode"])

    def _offloaded(self, on_gpu: int, layers: int, at_s: float) -> None:
        if not self.wants_gpu:
            return
        evidence = f"{on_gpu}/{layers} layers on the GPU"
        if on_gpu >= min(layers, self.plan.settings.n_gpu_layers):
            self.gates = self.gates.open("backend", at_s, evidence)
        else:
            self.gates = self.gates.refuse("backend", evidence)

    def _device_trouble(self, text: str) -> list[Sighting]:
        signature = self._patterns.cause(text)
        if signature is None or not signature.serves:
            return []
        self.facts = replace(self.facts, cpu_because=signature.kind)
        self.gates = self.gates.refuse("context", signature.kind)
        return [Sighting("no_device", signature)]
