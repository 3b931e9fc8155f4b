"""Each check, on a board tree with one thing changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from edge import resources
from edge.board.board import PowerMode, newest_capability
from edge.board.readrate import ReadRate
from edge.board.storage import Storage
from edge.doctor.check import Check, CheckResult, worst
from edge.doctor.doctor import examine
from edge.doctor.facts import (
    CudaToolkit,
    DoctorFacts,
    DropIn,
    Jtop,
    Node,
    OwnFile,
    Port,
    Process,
    Swap,
    UnitState,
    WantedModel,
    WslFacts,
)
from edge.telemetry.sample import Fan, Zone
from edge.units import GIB
from tests.doctor.patients import CUDA_ENGINE, absent, finding, patient, with_engine
from tests.trees.trees import NAMES


def assert_check(facts: DoctorFacts, name: str, verdict: CheckResult, *words: str) -> Check:
    check = finding(facts, name)
    text = f"{check.says} {check.next_step} {check.command}"
    assert check.verdict is verdict, check
    assert all(word in text for word in words), check
    return check


@pytest.mark.parametrize("name", NAMES)
def test_every_tree_can_be_examined_and_what_is_wrong_has_a_next_step(name: str, tmp_path: Path) -> None:
    checks = examine(patient(name, tmp_path))
    assert len(checks) >= 6
    for check in checks:
        assert check.says
        assert check.next_step or check.verdict in (CheckResult.OK, CheckResult.UNKNOWN), check
    assert len({(check.name, check.says) for check in checks}) == len(checks)


# ---------------------------------------------------------------- board


def test_copied_tree_does_not_tell_who_may_open_its_nodes(tmp_path: Path) -> None:
    assert absent(patient("orin-nano-8", tmp_path), "gpu.access")


def test_refused_board_says_why_and_offers_its_cpu(tmp_path: Path) -> None:
    assert_check(patient("nano", tmp_path), "board.supported", CheckResult.BAD, "CUDA 10.2", "--profile cpu")


def test_fc16_nvmap_regression_is_named_with_its_cure(tmp_path: Path) -> None:
    assert_check(
        patient("orin-nano-8-super", tmp_path), "board.faults", CheckResult.WARN, "36.4.7", "36.5", "managed_memory"
    )
    assert_check(patient("orin-nano-8", tmp_path), "board.faults", CheckResult.OK, "36.4.3")


def test_fc64_unknown_release_is_no_fault(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    note = "L4T 36.9.0 is not in our table: taken as 36.5.2 (JetPack 6.2.3), the nearest known"
    assert_check(
        replace(facts, board=replace(facts.board, notes=(note,))), "board.release", CheckResult.UNKNOWN, "36.5.2"
    )


def test_configuration_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    serving = replace(facts.serving, config_problem="no profile 'orion'", config_hint="did you mean orin?")
    assert_check(replace(facts, serving=serving), "config.valid", CheckResult.BAD, "orion", "did you mean orin?")


def test_models_that_are_configured_must_be_here(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True)
    missing = WantedModel("chat", "qwen:Q5_K_M", "no model qwen in the store", "edgellm model pull qwen")
    for models, verdict, word in (
        ((), CheckResult.WARN, "model pull Qwen3.5-2B:Q5_K_M"),
        ((WantedModel("chat", "x"),), CheckResult.OK, "chat"),
        ((missing, WantedModel("embed", "y")), CheckResult.BAD, "edgellm model pull qwen"),
    ):
        serving = replace(facts.serving, models=models, advised="Qwen3.5-2B:Q5_K_M")
        assert_check(replace(facts, serving=serving), "config.model", verdict, word)
    biggest = replace(facts.serving, model_file=Path("/models/a.gguf"))
    for planned, verdict, words in (
        ({"advised": "b:Q4_K_M", "advised_file": Path("/models/b.gguf")}, CheckResult.OK, ["b:Q4_K_M is served"]),
        ({"advised": "b:Q4_K_M"}, CheckResult.WARN, ["none to choose", "model pull b:Q4_K_M"]),
        ({"plan_problem": "it needs 9 GiB", "plan_hint": "free some"}, CheckResult.WARN, ["needs 9 GiB", "free some"]),
    ):
        serving = replace(biggest, **planned)
        assert_check(replace(facts, serving=serving), "config.model", verdict, *words)


# ---------------------------------------------------------------- memory


def test_fc17_little_free_memory_with_a_full_cache_is_fine(tmp_path: Path) -> None:
    facts = patient("agx-orin-64-jp5", tmp_path)
    assert_check(facts, "memory.available", CheckResult.OK, "44.1 GiB of 61.3 GiB", "file cache")


def test_little_available_memory_names_who_holds_it(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    facts = replace(
        facts,
        memory=replace(facts.memory, available_bytes={"unified": GIB}),
        use=replace(facts.use, biggest=(Process(41, "ollama", 4 * GIB),)),
    )
    assert_check(facts, "memory.available", CheckResult.WARN, "ollama 4.0 GiB (pid 41)", "as root")
    use = replace(facts.use, on_gpu=(Process(41, "llama-server", 3 * GIB),))
    assert_check(replace(facts, use=use), "memory.available", CheckResult.WARN, "on the GPU: llama-server 3.0 GiB")


def test_control_group_limit_is_said(tmp_path: Path) -> None:
    facts = patient("x86-vm", tmp_path)
    note = "cgroup v2 /docker allows 2.0 GiB: less than the machine's memory"
    assert_check(
        replace(facts, memory=replace(facts.memory, notes=(note,))), "memory.limit", CheckResult.WARN, "2.0 GiB"
    )


def test_desktop_on_a_small_board_costs_a_model(tmp_path: Path) -> None:
    assert_check(
        patient("orin-nano-8-desktop", tmp_path), "memory.desktop", CheckResult.WARN, "gnome-shell", "multi-user.target"
    )
    assert_check(patient("orin-nano-8", tmp_path), "memory.desktop", CheckResult.OK, "headless")
    thor = patient("thor", tmp_path)
    thor = replace(thor, use=replace(thor.use, desktop=Process(7, "Xorg", GIB)))
    assert_check(thor, "memory.desktop", CheckResult.OK, "memory enough")


def test_zram_matters_on_small_boards_only(tmp_path: Path) -> None:
    assert_check(patient("orin-nano-8", tmp_path), "memory.zram", CheckResult.WARN, "6 devices", "nvzramconfig")
    assert_check(patient("agx-orin-64", tmp_path), "memory.zram", CheckResult.OK, "12 devices")


SD = Storage("/", "ext4", "sd", "mmcblk0")


@pytest.mark.parametrize(
    ("swaps", "swapped_bytes", "verdict", "word"),
    [
        ((), 0, CheckResult.OK, "no swap"),
        ((Swap("/swapfile", "file", 8 * GIB, 0),), 0, CheckResult.OK, "never counted"),
        ((Swap("/dev/mmcblk0p2", "partition", GIB, 0, SD),), 0, CheckResult.WARN, "wears out"),
        ((Swap("/swapfile", "file", GIB, 0, SD),), 0, CheckResult.WARN, "/swapfile, a file on mmcblk0"),
        ((Swap("/swapfile", "file", 8 * GIB, 2 * GIB),), 2 * GIB, CheckResult.WARN, "swapped out"),
    ],
)
def test_swap(tmp_path: Path, swaps: tuple[Swap, ...], swapped_bytes: int, verdict: CheckResult, word: str) -> None:
    facts = patient("orin-nano-8", tmp_path)
    assert_check(
        replace(facts, use=replace(facts.use, swaps=swaps, swapped_bytes=swapped_bytes)), "memory.swap", verdict, word
    )


def test_swappiness(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    assert_check(facts, "memory.swappiness", CheckResult.WARN, "60", "vm.swappiness=10")
    assert_check(replace(facts, use=replace(facts.use, swappiness=10)), "memory.swappiness", CheckResult.OK)
    assert absent(replace(facts, use=replace(facts.use, swaps=())), "memory.swappiness")


def test_fc20_oom_kills_since_boot_are_evidence(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    assert_check(
        replace(facts, use=replace(facts.use, oom_kills=2)),
        "memory.oom",
        CheckResult.WARN,
        "2 processes",
        "prompt cache",
    )
    assert_check(replace(facts, use=replace(facts.use, oom_kills=0)), "memory.oom", CheckResult.OK)


# ---------------------------------------------------------------- GPU


def _nodes(facts: DoctorFacts, *nodes: Node, **changes: object) -> DoctorFacts:
    return replace(facts, devices=replace(facts.devices, nodes=nodes, **changes))  # type: ignore[arg-type]


def test_jetson_without_its_nodes_is_bad_and_a_container_needs_the_runtime(tmp_path: Path) -> None:
    facts = _nodes(patient("orin-nano-8", tmp_path), Node("/dev/nvmap", "video", True))
    assert_check(facts, "gpu.nodes", CheckResult.BAD, "nvhost-ctrl-gpu", "dmesg")
    inside = replace(facts, board=replace(facts.board, container="docker"))
    assert_check(inside, "gpu.nodes", CheckResult.BAD, "container", "--runtime nvidia")


def test_gpu_whose_firmware_did_not_start_needs_a_power_cycle(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    facts = replace(facts, devices=replace(facts.devices, igpu_folder=("power",)))
    assert_check(facts, "gpu.nodes", CheckResult.BAD, "did not start", "off and on")


def test_user_outside_of_video_may_not_open_nvmap(tmp_path: Path) -> None:
    closed = Node("/dev/nvmap", "video", False)
    facts = _nodes(
        patient("orin-nano-8", tmp_path, live=True), closed, Node("/dev/nvhost-ctrl-gpu", "video", True), user="ann"
    )
    assert_check(facts, "gpu.access", CheckResult.BAD, "/dev/nvmap", "usermod -aG video ann")
    pending = _nodes(facts, closed, user="ann", pending_groups=("video",))
    assert_check(pending, "gpu.access", CheckResult.BAD, "log in again")
    assert_check(patient("orin-nano-8", tmp_path, live=True), "gpu.access", CheckResult.OK)


def test_card_without_uvm_cannot_start_cuda(tmp_path: Path) -> None:
    facts = patient("rtx-4090", tmp_path)
    assert_check(facts, "gpu.uvm", CheckResult.OK)
    less = tuple(node for node in facts.devices.nodes if not node.path.endswith("uvm"))
    assert_check(_nodes(facts, *less), "gpu.uvm", CheckResult.BAD, "nvidia-modprobe")
    assert absent(patient("orin-nano-8", tmp_path), "gpu.uvm")
    assert absent(patient("wsl2", tmp_path), "gpu.uvm")


@pytest.mark.parametrize(("active", "verdict"), [("active", CheckResult.OK), ("inactive", CheckResult.WARN)])
def test_persistence_daemon(tmp_path: Path, active: str, verdict: CheckResult) -> None:
    name = "nvidia-persistenced.service"
    facts = patient("rtx-4090", tmp_path, units={name: UnitState(name, "loaded", active)})
    assert_check(facts, "gpu.persistence", verdict)


def test_persistence_that_the_driver_confirms_needs_no_daemon(tmp_path: Path) -> None:
    facts = patient("rtx-4090", tmp_path)
    facts = replace(facts, devices=replace(facts.devices, persistence=True))
    assert_check(facts, "gpu.persistence", CheckResult.OK, "keeps the GPU ready")
    assert_check(patient("h200", tmp_path), "gpu.persistence", CheckResult.UNKNOWN, "container")


def test_memory_of_a_card_that_others_hold(tmp_path: Path) -> None:
    facts = patient("rtx-4090", tmp_path)
    assert_check(facts, "gpu.memory", CheckResult.OK, "RTX 4090: 23.0 GiB free")
    uuid = str(facts.board.gpus[0].uuid)
    held = replace(facts.memory, available_bytes={**facts.memory.available_bytes, uuid: 3 * GIB})
    assert_check(replace(facts, memory=held), "gpu.memory", CheckResult.WARN, "3.0 GiB free", "nvidia-smi")


def test_mig_is_reported(tmp_path: Path) -> None:
    facts = patient("rtx-4090", tmp_path)
    gpu = replace(facts.board.gpus[0], name="NVIDIA H100", mig=True)
    assert_check(
        replace(facts, board=replace(facts.board, gpus=(gpu,))), "gpu.mig", CheckResult.WARN, "H100", "instance"
    )


@pytest.mark.parametrize(
    ("driver", "verdict", "word"),
    [
        ("580.95.05", CheckResult.OK, "CUDA 13"),
        ("570.133.07", CheckResult.OK, "CUDA 12"),
        ("470.256.02", CheckResult.OK, "CUDA 11"),
        ("390.157", CheckResult.BAD, "580"),
    ],
)
def test_driver_against_the_compatibility_table(tmp_path: Path, driver: str, verdict: CheckResult, word: str) -> None:
    facts = patient("rtx-4090", tmp_path)
    assert_check(replace(facts, board=replace(facts.board, driver=driver)), "gpu.driver", verdict, word)


# ---------------------------------------------------------------- engine


def test_missing_engine_says_what_to_build(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True)
    serving = replace(facts.serving, engine_problem="no engine is built yet", engine_hint="run `edgellm build -p orin`")
    assert_check(
        replace(facts, serving=serving), "engine.present", CheckResult.BAD, "no engine is built yet", "build -p orin"
    )


def test_fc41_engine_without_cuda_on_a_gpu_is_bad_where_the_profile_wants_the_gpu(tmp_path: Path) -> None:
    plain = replace(CUDA_ENGINE, cuda=False, built_for=(), id="embedded-1", kind="embedded")
    facts = patient("orin-nano-8", tmp_path)
    assert facts.serving.needs_gpu
    assert_check(with_engine(facts, plain), "engine.cuda", CheckResult.BAD, "idle")
    assert_check(with_engine(facts, plain, needs_gpu=False), "engine.cuda", CheckResult.WARN)
    assert_check(with_engine(facts, CUDA_ENGINE), "engine.cuda", CheckResult.OK)
    assert absent(with_engine(patient("x86-vm", tmp_path), plain), "engine.cuda")


@pytest.mark.parametrize(
    ("tree", "built_for", "verdict"),
    [
        ("orin-nano-8", (87,), CheckResult.OK),
        ("orin-nano-8", (80, 86, 89), CheckResult.BAD),  # machine code of sm_86 does not run on a Jetson's sm_87
        ("thor", (110,), CheckResult.OK),
        ("thor", (120,), CheckResult.BAD),
        ("rtx-4090", (86,), CheckResult.OK),  # a minor below, same major
        ("rtx-4090", (75,), CheckResult.WARN),  # PTX may be compiled at the first start
        ("rtx-4090", (90,), CheckResult.BAD),
        ("rtx-4090", (), CheckResult.UNKNOWN),
    ],
)
def test_engine_is_built_for_this_gpu(
    tmp_path: Path, tree: str, built_for: tuple[int, ...], verdict: CheckResult
) -> None:
    engine = replace(CUDA_ENGINE, built_for=built_for)
    assert_check(with_engine(patient(tree, tmp_path), engine), "engine.arch", verdict)


@pytest.mark.parametrize(
    ("beside", "verdict", "said"),
    [
        ("3.5", CheckResult.OK, "the GPUs are sm_35, sm_89: only sm_89 is used"),
        ("8.6", CheckResult.OK, "the GPUs are sm_86, sm_89"),
        ("12.0", CheckResult.WARN, "the GPUs are sm_89, sm_120: only sm_89 is used"),
    ],
)
def test_of_several_gpus_each_is_judged(tmp_path: Path, beside: str, verdict: CheckResult, said: str) -> None:
    """A card that the engine has no code for is left out by the plan, and the others serve."""
    facts = patient("rtx-4090", tmp_path)
    gpus = (*facts.board.gpus, replace(facts.board.gpus[0], uuid="GPU-2", compute_capability=beside))
    board = replace(facts.board, gpus=gpus, compute_capability=newest_capability(gpus))
    engine = replace(CUDA_ENGINE, built_for=(86, 89))
    assert_check(with_engine(replace(facts, board=board), engine), "engine.arch", verdict, said)
    none = replace(CUDA_ENGINE, built_for=(130,))
    assert_check(with_engine(replace(facts, board=board), none), "engine.arch", CheckResult.BAD, "but the GPUs are")


@pytest.mark.parametrize(
    ("tree", "built", "verdict"),
    [
        ("agx-orin-64-jp5", "12.9", CheckResult.BAD),
        ("agx-orin-64-jp5", "11.4", CheckResult.OK),
        ("orin-nano-8", "12.8", CheckResult.WARN),
        ("orin-nano-8", "12.2", CheckResult.OK),
        ("rtx-4090", "13.0", CheckResult.BAD),  # driver 570
        ("rtx-4090", "12.9", CheckResult.OK),  # minor versions are compatible on discrete GPUs
    ],
)
def test_fc05_engine_built_with_a_newer_cuda_than_the_driver_knows(
    tmp_path: Path, tree: str, built: str, verdict: CheckResult
) -> None:
    assert_check(with_engine(patient(tree, tmp_path), CUDA_ENGINE, engine_cuda=built), "engine.driver", verdict, built)


def test_fc05_every_toolkit_is_listed_and_the_one_of_the_jetpack_counts(tmp_path: Path) -> None:
    facts = patient("agx-orin-64-jp5", tmp_path)
    new, own = CudaToolkit("/usr/local/cuda-12.9", "12.9", True), CudaToolkit("/usr/local/cuda-11.4", "11.4", True)
    only_new = replace(facts, cuda=replace(facts.cuda, toolkits=(new,)))
    assert_check(only_new, "cuda.toolkit", CheckResult.BAD, "12.9", "JetPack 5.1.2", "cuda-toolkit-11-4")
    both = replace(facts, cuda=replace(facts.cuda, toolkits=(new, own), on_path="/usr/local/cuda-12.9/bin/nvcc"))
    assert_check(both, "cuda.toolkit", CheckResult.WARN, "12.9", "11.4", "PATH finds")


def test_fc01_nvcc_off_the_path_is_found(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True)
    own = CudaToolkit("/usr/local/cuda-12.6", "12.6", True)
    assert_check(
        replace(facts, cuda=replace(facts.cuda, toolkits=(own,))), "cuda.toolkit", CheckResult.OK, "not on PATH"
    )
    assert absent(patient("x86-vm", tmp_path), "cuda.toolkit")


def test_fc11_cuda_pool_that_reserves_addresses_is_said_on_jetsons(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    assert_check(with_engine(facts, replace(CUDA_ENGINE, no_vmm=False)), "engine.pool", CheckResult.WARN, "NO_VMM")
    assert_check(with_engine(facts, replace(CUDA_ENGINE, no_vmm=None)), "engine.pool", CheckResult.UNKNOWN)
    assert_check(with_engine(facts, CUDA_ENGINE), "engine.pool", CheckResult.OK)
    assert absent(with_engine(patient("rtx-4090", tmp_path), CUDA_ENGINE), "engine.pool")


def test_cache_of_compiled_kernels(tmp_path: Path) -> None:
    facts = with_engine(patient("orin-nano-8", tmp_path), CUDA_ENGINE)
    for writable, size, verdict in (
        (False, 0, CheckResult.BAD),
        (True, 6 * GIB, CheckResult.WARN),
        (True, 0, CheckResult.OK),
    ):
        cache = replace(facts.cuda, jit_cache_writable=writable, jit_cache_bytes=size)
        assert_check(replace(facts, cuda=cache), "engine.jit_cache", verdict)


# ---------------------------------------------------------------- power and heat


def test_fc43_wanted_power_mode_is_set_by_its_number_on_this_image(tmp_path: Path) -> None:
    facts = patient("orin-nx-16", tmp_path)
    assert facts.serving.power_mode_wanted == "MAXN_SUPER"
    assert_check(facts, "power.mode", CheckResult.WARN, "40W (number 4", "nvpmodel -m 0")
    shuffled = (PowerMode(3, "MAXN_SUPER"), PowerMode(4, "40W"))
    assert_check(replace(facts, power_modes=shuffled), "power.mode", CheckResult.WARN, "nvpmodel -m 3")
    assert_check(patient("orin-nano-8", tmp_path), "power.mode", CheckResult.WARN, "does not have")
    assert_check(patient("agx-orin-64", tmp_path), "power.mode", CheckResult.OK, "MAXN")


def with_zones(facts: DoctorFacts, **temp_c: float) -> DoctorFacts:
    """Replace the temperatures; trip points stay those of the tree."""
    passive_c = next((zone.passive_c for zone in facts.sensors.zones if zone.passive_c), None)
    zones = tuple(Zone(name, value, passive_c) for name, value in temp_c.items())
    return replace(facts, sensors=replace(facts.sensors, zones=zones))


@pytest.mark.parametrize(("tj_c", "verdict"), [(63.0, CheckResult.OK), (89.5, CheckResult.WARN)])
def test_fc44_heat_is_said_before_the_throttle_point(tmp_path: Path, tj_c: float, verdict: CheckResult) -> None:
    facts = patient("orin-nano-8", tmp_path)
    assert {zone.passive_c for zone in facts.sensors.zones} <= {99.0, None}
    assert_check(with_zones(facts, cpu=50.0, tj=tj_c), "power.heat", verdict, "99 °C")


def test_fc44_throttling_now_is_bad(tmp_path: Path) -> None:
    facts = patient("thor", tmp_path)
    sensors = replace(facts.sensors, throttled=("gpu-throttle-alert",))
    assert_check(replace(facts, sensors=sensors), "power.heat", CheckResult.BAD, "gpu-throttle-alert")


def test_fan_that_stands_still_on_a_hot_board(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    assert_check(facts, "power.fan", CheckResult.OK, "set to 24%")
    hot = with_zones(facts, tj=80.0)
    hot = replace(hot, sensors=replace(hot.sensors, fan=Fan(0.0)))
    assert_check(hot, "power.fan", CheckResult.WARN, "stands still")
    turning = replace(facts.sensors, fan=Fan(0.0, 1500))
    assert_check(replace(facts, sensors=turning), "power.fan", CheckResult.OK, "1500 rpm")


def test_trouble_of_the_power_supply_is_reported(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    trouble = ("power supply: VDD_IN curr1_crit_alarm", "power supply: VDD_IN sags to 4.62 V")
    weak = replace(facts, sensors=replace(facts.sensors, supply=trouble))
    assert_check(weak, "power.supply", CheckResult.WARN, "VDD_IN sags to 4.62 V", "supply, cable and plug")
    assert "power.supply" not in {check.name for check in examine(facts)}


# ---------------------------------------------------------------- storage


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("nvme", CheckResult.OK),
        ("ssd", CheckResult.OK),
        ("virtual", CheckResult.OK),
        *((k, CheckResult.WARN) for k in ("hdd", "usb", "emmc", "sd", "network", "windows", "container", "memory")),
    ],
)
def test_storage_of_the_model_folder(tmp_path: Path, kind: str, verdict: CheckResult) -> None:
    facts = patient("orin-nano-8", tmp_path)
    models = replace(facts.models, storage=Storage("/", "ext4", kind, "disk0"))
    assert_check(replace(facts, models=models), "storage.kind", verdict)


def test_measured_rate_says_which_cold_start_it_implies(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True)
    for rate, verdict, words in ((2e9, CheckResult.OK, "2.1 s"), (90e6, CheckResult.WARN, "47.7 s")):
        measured = ReadRate(rate, 4, 64 << 20, 0.1, {1: rate / 2, 4: rate})
        sick = replace(facts, models=replace(facts.models, measured=measured))
        sick = replace(sick, serving=replace(sick.serving, model_bytes=4 * GIB))
        assert_check(sick, "storage.rate", verdict, words, "best with 4")
    problem = replace(facts.models, measure_problem="there is no model file to measure with yet")
    assert_check(replace(facts, models=problem), "storage.rate", CheckResult.UNKNOWN, "no model file")


def test_fc79_the_folder_that_blocks_is_named(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    models = replace(facts.models, path=Path("/mnt/ssd/models"), blocked_by=Path("/mnt/ssd"))
    assert_check(replace(facts, models=models), "storage.access", CheckResult.BAD, "/mnt/ssd,", "chmod o+x /mnt/ssd")


def test_fc79_mount_point_without_its_disk_is_bad(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    models = replace(facts.models, empty_mount_point=True)
    assert_check(replace(facts, models=models), "storage.kind", CheckResult.BAD, "not mounted", "mount -a")


def test_fc14_little_space_is_said_before_it_runs_out(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path)
    for free, verdict in ((3 * GIB, CheckResult.WARN), (200 * GIB, CheckResult.OK)):
        assert_check(replace(facts, models=replace(facts.models, free_bytes=free)), "storage.space", verdict)


# ---------------------------------------------------------------- service


def _unit(load: str = "loaded", active: str = "active", file_state: str = "enabled") -> dict[str, UnitState]:
    return {"edgellm.service": UnitState("edgellm.service", load, active, file_state, "exit-code", 4)}


@pytest.mark.parametrize(
    ("units", "verdict", "word"),
    [
        (_unit(), CheckResult.OK, "restarted 4 times"),
        (_unit(active="failed"), CheckResult.BAD, "journalctl"),
        (_unit(file_state="disabled"), CheckResult.WARN, "enable"),
        (_unit(active="inactive"), CheckResult.WARN, "systemctl start"),
        (_unit(active="activating"), CheckResult.OK, "activating"),
        (_unit(load="not-found", active="inactive", file_state=""), CheckResult.OK, "not installed"),
        ({}, CheckResult.UNKNOWN, "does not answer"),
    ],
)
def test_unit_state(tmp_path: Path, units: dict[str, UnitState], verdict: CheckResult, word: str) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True, systemd=True, units=units)
    assert_check(facts, "service.unit", verdict, word)
    assert_check(replace(facts, systemd=False), "service.unit", CheckResult.UNKNOWN, "no autostart")


@pytest.mark.parametrize(
    ("text", "verdict", "word"),
    [
        ("[Service]\nPrivateDevices=yes\n", CheckResult.BAD, "PrivateDevices"),
        ("[Service]\nDevicePolicy=closed\n", CheckResult.BAD, "DevicePolicy"),
        ("[Service]\n MemoryDenyWriteExecute=true\n", CheckResult.BAD, "CUDA's compiler"),
        ("# mine\nMemoryMax=4G\n", CheckResult.BAD, "[Section]"),
        ("[Service]\nProtectClock=yes\n", CheckResult.BAD, "device policy"),
        ("[Service]\nDevicePolicy=closed\nDeviceAllow=/dev/nvidia0 rw\n", CheckResult.OK, "none hides"),
        ("[Service]\n#PrivateDevices=yes\nPrivateTmp=yes\n", CheckResult.OK, "none hides"),
    ],
)
def test_fc76_drop_ins_that_hide_the_gpu_are_found(tmp_path: Path, text: str, verdict: CheckResult, word: str) -> None:
    path = "/etc/systemd/system/edgellm.service.d/mine.conf"
    facts = patient("orin-nano-8", tmp_path, drop_ins=(DropIn(path, text),))
    assert_check(facts, "service.drop_ins", verdict, word)


def test_fc76_the_unit_that_we_ship_hides_nothing(tmp_path: Path) -> None:
    unit = resources.data_dir("systemd") / "edgellm.service"
    facts = patient("orin-nano-8", tmp_path, drop_ins=(DropIn(str(unit), unit.read_text()),))
    assert_check(facts, "service.drop_ins", CheckResult.OK, "none hides")


def test_fc76_hidden_home_with_models_in_it(tmp_path: Path) -> None:
    facts = patient("x86-vm", tmp_path, drop_ins=(DropIn("/etc/x.conf", "[Service]\nProtectHome=yes\n"),))
    assert finding(facts, "service.drop_ins").verdict is CheckResult.OK
    home = replace(facts, models=replace(facts.models, path=Path("/home/ann/models")))
    assert_check(home, "service.drop_ins", CheckResult.BAD, "ProtectHome", "/home/ann/models")


@pytest.mark.parametrize(
    ("port", "verdict", "word"),
    [
        (Port("127.0.0.1:8080"), CheckResult.OK, "free"),
        (Port("127.0.0.1:8080", 812, "python3", ours=True), CheckResult.OK, "held by edgellm"),
        (Port("127.0.0.1:8080", 812, "ollama"), CheckResult.BAD, "ollama (pid 812)"),
        (Port("127.0.0.1:8080", 0), CheckResult.BAD, "another user's process"),
    ],
)
def test_fc34_owner_of_the_port_is_named(tmp_path: Path, port: Port, verdict: CheckResult, word: str) -> None:
    assert_check(patient("orin-nano-8", tmp_path, ports=(port,)), "service.port", verdict, word)


@pytest.mark.parametrize(
    ("jtop", "load", "active", "verdict", "word"),
    [
        (Jtop("socket", True, "jtop"), "loaded", "active", CheckResult.OK, "answers"),
        (Jtop("socket", False, "jtop"), "loaded", "active", CheckResult.OK, "group jtop"),
        (Jtop("folder", False, "root"), "loaded", "active", CheckResult.WARN, "folder"),
        (Jtop("absent", False), "loaded", "inactive", CheckResult.WARN, "Restart=always"),
        (Jtop("absent", False), "not-found", "inactive", CheckResult.OK, "not installed"),
    ],
)
def test_fc68_each_fault_of_jtop_has_its_own_words(
    tmp_path: Path, jtop: Jtop, load: str, active: str, verdict: CheckResult, word: str
) -> None:
    units = {"jtop.service": UnitState("jtop.service", load, active)}
    assert_check(patient("orin-nano-8", tmp_path, live=True, jtop=jtop, units=units), "service.jtop", verdict, word)


def test_fc13_clock_in_the_past_is_bad(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True)
    day = 24 * 3600.0
    now = facts.environment.now_s
    for now_s, newest_s, verdict in (
        (0.0, None, CheckResult.BAD),
        (now, now + 2 * day, CheckResult.BAD),
        (now, now, CheckResult.OK),
    ):
        about = replace(facts.environment, now_s=now_s, newest_file_s=newest_s)
        assert_check(replace(facts, environment=about), "service.clock", verdict)


def test_fc77_cache_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True)
    assert_check(facts, "service.home", CheckResult.OK)
    about = replace(facts.environment, cache_writable=False)
    assert_check(replace(facts, environment=about), "service.home", CheckResult.BAD)


def test_decimal_comma_does_not_reach_the_engine(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True)
    for locale, encoding, verdict, word in (
        ("de_DE.UTF-8", "UTF-8", CheckResult.OK, "LC_ALL=C"),
        ("C.UTF-8", "utf-8", CheckResult.OK, "C.UTF-8"),
        ("C", "ANSI_X3.4-1968", CheckResult.WARN, "UTF-8 locale"),
    ):
        about = replace(facts.environment, locale=locale, encoding=encoding)
        assert_check(replace(facts, environment=about), "service.locale", verdict, word)


def test_install_in_home_is_no_place_for_a_service(tmp_path: Path) -> None:
    facts = patient("orin-nano-8", tmp_path, live=True, systemd=True)
    for prefix, verdict in (("/home/ann/.venv", CheckResult.WARN), ("/opt/edgellm", CheckResult.OK)):
        about = replace(facts.environment, prefix=prefix)
        assert_check(replace(facts, environment=about), "service.path", verdict)


# ---------------------------------------------------------------- WSL2, our files


def test_wsl2_traps_have_names(tmp_path: Path) -> None:
    facts = patient("wsl2", tmp_path)
    names = [check.name for check in examine(facts) if check.name.startswith("wsl.")]
    assert names == [f"wsl.{n}" for n in ("gpu", "library", "systemd", "models", "idle", "port")]
    assert not any(check.name.startswith("wsl.") for check in examine(patient("x86-vm", tmp_path)))


@pytest.mark.parametrize(
    ("wsl", "name", "verdict", "word"),
    [
        (WslFacts(False, True, True), "wsl.gpu", CheckResult.BAD, "wsl.exe --update"),
        (WslFacts(True, False, True), "wsl.library", CheckResult.BAD, "driver in Windows"),
        (WslFacts(True, True, True, linux_driver=True), "wsl.library", CheckResult.BAD, "hides it"),
        (WslFacts(True, True, False), "wsl.systemd", CheckResult.WARN, "/etc/wsl.conf"),
        (WslFacts(True, True, True), "wsl.idle", CheckResult.WARN, "vmIdleTimeout"),
        (WslFacts(True, True, True, {"vmidletimeout": "-1"}), "wsl.idle", CheckResult.OK, "stays up"),
        (WslFacts(True, True, True, {"networkingmode": "mirrored"}), "wsl.port", CheckResult.OK, "share"),
        (
            WslFacts(True, True, True, {"localhostforwarding": "false"}),
            "wsl.port",
            CheckResult.BAD,
            "forwarding is off",
        ),
        (WslFacts(True, True, True), "wsl.port", CheckResult.OK, "localhost:8080"),
    ],
)
def test_wsl2_check(tmp_path: Path, wsl: WslFacts, name: str, verdict: CheckResult, word: str) -> None:
    assert_check(patient("wsl2", tmp_path, wsl=wsl), name, verdict, word)


def test_wsl2_models_on_a_windows_drive(tmp_path: Path) -> None:
    facts = patient("wsl2", tmp_path)
    models = replace(facts.models, path=Path("/mnt/c/models"), storage=Storage("/mnt/c", "9p", "windows"))
    assert_check(replace(facts, models=models), "wsl.models", CheckResult.WARN, "/mnt/c/models")
    assert absent(replace(facts, models=models), "storage.kind")


def test_own_files_that_fix_repairs(tmp_path: Path) -> None:
    leftovers = (
        OwnFile("folder", Path("/a"), 0o755),
        OwnFile("folder", Path("/b"), 0o700),
        OwnFile("mode", Path("/keys.toml"), 0o600),
        OwnFile("socket", Path("/run/main.sock"), 0),
    )
    facts = patient("orin-nano-8", tmp_path, live=True, leftovers=leftovers)
    assert_check(facts, "files.mode", CheckResult.WARN, "600", "--fix")
    assert_check(facts, "files.socket", CheckResult.WARN, "--fix")
    assert_check(facts, "files.folders", CheckResult.OK, "/a, /b")
    assert_check(replace(facts, leftovers=()), "files.ours", CheckResult.OK)


def test_one_odd_value_costs_its_own_check_only(tmp_path: Path) -> None:
    facts = patient("rtx-4090", tmp_path)
    odd = replace(facts, board=replace(facts.board, driver="newest"))
    assert_check(odd, "gpu.driver", CheckResult.UNKNOWN, "cannot be judged", "newest")
    # A check without a finding on good facts (engine.driver) may report that it cannot judge odd ones.
    assert {check.name for check in examine(facts)} <= {check.name for check in examine(odd)}


def test_the_worst_verdict_counts() -> None:
    def of(*verdicts: CheckResult) -> CheckResult:
        return worst(tuple(Check("a.b", verdict, "x") for verdict in verdicts))

    assert of() is CheckResult.OK
    assert of(CheckResult.OK, CheckResult.UNKNOWN) is CheckResult.UNKNOWN
    assert of(CheckResult.WARN, CheckResult.BAD, CheckResult.OK) is CheckResult.BAD
