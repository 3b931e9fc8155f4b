"""Hold the six gates of a start in one value: which are open, since when, by which evidence. Pure."""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from edge.supervisor.status import GATES, Gate

# The launcher opens the driver's gate before the spawn; the others need a child.
_IN_CHILD = GATES[1:]


class Opening(Struct, frozen=True):
    """An open gate. `devices`: evidence by device."""

    at_s: float
    evidence: str
    devices: dict[str, str] = field(default_factory=dict)


class Gates(Struct, frozen=True):
    """The gates of one start. `began_s`: the child's spawn, monotonic. A refused gate has evidence but is not ready.

    `wanted`: devices of the plan; the context gate is open once each of them has a context. `remote`: those of other
    boards; the weights gate is open once each of them holds some.
    """

    began_s: float
    wanted: tuple[str, ...] = ()
    remote: tuple[str, ...] = ()
    openings: dict[str, Opening] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def open(self, name: str, at_s: float, evidence: str, device: str | None = None) -> Gates:
        """Open a gate. The first evidence stays; a later device is added to it."""
        known = self.openings.get(name)
        if known is None:
            opening = Opening(at_s, evidence, {device: evidence} if device else {})
        elif device and device not in known.devices:
            opening = replace(known, devices={**known.devices, device: evidence})
        else:
            return self
        # A retry within the engine may succeed after a refusal in the log, e.g. a smaller allocation.
        refusals = {k: v for k, v in self.refusals.items() if k != name}
        return replace(self, openings={**self.openings, name: opening}, refusals=refusals)

    def earlier(self, by_s: float) -> Gates:
        """Move all openings by `by_s` to the past, at most to the spawn."""
        moved = {n: replace(o, at_s=max(self.began_s, o.at_s - by_s)) for n, o in self.openings.items()}
        return replace(self, openings=moved)

    def refuse(self, name: str, evidence: str) -> Gates:
        """Close a gate with the evidence that it is not as planned."""
        openings = {k: v for k, v in self.openings.items() if k != name}
        return replace(self, openings=openings, refusals={**self.refusals, name: evidence})

    def fail(self, evidence: str) -> Gates:
        """Close the first gate that is not open, unless a gate was refused already: the start failed there."""
        closed = next((name for name in GATES if name not in self.openings), None)
        return self.refuse(closed, evidence) if closed is not None and not self.refusals else self

    def open_up_to(self, last: str, at_s: float, evidence: str) -> Gates:
        """Open the gates up to and with `last` that no line has opened or refused: a probe is their evidence."""
        gates = self
        for name in GATES[: GATES.index(last) + 1]:
            if name not in gates.refusals:
                gates = gates.open(name, at_s, evidence)
        return gates

    def as_status(self, *, alive: bool = True) -> dict[str, Gate]:
        """Return the gates for status. `took_s` counts from the gate before; `blocked_by` is the first closed one.

        Without a child only the driver's gate can be open; the evidence of the last start stays readable, and the
        gate that failed is the one that blocks.
        """
        gates = self._as_status()
        if alive:
            return gates
        failed = next((name for name in GATES if name in self.refusals), None)
        if failed is not None:
            before = GATES[: GATES.index(failed)]
            return {
                name: gate
                if name == "driver" and name != failed
                else replace(gate, ready=False, devices={}, blocked_by=None if name in (*before, failed) else failed)
                for name, gate in gates.items()
            }
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
            # Openings by a log line have the engine's clock, those by a probe ours: two of them may stand in reverse.
            took_s = max(0.0, opening.at_s - previous_s)
            result[name] = Gate(True, opening.at_s, took_s, opening.evidence, None, devices)
            previous_s = max(previous_s, opening.at_s)
        return result

    def _devices(self, gate: str, opening: Opening) -> dict[str, Gate]:
        """Return the devices of a gate; also missing ones of the plan, where the gate asks for all of them."""
        seen = {name: Gate(True, opening.at_s, None, evidence) for name, evidence in opening.devices.items()}
        due = self.wanted if gate == "context" and seen else self.remote if gate == "weights" else ()
        missing = {name: Gate() for name in due if name not in seen}
        return seen | missing
