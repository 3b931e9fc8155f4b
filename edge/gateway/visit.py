"""One request as it is counted and logged."""

from __future__ import annotations

from dataclasses import dataclass

from edge.gateway import accesslog
from edge.gateway.accessfile import AccessLog
from edge.gateway.stats import Stats
from edge.gateway.tally import Tally

# nginx's code for a client that left before its answer.
GONE = 499


@dataclass(slots=True)
class Visit:
    """Filled while the request is answered; `tally` where the engine answered it."""

    method: str
    began_s: float
    route: str = "other"
    code: int = GONE
    outcome: str = "ok"
    key: str | None = None
    admin: bool = False
    model: str | None = None
    tally: Tally | None = None
    streamed: bool = False
    retried: bool = False
    prompt: str | None = None
    joules: float | None = None  # estimated; None where too few samples fell inside

    def refused(self) -> None:
        """It ends with an answer of ours. Where the engine's had begun, that it was cut is what counts."""
        if self.outcome == "ok":
            self.outcome = "refused"

    def record(self, stats: Stats, now_s: float, log: AccessLog) -> None:
        stats.requests[self.route, str(self.code), self.model or ""] += 1
        if self.model is not None:
            self._count(stats, now_s)
        if log.wanted:
            log.write(self._entry(now_s))

    def _count(self, stats: Stats, now_s: float) -> None:
        model = stats.model(self.model or "")
        model.duration_s.observe(now_s - self.began_s)
        model.retries += self.retried
        model.cut += self.outcome == "cut"
        model.gone += self.outcome == "gone"
        if self.tally is None:
            return
        if self.streamed and self.tally.to_first_s is not None:
            model.first_token_s.observe(self.tally.to_first_s)
        tokens = self.tally.tokens()
        model.prompt_tokens += tokens.prompt or 0
        model.completion_tokens += tokens.completion or 0
        model.last_per_s = self.tally.per_s() or model.last_per_s

    def _entry(self, now_s: float) -> accesslog.Entry:
        tally = self.tally or Tally(self.began_s)
        tokens = tally.tokens()
        first_s = tally.to_first_s
        if not self.streamed:
            first_s = None if tokens.prompt_ms is None else tokens.prompt_ms / 1000
        return accesslog.Entry(
            self.method,
            self.route,
            self.code,
            now_s - self.began_s,
            self.outcome,
            self.key,
            self.model,
            tokens.prompt,
            tokens.completion,
            first_s,
            tally.per_s(),
            self.retried,
            self.prompt,
            self.joules,
        )
