"""Every board tree is recognised for what it is; what is unknown is said and never refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge.board.board import PowerMode
from edge.board.probe import probe
from tests.trees.trees import NAMES, copy, tree, write

# tree → id, compute capability, L4T, JetPack, CUDA, power mode, physical cores
EXPECTED = {
    "orin-nano-8": ("orin-nano-8", "8.7", "36.4.3", "6.2", "12.6", "15W", 6),
    "orin-nano-8-super": ("orin-nano-8", "8.7", "36.4.7", "6.2.1", "12.6", "MAXN_SUPER", 6),
    "orin-nano-8-desktop": ("orin-nano-8", "8.7", "36.5.0", "6.2.2", "12.6", "MAXN_SUPER", 6),
    "orin-nx-16": ("orin-nx-16", "8.7", "36.4.7", "6.2.1", "12.6", "40W", 8),
    "agx-orin-32": ("agx-orin-32", "8.7", "36.4.4", "6.2.1", "12.6", "MODE_30W", 8),
    "agx-orin-64": ("agx-orin-64", "8.7", "36.4.7", "6.2.1", "12.6", "MAXN", 12),
    "agx-orin-64-jp5": ("agx-orin-64", "8.7", "35.4.1", "5.1.2", "11.4", "MODE_30W", 12),
    "agx-orin-64-jp7": ("agx-orin-64", "8.7", "39.2.0", "7.2", "13.2", "MAXN", 12),
    "thor": ("agx-thor", "11.0", "38.4.0", "7.1", "13.0", "120W", 14),
    "xavier-nx": ("xavier-nx-8", "7.2", "35.4.1", "5.1.2", "11.4", "MODE_20W_6CORE", 6),
    "nano": ("nano", "5.3", "32.7.6", "4.6.x", "10.2", "MAXN", 4),
    "tx2": ("tx2", "6.2", "32.6.1", "4.6.x", "10.2", None, 4),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_jetson_is_recognised(name: str) -> None:
    board = probe(tree(name))
    mode = board.power_mode.name if board.power_mode else None
    found = (board.id, board.compute_capability, board.l4t, board.jetpack, board.cuda, mode, board.cpu.physical_cores)
    assert found == EXPECTED[name]
    assert board.unified_memory
    assert [gpu.uuid for gpu in board.gpus] == [None]


def test_every_tree_is_covered_and_says_where_it_comes_from() -> None:
    assert set(EXPECTED) | {"x86-vm", "wsl2", "rtx-4090", "h200"} == set(NAMES)
    for name in NAMES:
        provenance = (tree(name) / "PROVENANCE").read_text()
        assert any(f"{word}:" in provenance for word in ("measured", "reported", "reconstructed")), name


def test_nano_and_tx2_are_refused_with_the_reason() -> None:
    for name in ("nano", "tx2"):
        refused = probe(tree(name)).refused
        assert refused is not None
        assert "CUDA 10.2" in refused
    assert probe(tree("orin-nano-8")).refused is None


def test_a_changed_model_string_does_not_matter() -> None:
    board = probe(tree("orin-nx-16"))
    assert board.model == "NVIDIA Jetson Orin NX Seeed recomputer classic Super"
    assert board.module == "Jetson Orin NX (16GB)"


def test_bandwidth_follows_the_super_image_and_the_memory_clock_of_the_power_mode(tmp_path: Path) -> None:
    assert probe(tree("orin-nano-8")).bandwidth_bytes_s == pytest.approx(68.3e9, rel=0.01)
    root = copy("orin-nano-8-super", tmp_path)
    assert probe(root).bandwidth_bytes_s == pytest.approx(102.4e9, rel=0.01)
    write(root, "sys/kernel/nvpmodel_clk_cap/emc", "2133000000\n")
    assert probe(root).bandwidth_bytes_s == pytest.approx(68.3e9, rel=0.01)


@pytest.mark.parametrize(
    ("line", "version", "jetpack", "taken_as"),
    [
        ("# R36 (release), REVISION: 4.9, GCID: 1, BOARD: generic", "36.4.9", "6.2.1", "36.4.7"),
        ("# R36 (release), REVISION: 9.0, GCID: 1, BOARD: generic", "36.9.0", "6.2.3", "36.5.2"),
        ("# R41 (release), REVISION: 1.0, GCID: 1, BOARD: generic", "41.1.0", "7.2.2", "39.2.2"),
        ("# R36 (release), REVISION: 1.0, GCID: 1, BOARD: generic", "36.1.0", "6.0 DP", "36.2.0"),
    ],
)
def test_fc64_unknown_l4t_is_taken_as_its_nearest_neighbour_and_said(
    tmp_path: Path, line: str, version: str, jetpack: str, taken_as: str
) -> None:
    root = copy("orin-nano-8", tmp_path)
    write(root, "etc/nv_tegra_release", line + "\n# vendor image 1.2\n")
    board = probe(root)
    assert (board.l4t, board.jetpack) == (version, jetpack)
    assert any(version in note and taken_as in note for note in board.notes)
    assert board.refused is None


def test_fc64_without_a_release_file_the_package_and_then_the_kernel_tell(tmp_path: Path) -> None:
    root = copy("agx-orin-64", tmp_path)
    (root / "etc/nv_tegra_release").unlink()
    board = probe(root)
    assert (board.l4t, board.jetpack, board.cuda) == (None, "6.2.3", "12.6")
    assert any("guessed from the kernel" in note for note in board.notes)
    status = "Package: bash\nVersion: 5.1\n\nPackage: nvidia-l4t-core\nStatus: ok\nVersion: 36.5.0-20260101000000\n"
    write(root, "var/lib/dpkg/status", status)
    assert probe(root).l4t == "36.5.0"


def test_a_board_without_release_or_tegra_kernel_is_still_a_jetson(tmp_path: Path) -> None:
    root = copy("thor", tmp_path)
    (root / "etc/nv_tegra_release").unlink()
    write(root, "proc/version", "Linux version 6.12.0 (build@host) mainline\n")
    board = probe(root)
    assert (board.id, board.l4t, board.jetpack) == ("agx-thor", None, None)
    assert any("unknown" in note for note in board.notes)


@pytest.mark.parametrize(
    ("modes", "number", "name"),
    [
        ([(0, "MAXN_SUPER"), (1, "10W"), (4, "40W")], 4, "40W"),
        ([(4, "MAXN_SUPER"), (0, "10W"), (1, "40W")], 4, "MAXN_SUPER"),
        ([(0, "MODE_20W_6CORE"), (7, "GPU_FREQ_100")], 7, "GPU_FREQ_100"),
        ([(0, "15W")], 3, "mode 3"),
    ],
)
def test_fc43_power_mode_goes_by_name_whatever_its_number(
    tmp_path: Path, modes: list[tuple[int, str]], number: int, name: str
) -> None:
    root = copy("orin-nx-16", tmp_path)
    conf = "".join(f"< POWER_MODEL ID={i} NAME={n} >\nCPU_ONLINE CORE_0 1\n" for i, n in modes)
    write(root, "etc/nvpmodel.conf", conf)
    write(root, "var/lib/nvpmodel/status", f"pmode:{number:04d} fmode:fanNull\n")
    assert probe(root).power_mode == PowerMode(number, name)


def test_fc64_an_orin_on_jetpack_7_in_a_container_is_7_2(tmp_path: Path) -> None:
    """Kernel 6.8 without a release file: JetPack 7.0 and 7.1 are Thor's only (jetson_stats#867)."""
    for name, jetpack, cuda in (("agx-orin-64-jp7", "7.2", "13.2"), ("thor", "7.1", "13.0")):
        root = copy(name, tmp_path / name)
        (root / "etc/nv_tegra_release").unlink(missing_ok=True)
        (root / "var/lib/dpkg/status").unlink(missing_ok=True)
        write(root, "proc/version", "Linux version 6.8.12-1021-tegra (build@host) #1 SMP PREEMPT\n")
        board = probe(root)
        assert (board.l4t, board.cuda) == (None, cuda)
        assert board.jetpack is not None and board.jetpack.startswith(jetpack)


