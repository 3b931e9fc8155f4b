"""Turn one child's log lines and progress protocol into gates, facts and marks of its start. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edge.engine import gpu_code
from edge.linux.files import parse_json
from edge.plan.plan import LaunchPlan
from edge.supervisor.degraded import EngineFacts, is_full
from edge.supervisor.diagnose import find_cause
from edge.supervisor.gates import Gates
from edge.supervisor.log_patterns import PatternMatch, Patterns, Signature, parse_line
from edge.supervisor.placement import Buffers, add, is_host, misplaced_cache, misplaced_weights
from edge.supervisor.start_log import AFTER_LOAD, LINE_CHARACTERS, LOADED, StartLog
from edge.supervisor.status import Failure
from edge.units import format_bytes, logged_number

# Facts that a line states before the weights were read: what the process finds, and the load of the model.
OF_WEIGHTS = frozenset({"cpu", "answers", "device", "archs", "offload", "weights_on", "load_mode"})
PROTOCOL = "cmd_child_to_router:state:"
CPU_ONLY_HINT = (
    "the engine put every layer on the CPU: was it built with CUDA (`edgellm engine show`), and does the driver "
    "answer (`edgellm doctor`)?"
)


class Missing(Struct, frozen=True):
    """The reason why the GPU is not used. `permanent`: another start would see the same."""

    kind: str
    hint: str
    permanent: bool = False


class LogEvent(Struct, frozen=True):
    """An event that a line reports: `loading`, `ready` (to be confirmed by /health) or `no_device`."""

    what: str
    missing: Missing | None = None


class Attempt:
    """The observed start of one child: lines go in; gates, facts, progress and marks come out.

    Times are monotonic seconds. `weights_bytes`: tensors of the model. `capability` of the GPU: "8.7".
    """

    def __init__(
        self,
        plan: LaunchPlan,
        patterns: Patterns,
        spawned_at_s: float,
        weights_bytes: int,
        *,
        capability: str | None = None,
    ) -> None:
        self.plan = plan
        self.weights_bytes = weights_bytes
        wanted = plan.settings.devices if plan.settings.n_gpu_layers > 0 else ()
        remote = tuple(name for name in wanted if name.startswith("RPC"))
        self.gates = Gates(spawned_at_s, wanted=wanted, remote=remote)
        self.facts = EngineFacts()
        self.progress: float | None = None
        self.asleep = False  # the engine sleeps by itself until its next request
        self.marks: dict[str, float] = {}  # first time each mark was seen
        self.log = StartLog(patterns, spawned_at_s)
        self.lines = 0  # log lines that are progress
        self._patterns = patterns
        self._capability = capability
        self._starting = True
        self._let_in = False
        self._has_protocol = False
        self._beside = False  # a drafter is loaded, after the model
        self._prefixed = False  # it prefixes its lines (--log-prefix): one without is text of a model or a library
        if not self.wants_gpu:
            self.gates = self.gates.open("driver", spawned_at_s, "no GPU wanted")

    @property
    def tail(self) -> Sequence[str]:
        """The last lines, with all that they quote."""
        return self.log.tail

    @property
    def wants_gpu(self) -> bool:
        return self.plan.settings.n_gpu_layers > 0

    @property
    def drafts(self) -> bool:
        """Whether the command may name a drafter, by any spelling of its options."""
        return any(part in word for word in self.plan.argv for part in ("draft", "--spec", "speculative", "-md"))

    @property
    def served(self) -> bool:
        """Whether requests of clients may have reached the engine: its log may hold their text."""
        return self._let_in or not self._starting

    def driver_opens(self, evidence: str) -> None:
        """Take the check of the GPU's device nodes; where lines of the engine came first, their evidence stays."""
        if self.wants_gpu:
            self.gates = self.gates.open("driver", self.gates.began_s, evidence)

    def driver_hangs(self, limit_s: float) -> None:
        """Take a device node whose open(2) does not return; a line of the engine opens the gate later."""
        if self.wants_gpu and "driver" not in self.gates.openings:
            self.gates = self.gates.refuse("driver", f"opening the GPU's device nodes hangs for {limit_s:g} s")

    def stderr(self, raw: str, now_s: float) -> Sequence[LogEvent]:
        """Take one log line. Lines without a prefix (of a chat template, say) match no pattern."""
        raw = raw[:LINE_CHARACTERS]
        self.log.tail.append(raw)
        line = parse_line(raw)
        if self._patterns.noise(line.text):
            return ()
        self.lines += 1
        if self.served:
            return ()
        self.log.keep(raw, line)
        at_s = self._engine_time(line.engine_s, now_s)
        self._prefixed = self._prefixed or line.engine_s is not None
        if self._patterns.quotes(line.text):
            return ()
        own = line.engine_s is not None or not self._prefixed
        if self.log.loaded:
            return self._marks(line.text, at_s) if own else ()
        seen = self._read(line.text, at_s) if own else []
        return seen + self._device_trouble(line.text) if self.wants_gpu else seen

    def _marks(self, text: str, at_s: float) -> list[LogEvent]:
        seen: list[LogEvent] = []
        for mark in self._patterns.marks(text):
            if self.log.loaded and mark.name not in AFTER_LOAD:
                continue
            if mark.name == "tensors_begin":
                self._beside = "weights" in self.gates.openings
                if not self._beside:
                    # The last load counts: `--fit` of some builds prints the same buffers before it.
                    self.facts = replace(self.facts, buffers=Buffers())
            if mark.name not in self.marks:
                self.marks[mark.name] = max(at_s, self.marks.get("slots", at_s))
                seen += self._mark(mark, at_s)
            self.log.loaded = self.log.loaded or mark.name in LOADED
        return seen

    def _read(self, text: str, at_s: float) -> list[LogEvent]:
        seen = self._marks(text, at_s)
        for gate in self._patterns.gates(text):
            seen += self._gate(gate, at_s)
        for fact in self._patterns.facts(text):
            seen += self._fact(fact, at_s)
        return seen

    def stdout(self, raw: str, now_s: float) -> Sequence[LogEvent]:
        """Take a line of the progress protocol (llama-server's router mode); any other line is a log line."""
        if not raw.startswith(PROTOCOL):
            return self.stderr(raw, now_s)
        try:
            message: Any = parse_json(raw.removeprefix(PROTOCOL))
            state, payload = message["state"], message.get("payload")
        except (ValueError, KeyError, TypeError):
            return self.stderr(raw, now_s)
        self.lines += 1
        if state in ("sleeping", "ready"):  # the lines of a wake between them are those of a load
            self.asleep = state == "sleeping"
        if state == "ready":
            return [LogEvent("ready")]
        if state == "loading":
            value = payload.get("value") if isinstance(payload, dict) else None
            if isinstance(value, (int, float)):
                self._has_protocol = True
                self.progress = float(max(self.progress or 0.0, min(1.0, value)))
            return [LogEvent("loading")]
        return ()

    def bytes_read(self, count: int) -> None:
        """Take the bytes read by the child as progress, for engines without the protocol."""
        if self._starting and not self._has_protocol and self.progress != 1.0 and self.weights_bytes > 0:
            # 0.99 at most: read bytes include the vocabulary, and the last tensors may come from the page cache.
            self.progress = max(self.progress or 0.0, min(0.99, count / self.weights_bytes))

    def answered(self, now_s: float, rss_bytes: int | None = None) -> Sequence[LogEvent]:
        """Take a 200 of /health: it opens the gates without a line of their own, the GPU's excepted."""
        seen: list[LogEvent] = []
        self.log.answered = True
        if self.wants_gpu and not self._gpu_shown:
            seen += self._unproved(rss_bytes)
        self._judge_cache()
        self.gates = self.gates.open_up_to("kv_cache", now_s, "the engine reports ready (no log line shows it)")
        self.progress = 1.0
        return seen

    def let_in(self) -> None:
        """Take the engine's first request: from now on its lines open nothing and explain no start."""
        self._let_in = True

    def warmed(self, now_s: float, evidence: str) -> None:
        """Take the first completion: the start is over."""
        self.gates = self.gates.open("warm", now_s, evidence)
        self._starting = False

    def failed(self, failure: Failure) -> None:
        """Take the exit of a start: the first closed gate is the one that failed."""
        if self._starting:
            self.gates = self.gates.fail(failure.kind)

    @property
    def _gpu_shown(self) -> bool:
        """Whether layers or weights on the GPU were seen, or their absence was."""
        return self.facts.offloaded is not None or bool(self.facts.buffers.weights)

    def _unproved(self, rss_bytes: int | None) -> list[LogEvent]:
        """Judge a build that prints neither layers nor buffers: the GPU counts as not used until something shows it.

        Little host memory is no proof, since pages of a mapped file can be dropped; much of it is proof of the CPU.
        """
        shown = bool(self.facts.devices)
        for name in ("backend",) if shown else ("context", "backend"):
            self.gates = self.gates.refuse(name, "no line and no probe shows the GPU in use")
        if shown or (rss_bytes is not None and rss_bytes < self.weights_bytes // 2):
            return []
        return [LogEvent("no_device", Missing("cpu_only", CPU_ONLY_HINT))]

    def _judge_weights(self) -> list[LogEvent]:
        """Compare the weights' buffers with the plan once all are allocated."""
        found = misplaced_weights(self.plan, self.facts.buffers.weights, full=is_full(self.plan, self.facts))
        if found is None:
            return []
        self.gates = self.gates.refuse(found.gate, f"weights: {found.degraded.got}")
        if not found.absent:
            return []
        self.facts = replace(self.facts, cpu_because=self.facts.cpu_because or f"weights: {found.degraded.got}")
        return [LogEvent("no_device", Missing("cpu_only", CPU_ONLY_HINT))]

    def _judge_cache(self) -> None:
        for found in misplaced_cache(self.plan, self.facts.buffers, full=is_full(self.plan, self.facts)):
            self.gates = self.gates.refuse(found.gate, f"{found.degraded.subject}: {found.degraded.got}")

    def _engine_time(self, engine_s: float | None, now_s: float) -> float:
        at_s, late_s = self.log.time(engine_s, now_s)
        if late_s:
            self.marks = {name: max(self.gates.began_s, mark_s - late_s) for name, mark_s in self.marks.items()}
            self.gates = self.gates.earlier(late_s)
        return at_s

    def _mark(self, mark: PatternMatch, at_s: float) -> list[LogEvent]:
        match mark.name:
            case "load" | "header":
                if not self.wants_gpu:
                    self.gates = self.gates.open("context", at_s, "CPU")  # older builds print no CPU line
                    self.gates = self.gates.open("backend", at_s, "CPU kernels, as planned")
                return [LogEvent("loading")]
            case "loaded":
                return [LogEvent("ready")]
        return []

    def _gate(self, gate: PatternMatch, at_s: float) -> list[LogEvent]:
        buffers = self.facts.buffers
        if gate.name == "weights":
            self.progress = 1.0
            self.gates = self.gates.open("weights", at_s, f"{format_bytes(self.weights_bytes)} read")
            for device, mib in buffers.weights.items():
                if not is_host(device):
                    self.gates = self.gates.open("weights", at_s, f"{mib:.2f} MiB", device)
            return self._judge_weights() if self.wants_gpu else []
        if size := gate.groups.get("mib"):
            cells = gate.groups.get("cells")
            self.gates = self.gates.open("kv_cache", at_s, f"{size} MiB" + (f", {cells} cells" if cells else ""))
            for device, mib in buffers.kv.items():
                if not is_host(device):
                    self.gates = self.gates.open("kv_cache", at_s, f"{mib:.2f} MiB", device)
        else:
            self.gates = self.gates.open("kv_cache", at_s, "allocated")
        return []

    def _fact(self, fact: PatternMatch, at_s: float) -> list[LogEvent]:
        groups, facts = fact.groups, self.facts
        # A drafter or a projector is loaded after the model, and prints the same lines: they are not the model's.
        if fact.name in OF_WEIGHTS and "weights" in self.gates.openings:
            return []
        chosen = self.plan.settings
        if self._beside and fact.name in ("kv_on", "compute_on") and chosen.draft_device not in (None, *chosen.devices):
            return []  # on a device of its own, which the plan gave it
        match fact.name:
            case "cpu" if not self.wants_gpu:
                self.gates = self.gates.open("context", at_s, f"CPU: {groups['name']}")
            case "answers" if self.wants_gpu:
                self.gates = self.gates.open("driver", at_s, f"{groups['name']} answers")
            case "device" if self.wants_gpu:
                self._device(groups["device"], groups.get("name", groups["device"]), at_s)
            case "archs":
                # llama.cpp prints __CUDA_ARCH__ values: 870 is sm_87.
                archs = tuple(int(arch) // 10 for arch in groups["archs"].split(","))
                self.facts = replace(facts, archs=archs)
            case "offload" if self.wants_gpu:
                return self._offload(int(groups["offloaded"]), int(groups["layers"]), at_s)
            case "weights_on":  # printed at allocation, before the read
                self._buffer("weights", groups)
            case "kv_on":
                self._buffer("kv", groups)
            case "compute_on":
                self._buffer("compute", groups)
            case "projector_on" if facts.projector_on is None:
                self.facts = replace(facts, projector_on=groups["device"])
            case "kv_types" if facts.kv_types is None:
                self.facts = replace(facts, kv_types=(groups["k"], groups["v"]))
            case "n_ctx" if facts.n_ctx is None:
                self.facts = replace(facts, n_ctx=int(groups["n_ctx"]))
            case "load_mode":
                self.facts = replace(facts, load_mode=groups["load_mode"])
            case "kv" if (mib := logged_number(groups["mib"])) is not None:
                self.facts = replace(facts, kv_mib=(facts.kv_mib or 0.0) + mib)
        return []

    def _buffer(self, use: str, groups: Mapping[str, str]) -> None:
        buffers, mib = self.facts.buffers, logged_number(groups["mib"])
        if mib is not None:
            sizes = add(getattr(buffers, use), groups["device"], mib)
            self.facts = replace(self.facts, buffers=replace(buffers, **{use: sizes}))

    def _device(self, device: str, name: str, at_s: float) -> None:
        if device not in self.facts.devices:
            self.facts = replace(self.facts, devices=(*self.facts.devices, device))
        self.gates = self.gates.open("driver", at_s, f"{device} answers")
        self.gates = self.gates.open("context", at_s, f"{device}: {name}", device)

    def _offload(self, on_gpu: int, layers: int, at_s: float) -> list[LogEvent]:
        self.facts = replace(self.facts, offloaded=(on_gpu, layers))
        evidence = f"{on_gpu}/{layers} layers on the GPU"
        if on_gpu == 0:
            self.gates = self.gates.refuse("backend", evidence)
            because = self.facts.cpu_because or evidence
            self.facts = replace(self.facts, cpu_because=because)
            return [LogEvent("no_device", Missing("cpu_only", CPU_ONLY_HINT))]
        if on_gpu < min(layers, self.plan.settings.n_gpu_layers):
            self.gates = self.gates.refuse("backend", evidence)
            return []
        code = gpu_code.describe(self.facts.archs, self._capability)
        # With layers on the GPU a context exists; the oldest builds print no line for it.
        self.gates = self.gates.open_up_to("context", at_s, evidence)
        self.gates = self.gates.open("backend", at_s, f"{evidence}, {code}" if code else evidence)
        return []

    def _device_trouble(self, text: str) -> list[LogEvent]:
        signature = self._patterns.cause(text)
        # A device is missing before the model is read; what is printed later may be text of a projector.
        late = "weights" in self.gates.openings
        if signature is None or not signature.device or (signature.serves and late):
            return []
        self.facts = replace(self.facts, cpu_because=signature.kind)
        self.gates = self.gates.refuse("context", signature.kind)
        # A process that exits is diagnosed by its exit; one that goes on would serve from the CPU.
        return [_missing(self._first_cause() or signature)] if signature.serves else []

    def _first_cause(self) -> Signature | None:
        """Return the driver's own complaint, which is more precise than "no device", e.g. a closed device node."""
        found = find_cause(self.log.causes, self._patterns)
        return found if found is not None and (found.device or found.kind == "device_permission") else None


def _missing(signature: Signature) -> LogEvent:
    return LogEvent("no_device", Missing(signature.kind, signature.hint, signature.permanent))
