"""The shapes of edgellm's JSON documents: one Struct each, or the product's own where a document holds one.

docs/json.md and docs/json.schema.json are written from them; a comment after a field is its description.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from edge.telemetry.sample import Fan, GpuProcess, GpuState, MemoryState, PowerState, Rail, Zone


class Failure(Struct):
    """Why a model does not serve."""

    kind: str  # stable; docs/troubleshooting.md lists them
    hint: str  # one next step
    evidence: str | UnsetType = UNSET  # log lines and paths: for an admin key, and in `edgellm status`


class Degradation(Struct):
    """A difference between what was planned and what runs."""

    subject: str  # "n_ctx", "n_gpu_layers", "engine", "speed", …
    wanted: str
    got: str
    because: str


class Gate(Struct):
    """One step of a start: driver, context, backend, weights, kv_cache, warm."""

    ready: bool
    since: float | None  # Unix seconds at which it opened; null while it is closed
    took_s: float | None  # since the step before it; null while it is closed, or where it is unknown
    evidence: str | None  # the engine's own figure; null while it is closed
    blocked_by: str | None  # the gate that it waits for
    devices: dict[str, Gate] | UnsetType = UNSET  # of several GPUs, by llama.cpp's name


class ModelHealth(Struct):
    """One model in /healthz."""

    state: str  # STOPPED STARTING LOADING WARMING READY SLEEPING DRAINING STOPPING BACKOFF FAILED
    rung: int  # of the ladder of plans: 0 runs as requested
    degraded: list[Degradation]
    gates: dict[str, Gate]  # by name; empty before the first start, or `driver` alone where the GPU is missing
    progress: float | None  # share of the weights that is read, 0…1; null where nothing loads
    restarts: int  # of the engine since edgellm started
    failure: Failure | None  # the last one of a model that does not serve


class TelemetrySummary(Struct):
    """Telemetry in one line."""

    source: str  # sysfs, nvml, jtop or host; "none" before the first sample
    age_s: float | None  # of the sample; null before the first
    thermal: str  # UNKNOWN NOMINAL PASSIVE HOT CRITICAL


class Healthz(Struct):
    """All models with their gates."""

    schema: int
    status: str  # starting, ok, degraded or failed: the worst of all models
    models: dict[str, ModelHealth]  # by id
    telemetry: TelemetrySummary | None  # null where nothing can be served
    failure: Failure | UnsetType = UNSET  # where nothing can be served at all


class Livez(Struct):
    """Whether the event loop turns."""

    schema: int
    status: str  # ok or stuck


class ReadyModel(Struct):
    """Whether one model serves."""

    schema: int
    model: str
    ready: bool
    state: str
    progress: float | None
    blocked_by: str | None  # the gate that holds the start up; null when all are open
    failure: Failure | None


class Readyz(Struct):
    """Whether every model serves; models that sleep or were stopped on purpose count as ready."""

    schema: int
    ready: bool
    models: dict[str, ReadyModel]


class StatusModel(ModelHealth, kw_only=True):
    """One model in `edgellm status`: /healthz, and what only the owner may see."""

    pid: int | None  # of the engine; null while none runs
    files: list[str] | UnsetType = UNSET  # of the model, where there is a plan
    memory_bytes: dict[str, int]  # by domain, by the plan
    open_requests: int
    tokens_per_s: float | None  # of the last answer; null before the first
    idle_s: float | None  # null unless READY
    ttl_left_s: float | None  # until it sleeps; null where it never does, or while it is not READY
    priority: int
    pin: bool
    last_load_s: float | None  # seconds of its last recorded start; null before the first


class StatusTelemetry(TelemetrySummary):
    """The summary with power and temperature."""

    power_w: float | None  # null where no total is measured
    rail: str | None  # of which rail
    temp_c: float | None  # of the hottest zone


class Crash(Struct):
    """The end of an engine, in short."""

    at: float  # Unix seconds
    model: str
    state: str  # in which it ended; READY: it had served
    rung: int
    kind: str
    hint: str


class Service(Struct):
    """The systemd unit that opened the sockets."""

    unit: str
    socket: str
    user: bool  # of a user's own systemd
    warnings: list[str]  # what its settings break


class KeyUse(Struct):
    """Use of the API keys since the start."""

    file: str | None
    requests: dict[str, int]  # by the name of the key


class Folders(Struct):
    """Folders of the instance."""

    state: str
    run: str


class Status(Struct):
    """The running edgellm as its owner sees it."""

    schema: int
    status: str
    models: dict[str, StatusModel]
    telemetry: StatusTelemetry
    version: str
    urls: list[str]
    uptime_s: float
    profile: str | None  # null where no plan could be made
    engine: str | None  # id of the engine that the plan uses
    service: Service | None  # null if started by hand
    crashes: list[Crash]  # the last five
    folders: Folders
    keys: KeyUse


class PsModel(Struct):
    """One model in `edgellm ps`; null where it is unknown, as in status."""

    state: str
    memory_bytes: dict[str, int] | None
    open_requests: int | None
    tokens_per_s: float | None
    idle_s: float | None
    ttl_left_s: float | None
    priority: int | None
    pin: bool | None
    last_load_s: float | None


class Ps(Struct):
    """The models that hold memory."""

    schema: int
    models: dict[str, PsModel]


class Reload(Struct):
    """What a reload did."""

    schema: int
    models: dict[str, str]  # kept, restarted, added, removed, …
    failures: dict[str, Failure]  # by model: why it does not serve; the others serve on
    after_restart: list[str]  # settings that differ and take effect with a restart only


class Memory(MemoryState, frozen=True):
    """The machine's memory; available is MemAvailable."""

    gpu_used_bytes: int | None = None  # the integrated GPU's part of it