def test_power_mode_before_the_first_run_is_unknown(tmp_path: Path) -> None:
    """The default of /etc/nvpmodel.conf is what nvpmodel will set, not what is set."""
    root = copy("thor", tmp_path)
    assert probe(root).power_mode == PowerMode(1, "120W")
    (root / "var/lib/nvpmodel/status").unlink()
    assert probe(root).power_mode is None


def _compatible(root: Path, *entries: str) -> None:
    write(root, "sys/firmware/devicetree/base/compatible", b"".join(entry.encode() + b"\0" for entry in entries))


def test_several_module_ids_of_one_board_are_no_question(tmp_path: Path) -> None:
    root = copy("orin-nano-8", tmp_path)
    carrier = "nvidia,p3768-0000"
    _compatible(root, f"{carrier}+p3767-0003", f"{carrier}+p3767-0005", "nvidia,p3767-0003", "nvidia,tegra234")
    board = probe(root)
    assert (board.id, board.notes) == ("orin-nano-8", ())


def test_memory_decides_between_several_modules_and_for_an_unknown_one(tmp_path: Path) -> None:
    root = copy("orin-nx-16", tmp_path)
    _compatible(root, "nvidia,p3767-0000", "nvidia,p3767-0001", "nvidia,tegra234")
    assert probe(root).id == "orin-nx-16"
    _compatible(root, "nvidia,p9999-0001", "nvidia,tegra234")
    board = probe(root)
    assert board.id == "orin-nx-16"
    assert any("p9999-0001" in note for note in board.notes)
    write(root, "proc/meminfo", "MemTotal: 200000000 kB\nMemAvailable: 190000000 kB\n")
    board = probe(root)
    assert (board.id, board.compute_capability, board.bandwidth_bytes_s) == ("orin", "8.7", None)


