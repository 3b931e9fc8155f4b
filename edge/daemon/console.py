"""The output of `up` on its terminal: plain lines, or JSON lines with --json. rich would cost its imports."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from msgspec import to_builtins

from edge import __version__
from edge.linux.best_effort import BestEffortWriter
from edge.linux.procfs import Ring
from edge.linux.sockets import network_addresses
from edge.plan.plan import ModelPlan, Plan
from edge.supervisor.status import Failure, Gate, ModelStatus
from edge.units import format_bytes, format_seconds, printable


def has_terminal() -> bool:
    """Return whether the process has a controlling terminal; after a hangup it has none (tty_ioctl(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Console:
    """Writes events to `out`; on a terminal, the progress of the weights is a line that is overwritten."""

    def __init__(self, out: TextIO | None = None, *, as_json: bool = False) -> None:
        self._out = BestEffortWriter(out or sys.stdout)
        self._json = as_json
        self._live = not as_json and self._out.isatty()
        self._open_line = False
        self.ring = Ring()  # for `edgellm logs`

    def planned(self, plan: Plan, profile: str, urls: list[str]) -> None:
        """Report the plan: board, engine, models and addresses."""
        mode = plan.board.power_mode.name if plan.board.power_mode else None
        if self._json:
            head = {"profile": profile, "engine": plan.engine.id, "power_mode": mode}
            self._event("planned", **head, models=list(plan.models), urls=urls)
            return
        board = plan.board.module + (f" · power mode {mode}" if mode else "")
        self._line(f"edgellm {__version__} · {board} · profile {profile} · engine {plan.engine.id}")
        for model in plan.models.values():
            self._line(f"  {describe(model)}")
        self._line(f"  listening on {', '.join(urls)} (requests wait until it is warm)")

    def state(self, status: ModelStatus) -> None:
        if self._json:
            self._event("state", model=status.id, state=status.state.value, rung=status.rung)

    def progress(self, status: ModelStatus) -> None:
        if self._live and status.progress is not None and status.progress < 1:
            # EL (ECMA-48) clears the line: a shorter text would leave the end of the longer one.
            self._out.write(f"\r\x1b[2K  {status.id}: weights {status.progress:.0%}")
            self._open_line = True

    def ready(self, status: ModelStatus, took_s: float, urls: list[str], role: str, *, keyed: bool) -> None:
        """Report a model that serves; `keyed`: clients need an API key."""
        if self._json:
            degraded = [to_builtins(item, enc_hook=str) for item in status.degraded]
            gates = _gates(status.gates)
            self._event("ready", model=status.id, took_s=round(took_s, 3), gates=gates, degraded=degraded)
            return
        self._line(f"{status.id} is ready after {format_seconds(took_s)}")
        for line in gate_lines(status.gates):
            self._line(f"  {line}")
        for item in status.degraded:
            self._line(f"  degraded: {item.subject}: wanted {item.wanted}, got {item.got} ({item.because})")
        reachable = [each for url in urls for each in addresses(url)]
        for url in reachable:
            self._line(f"\n  {url}/v1\n")
        if reachable:
            self._line(f"  {example(reachable[0], status.id, role, keyed=keyed)}\n")

    def failed(self, model_id: str, failure: Failure, *, gives_up: bool) -> None:
        if self._json:
            self._event("failed", model=model_id, kind=failure.kind, hint=failure.hint, gives_up=gives_up)
            return
        what = "failed" if gives_up else "died and is restarted"
        self._line(f"{model_id} {what}: {failure.kind}")
        for line in failure.evidence.splitlines():
            self._line(f"  | {line}")
        self._line(f"  hint: {failure.hint}")

    def waits(self, model_id: str, failure: Failure, patience_s: float) -> None:
        self.say(f"{model_id} waits up to {patience_s:g} s: {failure.evidence.splitlines()[-1]}")

    def warn(self, text: str) -> None:
        self.say(text)

    def say(self, text: str) -> None:
        if self._json:
            self._event("note", text=text)
        else:
            self._line(text)

    def _line(self, text: str) -> None:
        if self._open_line:
            self._out.write("\r\x1b[2K")
            self._open_line = False
        self._write(printable(text, newlines=True))

    def _event(self, event: str, **values: Any) -> None:
        self._write(json.dumps({"schema": 1, "event": event, **values}))

    def _write(self, line: str) -> None:
        for each in line.split("\n"):  # `edgellm logs` shows a line break within one of its lines as \\n
            self.ring.add(each)
        self._out.write(line + "\n")


def example(url: str, model_id: str, role: str, *, keyed: bool) -> str:
    """Return a curl command that works as it stands for a model of this role."""
    # The certificate is one of a name, and the URL has an address of this machine.
    curl = "curl -k" if url.startswith("https:") else "curl"
    if role == "other":
        return f"{curl} {url}/readyz/{model_id}"
    path, body = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if role == "embedding":
        path, body = "embeddings", '"input": "Hello"'
    elif role == "rerank":
        path, body = "rerank", '"query": "Hello", "documents": ["Hi", "Bye"]'
    key = ' -H "Authorization: Bearer $EDGELLM_API_KEY"' if keyed else ""
    document = f'{{"model": "{model_id}", {body}}}'
    return f"{curl} {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{document}'"


def addresses(url: str) -> list[str]:
    """Return the URLs to connect to: for a wildcard address, those of this machine's networks, then loopback."""
    # A client cannot connect to a wildcard address, and the printed URL is meant to be copied.
    for wildcard, own, loopback in (("//0.0.0.0:", "{}", "127.0.0.1"), ("//[::]:", "[{}]", "[::1]")):
        if wildcard in url:
            family = socket.AF_INET if own == "{}" else socket.AF_INET6
            found = [own.format(address) for address in network_addresses(family)]
            return [url.replace(wildcard, f"//{each}:") for each in (*found, loopback)]
    return [url] if url.startswith("http") else []


def describe(model: ModelPlan) -> str:
    """Format `chat: SmolLM2-135M-Instruct Q4_1, 8192 tokens in 1 slot, needs 0.4 GiB of 20.1 GiB host`."""
    plan = model.ladder.plans[model.ladder.chosen]
    settings = plan.settings
    slots = "1 slot" if settings.n_parallel == 1 else f"{settings.n_parallel} slots"
    needs = ", ".join(
        f"{format_bytes(domain.required_bytes)} of {format_bytes(domain.available_bytes)} {name}"
        for name, domain in plan.budget.items()
    )
    if model.other is not None:
        return f"{model.id}: {model.model.name}, serves {', '.join(model.other.routes) or 'every path'}, needs {needs}"
    file = plan.model or model.model
    return f"{model.id}: {file.name} {file.quant}, {settings.n_ctx} tokens in {slots}, needs {needs}"


def gate_lines(gates: Mapping[str, Gate]) -> list[str]:
    """Format each gate as one line: name, time, evidence."""
    lines = []
    for name, gate in gates.items():
        took = format_seconds(gate.took_s) if gate.took_s is not None else ""
        mark = "✓" if gate.ready else "·"
        lines.append(f"{mark} {name:<9} {took:>8}  {gate.evidence or ''}".rstrip())
    return lines


def _gates(gates: Mapping[str, Gate]) -> dict[str, Any]:
    return {n: {"ready": g.ready, "took_s": g.took_s, "evidence": g.evidence} for n, g in gates.items()}
