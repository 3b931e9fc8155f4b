"""From a configuration to the Plan of a machine: probe, profile, engine, memory, models. Imported before the spawn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edge.board import device_nodes, nvidia
from edge.board.board import Board, newest_capability, only_gpus
from edge.board.memory import MemorySnapshot, assumed, reserve_bytes, snapshot
from edge.board.probe import probe
from edge.board.storage import classify
from edge.config import Config, resolve_profile
from edge.config.values import ModelConfig, Override, Preset, Profile
from edge.engine import gpu_code
from edge.engine.choose import EngineFallback, choose, fallback_now
from edge.engine.engine import Engine, Flag
from edge.errors import DeviceMissingError, EngineMissingError, UnavailableError, UsageError
from edge.linux.files import read_bounded
from edge.linux.tree import Tree
from edge.models.store import standard
from edge.paths import Folders
from edge.plan import start_records
from edge.plan.argv import EnvFacts, other_environment
from edge.plan.calibration_file import calibration_path, load, read_claims
from edge.plan.choices import DraftChoice, LoadChoice, SleepChoice, choices_path, read_choices
from edge.plan.choose import Chooser, fetch_first
from edge.plan.engine_options import OPTION_NAMES
from edge.plan.other_load import load_path, read_busy_cores
from edge.plan.plan import LaunchPlan, ModelPlan, Plan
from edge.plan.planner import Extras, PromptFolder, make_plan, plan_inputs
from edge.plan.remotes import Absent, Remotes, find_remotes
from edge.units import MIB, format_bytes

# Each saved prompt is a write of some 100 MB: eMMC, SD cards and USB sticks wear, network disks are slow, what lies in
# memory or in a container's layer is lost with it.
_DURABLE = {"nvme", "ssd", "hdd", "virtual"}
_LEAST_BYTES = 64 * MIB  # llama-server alone, without a model


class HostView(Struct, frozen=True):
    """The machine to plan for, read under `root` unless `board` names one that is not present.

    `available_bytes` replaces what is available now. `at_boot` plans for a machine that has just started. `held_bytes`,
    by domain, is what engines of this instance hold and a new plan may use. `waited_s`: for the GPU, so far.
    """

    root: Path = Path("/")
    board: Board | None = None
    available_bytes: int | None = None
    at_boot: bool = False
    held_bytes: Mapping[str, int] | None = None
    waited_s: float = 0.0


class Prepared(Struct, frozen=True):
    """A plan and what it was made of. `fallback`: the selected engine never became ready, the former one serves."""

    config: Config
    board: Board
    profile: Profile
    plan: Plan
    fallback: EngineFallback | None = None
    absent: tuple[Absent, ...] = ()  # rpc-servers that the plan is without
    system_prompts: Mapping[str, str] = {}  # by model: read with the plan, because a start must not wait for a disk


def prepare(config: Config, folders: Folders, view: HostView | None = None, *, allow_missing: bool = False) -> Prepared:
    """Plan for this machine, or the one that `view` describes.

    `allow_missing` plans with the engine that `edgellm build` would make, with models that are not downloaded and with
    device nodes that are not there, and notes each. Raises ConfigError, UsageError, EngineMissingError, BadModelError,
    ModelMissingError (NotDownloadedError where `model pull` helps), DoesNotFitError, DeviceMissingError.
    """
    view = view or HostView()
    board = view.board or probe(view.root)
    profile = resolve_profile(config, board, folders)
    board = only_gpus(board, profile.preset.gpus)
    fallback = (
        None if config.engine or view.board else fallback_now(folders.engines, start_records.read(folders.starts))
    )
    engine, notes = _engine(config, profile, board, folders, view, allow_missing)
    here = view.board is None and view.root == Path("/")
    remotes = find_remotes(config.devices, engine, folders, here=here, wait=not allow_missing)

    def planned(board: Board) -> Plan:
        memory = limited(_memory(view, board), config.memory.limit, profile.preset.reserve)
        plan = _plan(config, profile, board, memory, engine, folders, allow_missing, remotes, here=here)
        return replace(plan, notes=(*plan.notes, *notes))

    if not allow_missing and not view.at_boot:
        try:
            board = _with_devices(board, profile, config, view)
        except DeviceMissingError:
            # Report every other fault now, not after the wait, and read the header ahead of the device. A discrete
            # GPU's plan needs its free memory.
            if board.unified_memory:
                planned(board)
            raise
    prepared = Prepared(config, board, profile, planned(board), fallback, remotes.absent)
    prompts = {name: system_prompt_of(preset_of(prepared, name)) for name in prepared.plan.models}
    return replace(prepared, system_prompts=prompts)


def engine_for(config: Config, profile: Profile, board: Board, folders: Folders, *, needs_gpu: bool) -> Engine:
    """Return the installed engine that serves this profile. Raises EngineMissingError, UsageError."""
    recipe = profile.preset.recipe or profile.name
    starts = start_records.read(folders.starts)
    capabilities = [gpu.compute_capability for gpu in board.gpus if gpu.compute_capability]
    return choose(folders, config.engine or None, needs_gpu, profile=recipe, capabilities=capabilities, starts=starts)


def wants_gpu(profile: Profile) -> bool:
    return profile.preset.backend == "cuda" and profile.preset.offload == "full"


def config_of(prepared: Prepared, model_id: str) -> ModelConfig:
    """Return the configuration of this model; the defaults where the planner selected it."""
    return next((model for model in prepared.config.models if model.id == model_id), ModelConfig(model_id, model_id))


def preset_of(prepared: Prepared, model_id: str) -> Preset:
    """Return the profile's preset under this model's own `set`."""
    own: dict[str, Any] = dict(config_of(prepared, model_id).set)
    return replace(prepared.profile.preset, **own)


def system_prompt_of(preset: Preset) -> str:
    """Return the system prompt to compute ahead, from its file where one is named and can be read."""
    if not preset.system_prompt_file:
        return preset.system_prompt
    try:
        return read_bounded(Path(preset.system_prompt_file)).decode(errors="replace")
    except (OSError, ValueError):  # it is a help, and no need of a start
        return preset.system_prompt


def preloaded(prepared: Prepared, model: ModelPlan) -> bool:
    """Return whether the model starts with edgellm; one that fits only while others sleep waits for its request."""
    return config_of(prepared, model.id).preload and not model.takes_turns


def without_gpu(config: Config) -> Config:
    """Return the same configuration for the CPU, for a GPU that stays away while `fallback = "cpu"`."""
    cpu = {"backend": "any", "offload": "none", "prefer": "speed"}
    overrides = {key: Override(value, "the GPU is not there") for key, value in cpu.items()}
    return replace(config, overrides={**config.overrides, **overrides})


def without_servers(config: Config) -> Config:
    """Return the same configuration for this board alone, for an rpc-server that stays away."""
    return replace(config, devices=())


def _plan(
    config: Config,
    profile: Profile,
    board: Board,
    memory: MemorySnapshot,
    engine: Engine,
    folders: Folders,
    allow_missing: bool,
    remotes: Remotes,
    *,
    here: bool,
) -> Plan:
    others = tuple(model for model in config.models if model.command)
    extras = Extras(
        calibrations=load(calibration_path(folders), engine.id),
        load_choices=read_choices(choices_path(folders, LoadChoice), LoadChoice, board.id, engine.id),
        busy_cores=read_busy_cores(load_path(folders)),
        draft_choices=read_choices(choices_path(folders, DraftChoice), DraftChoice, board.id, engine.id),
        remotes=remotes,
        prompts=_prompt_folder(folders) if here else None,
        others=others,
        claims=read_claims(folders),
        sleep_choices=read_choices(choices_path(folders, SleepChoice), SleepChoice, board.id, engine.id),
    )
    preset, inputs = plan_inputs(board, memory, profile, engine, extras.calibrations)
    inputs = replace(inputs, load_choices=extras.load_choices, busy_cores=extras.busy_cores)
    chosen = Chooser(standard(folders, config.store.dirs, os.environ), inputs).choose(config, preset)
    facts = EnvFacts(str(folders.cache), str(folders.cache), wsl=board.container == "wsl2")
    extras = replace(extras, alternatives=chosen.smaller)
    plan = make_plan(board, memory, profile, engine, chosen.models, facts, extras)
    if chosen.absent and not allow_missing:
        raise fetch_first(chosen.absent)
    pulls = (f"{offer.id} is not downloaded: edgellm model pull {offer.id}" for offer in chosen.absent.values())
    if others:  # the first of the configuration is the default model
        plan = replace(plan, models={model.id: plan.models[model.id] for model in config.models})
    missing = (f"{each.id}: {each.command[0]} is not found" for each in others if not _program(each))
    return replace(plan, notes=(*plan.notes, *chosen.notes, *pulls, *missing))


def _program(config: ModelConfig) -> bool:
    """Return whether the program of another engine is found, in its own PATH."""
    import shutil  # late: with its compression modules it costs a start without other engines 2 ms

    path = other_environment(EnvFacts("", ""), config.env)["PATH"]
    return shutil.which(config.command[0], path=path) is not None


def _prompt_folder(folders: Folders) -> PromptFolder:
    storage = classify(Tree(Path("/")), folders.cache)
    return PromptFolder(str(folders.saved_prompts), storage is not None and storage.kind in _DURABLE)


def _engine(
    config: Config, profile: Profile, board: Board, folders: Folders, view: HostView, allow_missing: bool
) -> tuple[Engine, tuple[str, ...]]:
    """Return the installed engine, or with `allow_missing` the one that `edgellm build` would make, and a note."""
    recipe = profile.preset.recipe or profile.name
    future = assumed_engine(board, recipe, str(folders.engines / recipe / "bin/llama-server"))
    elsewhere = view.board is not None or view.root != Path("/")
    if allow_missing and elsewhere and not config.engine:
        return future, (f"planned for an engine built there with `edgellm build -p {recipe}`",)
    needs_gpu = profile.preset.backend == "cuda" and profile.preset.fallback != "cpu"
    try:
        return engine_for(config, profile, board, folders, needs_gpu=needs_gpu), ()
    except EngineMissingError as error:
        if config.engine or not allow_missing:
            raise
        return future, (f"{error}: planned as if it were; {error.hint}",)


def limited(memory: MemorySnapshot, limit_bytes: int, reserve: str) -> MemorySnapshot:
    """Return the memory as `memory.limit` bounds it: what models may take, beside the reserve. 0 is no limit.

    A GPU's own memory is not limited.
    """
    if not limit_bytes:
        return memory
    main = {name: memory.total_bytes[name] for name in ("unified", "host") if name in memory.total_bytes}
    least = {
        name: min(memory.available_bytes[name], limit_bytes + reserve_bytes(reserve, total))
        for name, total in main.items()
    }
    note = f"memory.limit allows {format_bytes(limit_bytes)} for all models"
    return replace(memory, available_bytes=memory.available_bytes | least, notes=(*memory.notes, note))


def _memory(view: HostView, board: Board) -> MemorySnapshot:
    """Return the memory to plan with.

    Raises UsageError for available memory that this board cannot have, UnavailableError where the memory is unknown.
    """
    if not board.memory_bytes:
        raise UnavailableError(
            "the memory of this machine is unknown: /proc/meminfo cannot be read",
            "mount -t proc proc /proc, as root; or `edgellm plan --board NAME` for another machine",
        )
    if view.available_bytes is not None and not _LEAST_BYTES <= view.available_bytes <= board.memory_bytes:
        raise UsageError(
            f"{format_bytes(view.available_bytes)} of available memory: {board.module} has "
            f"{format_bytes(board.memory_bytes)}, and an engine takes {format_bytes(_LEAST_BYTES)} without a model",
            "write a unit: --memory 5.2GiB",
        )
    if view.board is not None:
        return assumed(board, view.available_bytes)
    memory = snapshot(view.root, board, view.available_bytes)
    held = view.held_bytes or {}
    booted = assumed(board).available_bytes if view.at_boot else {}
    free = {
        domain: min(total, max(memory.available_bytes[domain] + held.get(domain, 0), booted.get(domain, 0)))
        for domain, total in memory.total_bytes.items()
    }
    return replace(memory, available_bytes=free)


def _with_devices(board: Board, profile: Profile, config: Config, view: HostView) -> Board:
    """Return the board, without a GPU that stayed away if the profile allows the CPU. Raises DeviceMissingError."""
    hang = nvidia.hangs()
    if hang is not None and view.waited_s < device_nodes.WAIT_S:
        hint = "see `dmesg | grep NVRM`; a driver that hangs needs its module reloaded, or a reboot"
        raise DeviceMissingError(hang, hint, patience_s=device_nodes.WAIT_S)
    patience_s = device_nodes.wait_limit_s(view.root)
    if config.profile == "auto" and not wants_gpu(profile):
        if view.waited_s < patience_s and device_nodes.driver_pending(board, view.root):
            hint = "the driver may be late: start with -p cpu not to wait for it"
            raise DeviceMissingError("an NVIDIA GPU is here, but no driver answers", hint, patience_s=patience_s)
        return board
    if not wants_gpu(profile) or board.refused is not None:
        return board
    found = device_nodes.check_nodes(board, view.root)
    if found.ready:
        return board
    # Long after boot a missing device will not appear: a profile that allows the CPU gets it without a wait.
    waits = view.waited_s < patience_s and patience_s >= device_nodes.WAIT_S
    if profile.preset.fallback != "cpu" or waits:
        raise DeviceMissingError(found.sentence, found.hint, patience_s=patience_s)
    return replace(board, refused=found.sentence)


def capability_of(prepared: Prepared, plan: LaunchPlan) -> str | None:
    """Return the highest compute capability of the GPUs that a plan uses; the board's where it names none."""
    used = [gpu for gpu in prepared.board.gpus if gpu.uuid and gpu.uuid in plan.budget]
    return newest_capability(used) or prepared.board.compute_capability


