"""The output of `up` as a service: each event is one journal entry with a priority and fields to filter by."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import partial
from typing import TextIO

from edge.daemon.console import Console, describe, gate_lines
from edge.linux.best_effort import BestEffortWriter
from edge.linux.journald import ERROR, INFO, NOTICE, WARNING, Handler, Journal, goes_to_journal
from edge.plan.plan import Plan
from edge.supervisor.status import Failure, ModelStatus
from edge.units import format_seconds, printable


def console_for(env: Mapping[str, str], *, as_json: bool) -> Console:
    """Return the journal's console if stdout goes there (JOURNAL_STREAM), with Python's log, or the terminal's."""
    if as_json or not goes_to_journal(env, sys.stdout.fileno()):
        # logging's handler of last resort would wait for a terminal or pipe that stands still.
        logging.getLogger().addHandler(_terminal(sys.stderr))
        return Console(as_json=as_json)
    journal = Journal(shown=partial(printable, newlines=True))
    logging.getLogger().addHandler(Handler(journal))
    return Reporter(journal)


def _terminal(stream: TextIO) -> logging.Handler:
    handler = logging.StreamHandler(BestEffortWriter(stream))
    handler.setLevel(logging.WARNING)
    return handler


class Reporter(Console):
    """A Console for the journal, to be read by `journalctl -u edgellm EDGELLM_MODEL=chat -p warning`."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def _send(self, text: str, priority: int, **fields: str | None) -> None:
        self.ring.add(text)
        self._journal.send(text, priority, **fields)

    def planned(self, plan: Plan, profile: str, urls: list[str]) -> None:
        for model in plan.models.values():
            text = f"{describe(model)}; profile {profile}, engine {plan.engine.id}, {', '.join(urls)}"
            self._send(text, NOTICE, EDGELLM_MODEL=model.id, EDGELLM_EVENT="planned")

    def state(self, status: ModelStatus) -> None:
        text, state = f"{status.id}: {status.state.value}", status.state.value
        self._send(text, INFO, EDGELLM_MODEL=status.id, EDGELLM_EVENT="state", EDGELLM_STATE=state)

    def progress(self, status: ModelStatus) -> None:
        """Write nothing: `systemctl status` shows the progress."""

    def ready(self, status: ModelStatus, took_s: float, urls: list[str], role: str, *, keyed: bool) -> None:
        text = f"{status.id} is ready after {format_seconds(took_s)}"
        gates = "\n".join(gate_lines(status.gates))
        self._send(text, NOTICE, EDGELLM_MODEL=status.id, EDGELLM_EVENT="ready", EDGELLM_GATES=gates)
        for item in status.degraded:
            text = f"{status.id} is degraded: {item.subject}: {item.got} instead of {item.wanted} ({item.because})"
            self._send(text, WARNING, EDGELLM_MODEL=status.id, EDGELLM_EVENT="degraded")

    def failed(self, model_id: str, failure: Failure, *, gives_up: bool) -> None:
        what = "failed" if gives_up else "died and is restarted"
        evidence = failure.evidence.strip().splitlines()
        last = f" ({evidence[-1].strip()})" if evidence else ""
        self._send(
            f"{model_id} {what}: {failure.kind}{last}; next: {failure.hint}",
            ERROR if gives_up else WARNING,
            EDGELLM_MODEL=model_id,
            EDGELLM_EVENT="failed",
            EDGELLM_KIND=failure.kind,
            EDGELLM_HINT=failure.hint,
            EDGELLM_EVIDENCE=failure.evidence or None,
        )

    def waits(self, model_id: str, failure: Failure, patience_s: float) -> None:
        text = f"{model_id} waits up to {patience_s:g} s: {failure.evidence.splitlines()[-1]}"
        self._send(text, WARNING, EDGELLM_MODEL=model_id, EDGELLM_EVENT="waits", EDGELLM_KIND=failure.kind)

    def say(self, text: str) -> None:
        self._send(text, INFO)

    def warn(self, text: str) -> None:
        self._send(text, WARNING)