def test_cores_that_the_power_mode_took_offline_do_not_count(tmp_path: Path) -> None:
    root = copy("agx-orin-64", tmp_path)
    write(root, "sys/devices/system/cpu/online", "0-3\n")
    assert probe(root).cpu.physical_cores == 4


def test_plain_pc_has_physical_cores_and_isa() -> None:
    board = probe(tree("rtx-4090"))
    assert (board.cpu.physical_cores, board.cpu.logical_cores) == (8, 16)
    assert {"avx2", "fma", "f16c"} <= set(board.cpu.isa)
    assert not board.unified_memory


def test_measured_discrete_gpu() -> None:
    board = probe(tree("h200"))
    (gpu,) = board.gpus
    assert (gpu.name, gpu.memory_bytes, gpu.compute_capability) == ("NVIDIA H200", 143771 * 2**20, "9.0")
    assert (board.driver, board.container, board.unified_memory) == ("580.159.04", "docker", False)


def test_gpu_that_has_no_memory_of_its_own_shares_the_machines(tmp_path: Path) -> None:
    root = copy("rtx-4090", tmp_path)
    header = (root / "nvidia-smi.csv").read_text().splitlines()[0]
    write(
        root,
        "nvidia-smi.csv",
        f"{header}\n0, GPU-dd, NVIDIA GB10, 0000000F:01:00.0, [N/A], [N/A], 12.1, [N/A], 580.95\n",
    )
    board = probe(root)
    assert board.unified_memory
    assert any("shares" in note for note in board.notes)


def test_carmel_has_no_dot_product() -> None:
    assert "asimddp" not in probe(tree("xavier-nx")).cpu.isa
    assert "asimddp" in probe(tree("orin-nano-8")).cpu.isa


def test_cores_without_sysfs_come_from_cpuinfo(tmp_path: Path) -> None:
    block = "processor\t: {}\nphysical id\t: 0\ncore id\t\t: {}\nmodel name\t: Some CPU\nflags\t\t: avx2\n\n"
    write(tmp_path, "proc/cpuinfo", "".join(block.format(i, i % 2) for i in range(4)))
    cpu = probe(tmp_path).cpu
    assert (cpu.name, cpu.physical_cores, cpu.logical_cores) == ("Some CPU", 2, 4)


def test_quota_of_a_container_limits_the_usable_cores(tmp_path: Path) -> None:
    root = copy("rtx-4090", tmp_path)
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/cpu.max", "300000 100000\n")
    assert probe(root).cpu.usable_cores == 3
    write(root, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert probe(root).cpu.usable_cores is None


def test_empty_root_is_an_unknown_machine_not_an_error(tmp_path: Path) -> None:
    board = probe(tmp_path)
    assert (board.memory_bytes, board.cpu.physical_cores, board.gpus) == (0, 1, ())


@pytest.mark.parametrize(
    ("file", "text", "container"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("run/systemd/container", "systemd-nspawn\n", "systemd-nspawn"),
        ("proc/1/environ", "PATH=/bin\0container=lxc\0", "lxc"),
        ("var/run/secrets/kubernetes.io/serviceaccount/namespace", "x", "kubernetes"),
    ],
)
def test_containers_are_recognised(tmp_path: Path, file: str, text: str, container: str) -> None:
    root = copy("rtx-4090", tmp_path)
    assert probe(root).container is None
    write(root, file, text)
    assert probe(root).container == container


def test_wsl2_is_recognised() -> None:
    board = probe(tree("wsl2"))
    assert board.container == "wsl2"
    assert [gpu.name for gpu in board.gpus] == ["NVIDIA GeForce RTX 4070 Laptop GPU"]


def test_this_machine_can_be_probed() -> None:
    board = probe()
    assert board.memory_bytes > 0
    assert board.cpu.physical_cores >= 1


def test_before_the_spawn_only_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "from pathlib import Path\n"
        "from edge.board.probe import probe\nfrom edge.board.memory import snapshot\n"
        "from edge.board.named import board_by_id\n"
        "snapshot(Path('/'), probe()); board_by_id('thor')\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "known = {'edge', 'msgspec', 'typing_extensions', 'tomli', '__mp_main__'}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - known))"
    )
    here = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=here)
    assert done.stdout.strip() == "[]"