# The engine that `edgellm build` would make, for boards that are not present or have none yet.

_VALUES = (
    "--model --alias --host --ctx-size --parallel --batch-size --ubatch-size --cache-type-k --cache-type-v "
    "--flash-attn --cache-ram --ctx-checkpoints --n-gpu-layers --device --split-mode --tensor-split --fit --threads "
    "--threads-batch --mmproj --image-max-tokens --load-mode --log-colors --override-tensor --rpc"
)
_LEAST_ARCH = 50  # no toolkit that llama.cpp still supports compiles for older ones (CUDA 12: 50, CUDA 13: 75)
_SWITCHES = (
    "--no-context-shift --log-timestamps --log-prefix --no-ui --offline --no-warmup --slots --props --metrics "
    "--embedding --reranking --jinja"
)


def assumed_engine(board: Board, recipe: str, path: str) -> Engine:
    """Return a llama-server of the newest spelling, with CUDA where the board has a GPU and the recipe is for one."""
    cuda = recipe != "cpu" and board.compute_capability is not None and board.refused is None
    archs = [gpu_code.architecture(gpu.compute_capability) or 0 for gpu in board.gpus] if cuda else []
    flags = {name: Flag(name, 1) for name in (*_VALUES.split(), *OPTION_NAMES)} | {
        name: Flag(name, 0) for name in _SWITCHES.split()
    }
    flags["--verbosity"] = Flag("--verbosity", 1, ("0", "1", "2", "3", "4", "5"))
    return Engine(
        id=f"{recipe or 'cpu'} (not built yet)",
        kind="llama-server",
        path=path,
        flags=flags,
        cuda=cuda,
        assumed=True,
        built_for=tuple(sorted({arch for arch in archs if arch >= _LEAST_ARCH})),
        rpc=True,
    )
