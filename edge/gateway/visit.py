"""Record one request for metrics and the access log."""

from __future__ import annotations

from dataclasses import dataclass

from edge.gateway import accesslog
from edge.gateway.accessfile import AccessLog
from edge.gateway.stats import Stats
from edge.gateway.tally import Tally

# nginx's code for a client that closed the connection before its answer.
GONE = 499


@dataclass(slots=True)
class Visit:
    """One request, filled in while it is answered. `usage` is set where an engine answered it."""

    method: str
    began_s: float
    route: str = "other"
    code: int = GONE
    outcome: str = "ok"
    key: str | None = None
    admin: bool = False
    model: str | None = None
    usage: Tally | None = None
    streamed: bool = False
    retried: bool = False
    prompt: str | None = None
    joules: float | None = None  # estimated; None where too few samples fell inside

    def refused(self) -> None:
        """Mark it as rejected by the gateway, unless the engine's answer had begun: then it counts as cut."""
        if self.outcome == "ok":
            self.outcome = "refused"

    def failed(self) -> None:
        """Mark it as failed after the answer began: the client gets an error event in place of the rest."""
        if self.outcome in ("ok", "refused"):
            self.outcome = "error"

    def finish(self, stats: Stats, now_s: float, log: AccessLog) -> None:
        """Add it to `stats` and write it to `log`."""
        if self.outcome == "ok" and self._failed():
            self.outcome = "error"
        stats.requests[self.route, str(self.code), self.model or ""] += 1
        if self.model is not None:
            self._count(stats, self.model, now_s)
        if log.wanted:
            log.write(self._entry(now_s))

    def _failed(self) -> bool:
        """Return whether the engine's answer reports a failure, whatever its status."""
        if self.usage is None or not self.usage.chunks:
            return False
        return self.code >= 500 or (self.code == 200 and self.usage.failed(self.route, self.streamed))

    def _count(self, stats: Stats, model_id: str, now_s: float) -> None:
        model = stats.model(model_id)
        model.duration_s.observe(now_s - self.began_s)
        model.retries += self.retried
        model.cut += self.outcome == "cut"
        model.errors += self.outcome == "error"
        model.gone += self.outcome == "gone"
        if self.usage is None:
            return
        if self.streamed and self.usage.to_first_s is not None:
            model.first_token_s.observe(self.usage.to_first_s)
        tokens = self.usage.tokens()
        model.prompt_tokens += tokens.prompt or 0
        model.completion_tokens += tokens.completion or 0
        model.last_per_s = self.usage.per_s() or model.last_per_s

    def _entry(self, now_s: float) -> accesslog.AccessEntry:
        usage = self.usage or Tally(self.began_s)
        tokens = usage.tokens()
        first_s = usage.to_first_s
        if not self.streamed:
            first_s = None if tokens.prompt_ms is None else tokens.prompt_ms / 1000
        return accesslog.AccessEntry(
            method=self.method,
            route=self.route,
            code=self.code,
            took_s=now_s - self.began_s,
            outcome=self.outcome,
            key=self.key,
            model=self.model,
            prompt_tokens=tokens.prompt,
            completion_tokens=tokens.completion,
            first_token_s=first_s,
            tokens_per_s=usage.per_s(),
            retried=self.retried,
            prompt=self.prompt,
            joules=self.joules,
        )
