"""The shapes of the documents that commands print and that edgellm keeps in its state folder."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from edge.board.board import Board
from edge.board.memory import MemorySnapshot
from edge.daemon.start_timeline import Span
from edge.plan.plan import DomainBudget, Measured, Reason, Settings
from tests.docs.shapes import Degradation


class CacheState(Struct):
    """The page cache before the start."""

    resident_ratio: float | None  # share of the model's file; null for a restart
    load_mode: str | None = None  # by the engine's log: it may differ where little of the file is in the page cache


class SpeedLimit(Struct):
    """How fast the start could be; null until the file's read rate is measured, some seconds after READY."""

    bytes: int  # of the weights
    rate: int | None  # bytes/s of the best direct reads
    fixed_s: float | None  # the engine's other stages
    total_s: float | None
    streams: int | UnsetType = UNSET  # that the best rate took
    distance: float | UnsetType = UNSET  # the engine's time over the limit; below 1: from the page cache


class StartAtBoot(Struct):
    """When a start's process and its service began, in seconds since the kernel started."""

    process_s: float | None  # null for a restart of the engine
    service_s: float | None  # by systemd, before ExecStartPre=; null outside a service


class StartRecord(Struct):
    """One start, a line of starts.jsonl. Times are seconds since the process began, or the former engine ended."""

    schema: int
    start_id: str
    boot_id: str  # of the kernel
    model: str
    file: str
    engine: str
    board: str
    rung: int
    args: list[str]  # the operator's own options of the engine; a value that may be a secret is [hidden]
    cache_state: CacheState
    clock: str
    boot: StartAtBoot
    spans: list[Span]
    spawn_s: float
    spawn_cpu_s: float | None  # CPU time until the spawn; null for a restart
    engine_ready_s: float | None  # null where it was not reached
    ready_s: float | None
    first_token_s: float | None
    gates: dict[str, float]  # when each gate opened
    limit: SpeedLimit
    samples: list[list[float | None]]  # [seconds, W, bytes of memory used, °C], ten a second
    outcome: str  # ready, or "failed: KIND"
    remembered: bool  # the engine was spawned before the plan was made


class Timeline(Struct):
    """The last starts, oldest first."""

    schema: int
    starts: list[StartRecord]


class CrashRecord(Struct):
    """One end of an engine, a line of crashes.jsonl."""

    schema: int
    at: float  # Unix seconds
    boot_id: str
    model: str
    state: str  # in which it ended; READY: it had served
    rung: int
    kind: str
    hint: str
    evidence: str  # lines of its log
    argv: list[str]


class PlanEngine(Struct):
    """The engine of a plan."""

    id: str
    kind: str  # llama-server or embedded
    version: str | None
    commit: str | None
    era: str  # of its options


class PlanFile(Struct):
    """A model's file."""

    name: str
    path: str
    quant: str
    bytes: int
    mmproj_bytes: int  # of the projector; 0 without one, as in the next two
    adapter_bytes: int  # of the LoRA adapters
    drafter_bytes: int  # weights and KV cache of the drafter, or of MTP layers that draft
    fingerprint: str


class Budget(DomainBudget, frozen=True, kw_only=True):
    """Bytes in one memory domain: available by MemAvailable or the driver, reserve stays free, the rest is needed."""

    required_bytes: int  # the sum of weights, kv, compute, context, prompt_cache and page_cache
    headroom_bytes: int  # available - reserve - required; negative: it does not fit


class ColdStart(Struct):
    """A command in place of `argv`, chosen at each start."""

    load_mode: str
    argv: list[str]
    below: float  # 0 to 1: while less of the model's file is in the page cache


class Rung(Struct):
    """One plan of the ladder: 0 as requested, each next one with less memory."""

    rung: int
    fits: bool
    settings: Settings
    memory: dict[str, Budget]  # by domain: host, unified, or a GPU's UUID
    argv: list[str]  # of llama-server
    env: dict[str, str]  # the engine's whole environment; secrets are hidden
    reasons: list[Reason]
    cold: ColdStart | UnsetType = UNSET  # the command of a start without the page cache, where it differs
    model: PlanFile | UnsetType = UNSET  # where another file than the requested one is used


class PlanModel(Struct):
    """One model of a plan."""

    aliases: list[str]
    model: PlanFile
    ladder: list[Rung]
    chosen: int  # the first rung that fits
    warnings: list[str]
    measured: Measured | None  # of the last start of this engine with this architecture


class NextStart(Struct):
    """The launch that the next `up` of the same command line remembers."""

    argv: list[str]
    at: float  # Unix seconds
    plans_first_because: str | None  # null: it spawns its engine before it plans


class PlanDocument(Struct):
    """Everything that `up` would launch."""

    schema: int
    board: Board
    engine: PlanEngine
    models: dict[str, PlanModel]
    notes: list[str]
    remembered_launch: NextStart | UnsetType | None = UNSET  # absent for a board that is not here


class BoardDocument(Struct):
    """What this machine is."""

    schema: int
    board: Board
    memory: MemorySnapshot


class Finding(Struct):
    """The result of one check."""

    name: str  # area.subject, stable
    verdict: str  # ok, warn, bad or unknown
    says: str
    next: str | None  # one next step; null where nothing is to be done
    command: str | None  # to run by hand


class Doctor(Struct):
    """All findings; exit code 1 with a bad one."""

    schema: int
    verdict: str  # the worst
    counts: dict[str, int]  # by verdict
    checks: list[Finding]
    fixed: list[str]  # what --fix did