class MemoryController(Struct):
    """The memory controller; null where only root may read it."""

    load_ratio: float | None  # 0…1
    clock_hz: float | None


class ActiveMode(Struct):
    """The board's power mode."""

    id: int
    name: str


class Limit(Struct):
    """What the governor holds back."""

    fraction: float  # of the slots that may be busy at once
    hold_new: bool  # new requests wait
    drain: bool  # the engine is stopped
    cause: str  # heat or power; empty without a limit


class Governor(Struct):
    """The governor's last decision."""

    level: str
    because: str
    act: bool
    max_watts: float | None  # null: no limit
    warning: str | None  # a limit that cannot be held
    limit: Limit


class ModelEnergy(Struct):
    """A model's share of the energy, estimated."""

    joules: float | None  # null before anything was measured
    tokens: int
    requests: int
    open: int
    tokens_per_joule: float | None  # null without a measured request
    tokens_per_joule_error_ratio: float | None
    estimated: bool


class Hour(Struct):
    """Energy of one hour."""

    start: int  # Unix seconds
    joules: float


class Energy(Struct):
    """Energy since edgellm started."""

    joules: float | None  # null before anything was measured
    idle_joules: float | None  # while no request was open
    idle_w: float | None  # mean power of that time
    gap_s: float | None  # between samples, whose energy is unknown; null without any
    models: dict[str, ModelEnergy]
    hours: list[Hour]


class Source(Struct):
    """One source of samples."""

    state: str  # ok, silent, failed or unavailable
    age_s: float | None
    because: str | None  # why it gives no values
    hint: str | None


class SleepPower(Struct):
    """Mean power of the board in half a minute before an engine ended, and in one after it."""

    before_w: float | None
    after_w: float | None


class Top(Struct):
    """Sensors, energy and governor; null, never 0, where a value is unknown."""

    schema: int
    source: str
    age_s: float | None
    power: PowerState | None
    rails: list[Rail]
    temperatures: list[Zone]
    temp_c: float | None  # of the hottest zone
    gpus: list[GpuState]
    gpu_processes: list[GpuProcess]
    memory: Memory | None
    cpu_load_ratio: float | None  # 0…1
    emc: MemoryController
    fan: Fan | None
    disk_free_bytes: int | None  # of the models' disk
    throttled: list[str]  # reasons for which the board lowers its clocks
    supply: list[str]  # trouble of the power supply
    overcurrent: dict[str, int]  # events since edgellm started, by alert
    power_mode: ActiveMode | None
    jetson_clocks: bool | None
    thermal: str
    governor: Governor
    tokens_per_s: float | None  # of all models now; null while an answer runs of which no token is counted yet
    energy: Energy
    sleep: dict[str, SleepPower]  # of each model's last sleep
    sources: dict[str, Source]
    notes: list[str]  # figures that may mislead


class HistoryRows(Struct):
    """Rows of `columns`: at (Unix seconds), power_w, temp_c, gpu_load_ratio, memory_used_bytes."""

    columns: list[str]
    seconds: list[list[float | None]]  # the last ten minutes
    minutes: list[list[float | None]]  # the last day


class About(Struct):
    """Board and engine; an empty object until there is a plan."""

    board: str | UnsetType = UNSET
    engine: str | UnsetType = UNSET
    engine_version: str | UnsetType | None = UNSET
    engine_page: bool | UnsetType = UNSET  # the engine has a web page of its own


class ModelFigures(Struct):
    """The model as planned."""

    arch: str | None
    n_params: int | None
    ftype: str | None  # quantization
    n_ctx: int | None
    size: int | None  # bytes of the file


class Activity(Struct):
    """Requests of one model since the start."""

    requests: int
    in_flight: int
    waiting: int  # for the model to be ready
    queued: int  # for a slot
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float | None  # of the last answer
    tokens_per_joule: float | None
    expected_ready_in_s: float | None  # of the start that `elapsed_s` counts, by the last one; null without a record
    elapsed_s: float | None  # since the start that is under way began; null without one
    model: ModelFigures


class RecentRequest(Struct):
    """One of the last 20 requests to engines."""

    route: str
    code: int
    outcome: str  # ok, error, cut, gone, refused or bug
    took_s: float
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    tokens_per_s: float | None


class Telemetry(Top, kw_only=True):
    """`edgellm top --json`, and what the gateway counts."""

    history: HistoryRows
    about: About
    gateway: dict[str, Activity]  # by model
    recent: list[RecentRequest]
    admin: bool  # whether the request's key is one
