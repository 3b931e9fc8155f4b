"""What the doctor looks at. Values only: gather/ reads them, checks/ judge them. Absent is None."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edge.board.board import Board, PowerMode
from edge.board.memory import MemorySnapshot
from edge.board.readrate import ReadRate
from edge.board.storage import Storage
from edge.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Swap:
    device: str
    kind: str  # "zram" | "partition" | "file"
    bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str
    bytes: int  # its own memory (RssAnon + RssShmem)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """`oom_kills` counts since boot. `desktop` names the display server or shell that runs."""

    swaps: tuple[Swap, ...] = ()
    swappiness: int | None = None
    oom_kills: int | None = None
    biggest: tuple[Process, ...] = ()
    on_gpu: tuple[Process, ...] = ()  # a Jetson's NvMap memory by process, where we may look (root)
    desktop: Process | None = None
    memlock_bytes: int | None = None  # the lock limit; -1 is unlimited
    free_bytes: int | None = None  # MemFree, only to explain why it does not count
    swapped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A device node. `reachable` is for the user that will serve."""

    path: str
    group: str | None
    reachable: bool


@dataclass(frozen=True, slots=True)
class Devices:
    """`user` is who will serve: the service's user when it is installed, else whoever asks."""

    user: str
    user_groups: tuple[str, ...]
    nodes: tuple[Node, ...]
    pending_groups: tuple[str, ...] = ()  # in /etc/group, not in this login yet
    igpu_folder: tuple[str, ...] | None = None  # names in /dev/nvgpu/igpu0
    persistence: bool | None = None  # of every discrete GPU


@dataclass(frozen=True, slots=True)
class Toolkit:
    path: str
    version: str | None  # "12.6"
    nvcc: bool


@dataclass(frozen=True, slots=True)
class Cuda:
    toolkits: tuple[Toolkit, ...] = ()
    on_path: str | None = None  # nvcc of PATH, resolved
    jit_cache: Path | None = None
    jit_cache_bytes: int | None = None
    jit_cache_writable: bool | None = None


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A configured model. `problem` says why its reference is no usable file here."""

    id: str
    ref: str
    problem: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """What is meant to be served here: from configuration, profile and engine, or the defaults."""

    profile: str = "auto"
    config_problem: str | None = None
    config_hint: str | None = None
    listen: tuple[str, ...] = ("127.0.0.1:8080",)
    engine: Engine | None = None
    engine_problem: str | None = None
    engine_hint: str | None = None
    engine_cuda: str | None = None  # CUDA that it was built against: "12.6"
    needs_gpu: bool = False
    power_mode_wanted: str | None = None
    models: tuple[WantedModel, ...] = ()
    model_bytes: int | None = None  # the biggest usable model of the store
    model_file: Path | None = None  # its (first) file


@dataclass(frozen=True, slots=True)
class Clock:
    name: str
    min_hz: int
    max_hz: int


@dataclass(frozen=True, slots=True)
class Heat:
    """Zones in °C by lower-case name without `-thermal`; a zone that refuses to be read is not there."""

    zones: dict[str, float] = field(default_factory=dict)
    passive_c: float | None = None  # where software throttling begins
    critical_c: float | None = None
    throttling: tuple[str, ...] = ()  # cooling devices that throttle now
    fan_pwm: int | None = None  # 0…255
    fan_rpm: int | None = None
    over_current_events: int | None = None


@dataclass(frozen=True, slots=True)
class Power:
    modes: tuple[PowerMode, ...] = ()
    clocks: tuple[Clock, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`blocked_by` is the first folder on the way that the serving user may not enter."""

    path: Path
    exists: bool
    storage: Storage | None = None
    free_bytes: int | None = None
    blocked_by: Path | None = None
    measured: ReadRate | None = None
    measured_file: Path | None = None
    measure_problem: str | None = None
    empty_mount_point: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """`systemctl show` of one unit; `load` is not-found when it is not installed."""

    name: str
    load: str
    active: str
    file_state: str = ""
    result: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class DropIn:
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Port:
    """Who listens on an address of ours. `pid` 0: somebody whose process we may not see."""

    address: str
    pid: int | None = None
    name: str | None = None
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Jtop:
    """The socket of jetson-stats: absent, socket, folder (a mount made before the service) or file."""

    socket: str
    reachable: bool
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    now_s: float
    newest_file_s: float | None  # newest file of edgellm itself: the clock cannot be before it
    time_synchronised: bool | None
    cache_writable: bool
    locale: str
    encoding: str
    prefix: str  # where this edgellm is installed


@dataclass(frozen=True, slots=True)
class Wsl:
    """Windows' side as far as Linux can see it. `settings` are of .wslconfig where it was found."""

    dxg: bool
    library: bool
    systemd: bool
    settings: dict[str, str] | None = None
    linux_driver: bool = False  # a Linux NVIDIA driver that hides Windows' one


@dataclass(frozen=True, slots=True)
class OurFile:
    """Something of ours that is not as it should be. `kind`: folder, mode or socket."""

    kind: str
    path: Path
    mode: int


@dataclass(frozen=True, slots=True)
class Facts:
    """`live` is False for a copied tree: what only a running system tells is then unknown."""

    live: bool
    board: Board
    memory: MemorySnapshot
    use: MemoryUse
    devices: Devices
    cuda: Cuda
    serving: Serving
    power: Power
    heat: Heat
    models: ModelFolder
    environment: Environment
    systemd: bool = False
    units: dict[str, Unit] = field(default_factory=dict)
    drop_ins: tuple[DropIn, ...] = ()
    ports: tuple[Port, ...] = ()
    jtop: Jtop | None = None
    wsl: Wsl | None = None
    untidy: tuple[OurFile, ...] = ()