class HeaderVerdict(Struct):
    """Why a file cannot be served."""

    kind: str
    sentence: str
    hint: str


class ModelLine(Struct):
    """One model of the list; null where its header cannot be read."""

    id: str
    usable: bool
    path: str
    shards: list[str]
    bytes: int
    source: str  # of which store
    revision: str | None
    arch: str | None
    parameters: int | None
    n_ctx_train: int | None
    tensor_bytes: int | None
    mmproj: str | None
    verdict: HeaderVerdict | None  # null: it is usable
    notes: list[str]


class PendingPull(Struct):
    """A transfer that is under way or was interrupted."""

    source: str
    kind: str
    bytes: int
    active: bool


class ModelList(Struct):
    """The models of all stores."""

    schema: int
    models: list[ModelLine]
    pending: list[PendingPull]


class ModelDetails(Struct):
    """One model by its header."""

    id: str
    name: str
    quant: str
    path: str
    shards: list[str]
    bytes: int
    fingerprint: str
    mmproj: str | None
    notes: list[str]
    source: dict[str, Any] | None  # the receipt: source, revision, files with their SHA-256; null without one
    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: list[int]  # by layer, or one for all
    key_length: int
    value_length: int
    sliding_window: int | None
    n_expert: int
    n_ctx_train: int
    n_vocab: int
    chat_template: bool
    tensor_bytes: int
    tensors: dict[str, int]  # count by type
    kv_bytes_per_token: int | None  # with f16


class ModelDocument(Struct):
    """One model; also of `model pull` and `model import`."""

    schema: int
    model: ModelDetails


class CheckedModel(Struct):
    """A file that is a model."""

    id: str
    path: str
    notes: list[str]
    template_fault: str | None  # the engine's reason to refuse its chat template


class ModelCheck(Struct):
    """The result of a check; exit code 65 with a bad one."""

    schema: int
    models: list[CheckedModel]
    bad: list[ModelLine]
    deep: list[dict[str, Any]]  # with --deep: tensors that were read, and the bad ones
    templates_judged_by: str | None  # the engine; null where none is ready


class EngineLine(Struct):
    """One installed engine."""

    id: str
    broken: str | UnsetType = UNSET  # why it cannot be used; the other fields are absent then
    version: str | UnsetType | None = UNSET
    commit: str | UnsetType | None = UNSET
    recipe: str | UnsetType | None = UNSET
    cuda_arch: list[int] | UnsetType = UNSET  # empty: for the CPU
    bytes: int | UnsetType = UNSET
    proved_at: str | UnsetType | None = UNSET
    smoke_tokens_s: float | UnsetType | None = UNSET
    gpu: Any | UnsetType = UNSET  # what the proof saw of the GPU; null for the CPU
    without: list[str] | UnsetType = UNSET  # accelerations that crash here, and are off


class EngineList(Struct):
    """All engines."""

    schema: int
    current: str | None  # used from the next start
    previous: str | None  # where `engine rollback` returns to
    engines: list[EngineLine]
    embedded: str | None  # the engine of the xllamacpp wheel


class NewKey(Struct):
    """A key, printed once."""

    schema: int
    name: str
    admin: bool
    key: str | None  # null if it came from standard input


class ListedKey(Struct):
    """A key by its name."""

    name: str
    admin: bool
    created: str  # date


class KeyList(Struct):
    """The keys; only hashes are kept."""

    schema: int
    keys: list[ListedKey]


class ProfileLine(Struct):
    """One profile."""

    name: str
    summary: str


class ProfileList(Struct):
    """The profiles that -p takes."""

    schema: int
    profiles: list[ProfileLine]


class ConfigValue(Struct):
    """One key of the configuration."""

    key: str
    value: Any
    origin: str  # profile:NAME, a file, environment, --set or default


class ConfigShow(Struct):
    """Every value with its origin."""

    schema: int
    values: list[ConfigValue]


class ConfigCheck(Struct):
    """A configuration that is valid; exit code 78 otherwise."""

    schema: int
    ok: bool
    profile: str
    values: int  # that are set


class Answer(Struct):
    """One answer of `edgellm chat`."""

    schema: int
    text: str
    reasoning: str | None
    finish_reason: str | None
    usage: dict[str, Any] | None  # the engine's
    timings: dict[str, Any] | None  # the engine's


class Planned(Struct, tag_field="event", tag="planned"):
    """A line of `up --json`: the plan."""

    schema: int
    profile: str
    engine: str
    power_mode: str | None
    models: list[str]
    urls: list[str]


class Changed(Struct, tag_field="event", tag="state"):
    """A line of `up --json`: a model's new state."""

    schema: int
    model: str
    state: str
    rung: int


class OpenedGate(Struct):
    """A gate in such a line."""

    ready: bool
    took_s: float | None
    evidence: str | None


class BecameReady(Struct, tag_field="event", tag="ready"):
    """A line of `up --json`: a model serves."""

    schema: int
    model: str
    took_s: float
    gates: dict[str, OpenedGate]
    degraded: list[Degradation]


class Died(Struct, tag_field="event", tag="failed"):
    """A line of `up --json`: an engine ended."""

    schema: int
    model: str
    kind: str
    hint: str
    gives_up: bool  # false: it is started again


class Note(Struct, tag_field="event", tag="note"):
    """A line of `up --json`: a sentence."""

    schema: int
    text: str


UpLine = Planned | Changed | BecameReady | Died | Note
