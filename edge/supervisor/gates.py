"""The six gates of a start as one value: which are open, since when, on what evidence. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from edge.status import GATES, Gate

_IN_CHILD = GATES[1:]


@dataclass(frozen=True, slots=True)
class Opening:
    at_s: float
    evidence: str
    devices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gates:
    """`began_s` is the child's spawn (monotonic). A refused gate carries evidence but is not ready.

    `wanted`: devices that the plan uses: the context is there when all of them have one.
    """

    began_s: float
    wanted: tuple[str, ...] = ()
    openings: dict[str, Opening] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def open(self, name: str, at_s: float, evidence: str, device: str | None = None) -> Gates:
        """The first evidence counts; a later device of an open gate is added to it."""
        known = self.openings.get(name)
        if known is None:
            opening = Opening(at_s, evidence, {device: evidence} if device else {})
        elif device and device not in known.devices:
            opening = replace(known, devices={**known.devices, device: evidence})
        else:
            return self
        refusals = {k: v for k, v in self.refusals.items() if k != name}
        return replace(self, openings={**self.openings, name: opening}, refusals=refusals)

    def earlier(self, by_s: float) -> Gates:
        """Everything was seen `by_s` later than it was; nothing came before the spawn."""
        moved = {n: replace(o, at_s=max(self.began_s, o.at_s - by_s)) for n, o in self.openings.items()}
        return replace(self, openings=moved)

    def refuse(self, name: str, evidence: str) -> Gates:
        """Seen, and not as planned: stays closed and says why."""
        openings = {k: v for k, v in self.openings.items() if k != name}
        return replace(self, openings=openings, refusals={**self.refusals, name: evidence})

    def open_up_to(self, last: str, at_s: float, evidence: str) -> Gates:
        """Opens what no line spoke of, up to and with `last`: a probe proved what the log did not print."""
        gates = self
        for name in GATES[: GATES.index(last) + 1]:
            if name not in gates.refusals:
                gates = gates.open(name, at_s, evidence)
        return gates

    def as_status(self, *, alive: bool = True) -> dict[str, Gate]:
        """`took_s` counts from the gate before (they are a chain), `blocked_by` names the first closed one before.

        Without a living child only the driver's gate can be open; the evidence of the last start stays readable.
        """
        gates = self._as_status()
        if alive:
            return gates
        shut = {n: replace(gate, ready=False, devices={}, blocked_by=_IN_CHILD[0]) for n, gate in gates.items()}
        return {**shut, "driver": gates["driver"], _IN_CHILD[0]: replace(shut[_IN_CHILD[0]], blocked_by=None)}

    def _as_status(self) -> dict[str, Gate]:
        result: dict[str, Gate] = {}
        previous_s, blocker = self.began_s, None
        for name in GATES:
            opening = self.openings.get(name)
            devices = self._devices(name, opening) if opening else {}
            if opening is None or not all(device.ready for device in devices.values()):
                evidence = self.refusals.get(name) if opening is None else opening.evidence
                result[name] = Gate(evidence=evidence, blocked_by=blocker, devices=devices)
                blocker = blocker or name
                continue
            took_s = max(0.0, opening.at_s - previous_s)
            result[name] = Gate(True, opening.at_s, took_s, opening.evidence, None, devices)
            previous_s = max(previous_s, opening.at_s)
        return result

    def _devices(self, gate: str, opening: Opening) -> dict[str, Gate]:
        """Those seen; for the context also those that are wanted and were not seen."""
        seen = {name: Gate(True, opening.at_s, None, evidence) for name, evidence in opening.devices.items()}
        missing = {name: Gate() for name in self.wanted if seen and name not in seen and gate == "context"}
        return seen | missing
