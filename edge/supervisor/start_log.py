"""Keep the log of one start: its clock, the stage that it has reached, the lines that may explain an exit. Pure."""

from __future__ import annotations

from collections import deque

from edge.supervisor.log_patterns import LogLine, Patterns

LINE_CHARACTERS = 4096  # a path is at most 4096 bytes (PATH_MAX); what is longer holds text of a model
KEPT_LINES = 400  # the cause of an exit stands before its backtrace, which is long
LOADED = ("slots", "loaded")  # marks of an engine whose models are all loaded
AFTER_LOAD = ("loaded", "listening")  # marks that come later


class StartLog:
    """The log lines of one child.

    llama-server loads its models, reads the chat template and prints an example of it, then listens
    (tools/server/server-context.cpp: load_model, init). The example is text of the model's file: whole lines of it may
    look like the engine's. So once `loaded`, no line states a fact, and what is printed between begin and end of the
    template explains no exit. That end can be imitated; the last one counts, and only after /health has `answered`.

    `tail` holds every line, to be shown. `loaded` and `answered` are set by the observer of the start.
    """

    def __init__(self, patterns: Patterns, spawned_at_s: float) -> None:
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        self.loaded = False
        self.answered = False
        self._patterns = patterns
        self._spawned_at_s = spawned_at_s
        self._clock_offset_s: float | None = None
        self._loading: deque[str] = deque(maxlen=KEPT_LINES)
        self._template: deque[str] | None = None  # its errors; None before it
        self._serving: deque[str] | None = None  # since the end of the template; None before it

    @property
    def loading(self) -> tuple[str, ...]:
        """The lines before the chat template."""
        return tuple(self._loading)

    @property
    def causes(self) -> tuple[str, ...]:
        """The lines that may explain an exit before the first request of a client."""
        later = self._serving if self.answered else self._template
        return (*self._loading, *(later or ()))

    def keep(self, raw: str, line: LogLine) -> None:
        """Keep a line as evidence, if it can be any.

        An error of the template itself is a cause, whatever text of the template the lines around it quote.
        """
        if self._template is None:
            if not self._patterns.template_begins(line.text):
                self._loading.append(raw)
                return
            self._template = deque(maxlen=KEPT_LINES)
        if self._patterns.template_ends(line.text):
            self._serving = deque(maxlen=KEPT_LINES)
        elif self._serving is not None:
            self._serving.append(raw)
        if self._patterns.is_template_error(line.text):
            self._template.append(raw)

    def time(self, engine_s: float | None, now_s: float) -> tuple[float, float]:
        """Convert a line's own timestamp to monotonic time: its instant, and by how much earlier lines move back.

        Lines may be read late, while this process imports. The smallest delay seen fixes the offset between the two
        clocks, and moves what a larger one has placed. A timestamp after the load may be text of the model.
        """
        late_s = 0.0
        if engine_s is None:
            return now_s, late_s
        offset_s = now_s - engine_s
        if self._clock_offset_s is None:
            self._clock_offset_s = offset_s
        elif offset_s < self._clock_offset_s and not self.loaded:
            late_s = self._clock_offset_s - offset_s
            self._clock_offset_s = offset_s
        at_s = engine_s + self._clock_offset_s
        return max(self._spawned_at_s, min(at_s, now_s)), late_s
