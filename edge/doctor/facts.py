"""The facts that `edgellm doctor` judges. Values only; what cannot be read is None."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, field

from edge.board.board import Board, PowerMode
from edge.board.device_nodes import GpuNodes
from edge.board.memory import MemorySnapshot
from edge.board.readrate import ReadRate
from edge.board.storage import Storage
from edge.engine.engine import Engine
from edge.telemetry.sample import Sample


class Swap(Struct, frozen=True):
    device: str
    kind: str  # "zram" | "partition" | "file"
    bytes: int
    used_bytes: int
    storage: Storage | None = None  # that it lies on; None where that is not known


class Process(Struct, frozen=True):
    pid: int
    name: str
    bytes: int  # RssAnon + RssShmem: without shared file pages


class MemoryUse(Struct, frozen=True):
    """How the memory is used. `oom_kills` counts since boot; `desktop` is the display server or shell that runs."""

    swaps: tuple[Swap, ...] = ()
    swappiness: int | None = None
    oom_kills: int | None = None
    biggest: tuple[Process, ...] = ()
    on_gpu: tuple[Process, ...] = ()  # a Jetson's NvMap memory by process; debugfs, so only for root
    desktop: Process | None = None
    free_bytes: int | None = None  # MemFree, only to explain why MemAvailable is the figure that counts
    swapped_bytes: int = 0


class Node(Struct, frozen=True):
    """A device node, and whether the serving user may open it."""

    path: str
    group: str | None
    reachable: bool


class Devices(Struct, frozen=True):
    """Device nodes of the GPU. `user` is the service's user where the service is installed, else the caller."""

    user: str
    needed: GpuNodes
    nodes: tuple[Node, ...]  # those that exist
    pending_groups: tuple[str, ...] = ()  # listed in /etc/group, but not in this login session
    igpu_folder: tuple[str, ...] | None = None  # names in /dev/nvgpu/igpu0
    persistence: bool | None = None  # of every discrete GPU


class CudaToolkit(Struct, frozen=True):
    """A CUDA toolkit below /usr/local."""

    path: str
    version: str | None  # "12.6"
    nvcc: bool


class Cuda(Struct, frozen=True):
    """CUDA toolkits and the cache of kernels that the driver compiled."""

    toolkits: tuple[CudaToolkit, ...] = ()
    on_path: str | None = None  # the nvcc found in PATH, links resolved
    jit_cache: Path | None = None
    jit_cache_bytes: int | None = None
    jit_cache_writable: bool | None = None


class WantedModel(Struct, frozen=True):
    """A configured model. `problem` is why its reference resolves to no usable file."""

    id: str
    ref: str
    problem: str | None = None
    hint: str | None = None


class RemoteBoard(Struct, frozen=True):
    """An rpc-server of [[device]]. `free_bytes`: None while it serves an engine of this board.

    `problem`: why it can hold no layers; `optional`: a smaller plan serves without it.
    """

    endpoint: str
    free_bytes: int | None = None
    problem: str | None = None
    hint: str | None = None
    optional: bool = False


class ServingFacts(Struct, frozen=True):
    """The configuration, profile, engine and models that `up` would use."""

    profile: str = "auto"
    config_problem: str | None = None
    config_hint: str | None = None
    listen: tuple[str, ...] = ("127.0.0.1:8080",)
    engine: Engine | None = None
    engine_problem: str | None = None
    engine_hint: str | None = None
    engine_cuda: str | None = None  # the CUDA version of its build: "12.6"
    needs_gpu: bool = False
    power_mode_wanted: str | None = None
    models: tuple[WantedModel, ...] = ()
    model_bytes: int | None = None  # the biggest usable model of the store
    model_file: Path | None = None  # its (first) file
    remotes: tuple[RemoteBoard, ...] = ()
    remotes_problem: str | None = None  # of the engine, for all of them
    advised: str | None = None  # what the planner takes, where no model is configured
    advised_file: Path | None = None  # None where it is to be fetched
    plan_problem: str | None = None  # why the planner takes none
    plan_hint: str | None = None


class ModelFolder(Struct, frozen=True):
    """The model folder. `blocked_by` is the first folder on its path that the serving user may not enter."""

    path: Path
    exists: bool
    storage: Storage | None = None
    free_bytes: int | None = None
    blocked_by: Path | None = None
    measured: ReadRate | None = None
    measure_problem: str | None = None
    empty_mount_point: bool = False


class UnitState(Struct, frozen=True):
    """One unit in the output of `systemctl show`; `load` is `not-found` where it is not installed."""

    name: str
    load: str
    active: str
    file_state: str = ""
    result: str = ""
    restarts: int = 0


class DropIn(Struct, frozen=True):
    """A unit file or drop-in of edgellm.service."""

    path: str
    text: str


class Port(Struct, frozen=True):
    """The owner of a configured address: `pid` None is free, 0 a process of another user that /proc hides."""

    address: str
    pid: int | None = None
    name: str | None = None
    ours: bool = False


class Jtop(Struct, frozen=True):
    """The socket of jetson-stats: absent, socket, folder (made by a container's bind mount) or file."""

    socket: str
    reachable: bool
    group: str | None = None


class Environment(Struct, frozen=True):
    """Clock, locale and folders of this process."""

    now_s: float
    newest_file_s: float | None  # the newest file of edgellm itself: an earlier clock is wrong
    time_synchronised: bool | None
    cache_writable: bool
    locale: str
    encoding: str
    prefix: str  # where this edgellm is installed


class WslFacts(Struct, frozen=True):
    """The Windows side of WSL2. `settings` are those of .wslconfig, None where it was not found."""

    dxg: bool
    library: bool
    systemd: bool
    settings: dict[str, str] | None = None
    linux_driver: bool = False  # an NVIDIA driver for Linux, which shadows the one of Windows


class OwnFile(Struct, frozen=True):
    """A file of edgellm that `--fix` can repair. `kind`: folder (missing), mode (too open) or socket (stale)."""

    kind: str
    path: Path
    mode: int


class DoctorFacts(Struct, frozen=True):
    """Everything that the checks judge. `live` is False for a copied tree, which has no processes, units or ports."""

    live: bool
    board: Board
    memory: MemorySnapshot
    use: MemoryUse
    devices: Devices
    cuda: Cuda
    serving: ServingFacts
    sensors: Sample
    models: ModelFolder
    environment: Environment
    power_modes: tuple[PowerMode, ...] = ()  # of /etc/nvpmodel.conf
    systemd: bool = False
    units: dict[str, UnitState] = field(default_factory=dict)
    drop_ins: tuple[DropIn, ...] = ()
    ports: tuple[Port, ...] = ()
    jtop: Jtop | None = None
    wsl: WslFacts | None = None
    leftovers: tuple[OwnFile, ...] = ()
