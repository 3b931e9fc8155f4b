"""Facts are read from real files, sockets, locks and programs."""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge import resources
from edge.board.probe import probe
from edge.config import load
from edge.config.devices import DeviceConfig
from edge.doctor import config as doctor_config
from edge.doctor import doctor, own_files, service
from edge.doctor.accounts import Account, first_blocked, reaches, serving_account
from edge.doctor.check import Check, CheckResult
from edge.doctor.config import read_remotes
from edge.doctor.doctor import examine, examined_folders, read_facts
from edge.doctor.engine import read_cuda
from edge.doctor.facts import DropIn, ServingFacts
from edge.doctor.gpu import read_devices, read_jtop
from edge.doctor.memory import processes, read_memory_use
from edge.doctor.own_files import find_leftovers
from edge.doctor.service import parse_show, read_ports, read_units, unit_files
from edge.doctor.storage import read_model_folder
from edge.doctor.wsl import read_environment, read_wsl
from edge.engine.engine import Engine
from edge.errors import UsageError
from edge.linux.procfs import lock_holders
from edge.linux.rpc import PROTOCOL
from edge.linux.tree import Tree
from edge.paths import system_folders
from edge.plan.prepare import HostView, prepare
from edge.service.access import PathUser, creatable
from tests.doctor.patients import CUDA_ENGINE, patient, places
from tests.fakes.gguf_writer import Gguf
from tests.fakes.rpc_protocol import serving
from tests.trees.trees import copy, tree, write

LIVE = Tree()
ANN = PathUser("ann", 54321, frozenset({54321}))
STRANGER = Account(ANN)
RPC_ENGINE = replace(CUDA_ENGINE, rpc=True)


# ---------------------------------------------------------------- ports


def test_fc34_our_own_listener_is_found_by_its_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (port,) = read_ports((address,), Path("/nonexistent"), False)
    assert (port.pid, port.ours) == (os.getpid(), False)
    assert port.name


def test_fc34_a_listener_on_all_addresses_takes_ours_too() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6) as server:
        number = server.getsockname()[1]
        (port,) = read_ports((f"127.0.0.1:{number}",), Path("/nonexistent"), False)
    assert port.pid == os.getpid()


def test_fc34_a_connection_that_is_not_a_listener_is_no_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    # The listener is closed; its accepted connection still has the port.
    address = f"127.0.0.1:{accepted.getsockname()[1]}"
    (port,) = read_ports((address,), Path("/nonexistent"), False)
    client.close()
    accepted.close()
    assert port.pid is None


def test_the_holder_of_the_lock_is_edgellm(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with socket.create_server(("127.0.0.1", 0)) as server, lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (port,) = read_ports((address,), lock, False)
    assert port.ours
    assert lock_holders(lock) == set()


def test_systemd_holds_the_port_of_our_socket_unit(tmp_path: Path) -> None:
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0\n"
    write(tmp_path, "proc/net/tcp", header + row)
    write(tmp_path, "proc/1/comm", "systemd\n")
    (tmp_path / "proc/1/fd").mkdir()
    (tmp_path / "proc/1/fd/40").symlink_to("socket:[4711]")
    (port,) = read_ports(("127.0.0.1:8080",), tmp_path / "lock", True, tmp_path / "proc")
    assert (port.pid, port.name, port.ours) == (1, "systemd", True)
    (port,) = read_ports(("127.0.0.1:8080",), tmp_path / "lock", False, tmp_path / "proc")
    assert not port.ours
    (tmp_path / "proc/1/fd/40").unlink()
    (port,) = read_ports(("127.0.0.1:8080",), tmp_path / "lock", True, tmp_path / "proc")
    assert (port.pid, port.ours) == (0, True)  # the service's own process, hidden from an ordinary user
    (port,) = read_ports(("192.168.1.5:8080",), tmp_path / "lock", False, tmp_path / "proc")
    assert port.pid is None


# ---------------------------------------------------------------- systemd


SHOW = """Id=edgellm.service
LoadState=loaded
ActiveState=active
UnitFileState=enabled
Result=success
NRestarts=3
FragmentPath=/etc/systemd/system/edgellm.service
DropInPaths=/etc/systemd/system/edgellm.service.d/a.conf /run/systemd/system/edgellm.service.d/b.conf

Id=jtop.service
LoadState=not-found
ActiveState=inactive
UnitFileState=
NRestarts=
FragmentPath=
DropInPaths=
"""


def test_output_of_systemctl_show() -> None:
    found = parse_show(SHOW)
    assert set(found) == {"edgellm.service", "jtop.service"}
    ours = found["edgellm.service"]
    assert (ours.active, ours.file_state, ours.restarts) == ("active", "enabled", 3)
    assert (found["jtop.service"].load, found["jtop.service"].restarts) == ("not-found", 0)
    assert parse_show("") == {}


def test_systemctl_is_asked_once_and_its_silence_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write(tmp_path, "systemctl", f"#!/bin/sh\necho called >> {tmp_path}/calls\ncat <<'END'\n{SHOW}END\n")
    program.chmod(0o755)
    monkeypatch.setattr(service, "booted", lambda root: True)
    assert set(read_units(LIVE, str(program))) == {"edgellm.service", "jtop.service"}
    assert (tmp_path / "calls").read_text() == "called\n"
    assert read_units(LIVE, str(tmp_path / "nothing")) == {}
    assert read_units(Tree(tmp_path), str(program)) == {}  # a copied tree has no running units


def test_unit_with_its_drop_ins_is_read(tmp_path: Path) -> None:
    write(tmp_path, "etc/systemd/system/edgellm.service", "[Service]\nUser=edgellm\nSupplementaryGroups=video render\n")
    write(tmp_path, "etc/systemd/system/edgellm.service.d/10-mine.conf", "[Service]\nPrivateDevices=yes\n")
    write(tmp_path, "etc/systemd/system/edgellm.service.d/notes.txt", "ignored")
    files = unit_files(Tree(tmp_path))
    assert [Path(file.path).name for file in files] == ["edgellm.service", "10-mine.conf"]
    assert "PrivateDevices" in files[1].text


def test_of_unit_files_of_one_name_only_the_one_that_systemd_takes_is_read(tmp_path: Path) -> None:
    for folder in ("run/systemd/system", "etc/systemd/system"):
        write(tmp_path, f"{folder}/edgellm.service", "[Service]\n")
        write(tmp_path, f"{folder}/edgellm.service.d/10-mine.conf", "[Service]\n")
    write(tmp_path, "run/systemd/system/edgellm.service.d/05-more.conf", "[Service]\n")
    etc, run = "/etc/systemd/system/edgellm.service", "/run/systemd/system/edgellm.service"
    found = [file.path for file in unit_files(Tree(tmp_path))]
    assert found == [etc, f"{run}.d/05-more.conf", f"{etc}.d/10-mine.conf"]


# ---------------------------------------------------------------- users and devices


def _people(root: Path) -> None:
    write(root, "etc/passwd", "root:x:0:0::/root:/bin/sh\nedgellm:x:990:990::/var/lib/edgellm:/bin/false\n")
    write(root, "etc/group", "root:x:0:\nvideo:x:44:ann\nrender:x:105:\njtop:x:993:\nedgellm:x:990:\n")


def test_serving_user_is_the_services(tmp_path: Path) -> None:
    _people(tmp_path)
    unit = "[Service]\nUser=edgellm\nSupplementaryGroups=video\nSupplementaryGroups=render nosuch\n"
    account = serving_account(Tree(tmp_path), unit)
    assert account.user == PathUser("edgellm", 990, frozenset({990, 105, 44}))


def test_without_a_service_the_caller_serves(tmp_path: Path) -> None:
    _people(tmp_path)
    account = serving_account(Tree(tmp_path), "")
    assert account.user.uid == os.geteuid()


def test_group_that_the_login_does_not_have_yet_is_pending(tmp_path: Path) -> None:
    write(tmp_path, "etc/passwd", f"ann:x:{os.geteuid()}:1000::/home/ann:/bin/sh\n")
    write(tmp_path, "etc/group", "video:x:64044:ann,bob\nrender:x:64105:bob\n")
    assert serving_account(Tree(tmp_path), "").pending == ("video",)


def test_mode_bits_decide_by_owner_group_and_others(tmp_path: Path) -> None:
    node = write(tmp_path, "node", "")
    about = node.stat()
    member = PathUser("bob", 54322, frozenset({about.st_gid}))
    owner = PathUser("owner", about.st_uid or 54323, frozenset())
    node.chmod(0o060)
    assert reaches(member, node, 6)
    assert not reaches(ANN, node, 6)
    if about.st_uid:
        assert not reaches(owner, node, 6)
    assert reaches(PathUser("root", 0, frozenset()), node, 6)
    assert not reaches(ANN, tmp_path / "nothing", 4)


def test_devices_of_each_kind_of_board(tmp_path: Path) -> None:
    def paths(name: str) -> set[str]:
        board_tree = Tree(tree(name))
        return {node.path for node in read_devices(board_tree, probe(tree(name)), STRANGER).nodes}

    assert "/dev/nvmap" in paths("orin-nano-8")
    assert "/dev/dri/renderD128" in paths("orin-nano-8")
    assert {"/dev/nvidia0", "/dev/nvmap"} <= paths("thor")
    assert paths("wsl2") == {"/dev/dxg"}
    assert paths("rtx-4090") == {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"}
    root = copy("orin-nano-8", tmp_path)
    (root / "dev/nvgpu/igpu0/ctrl").rename(root / "dev/nvgpu/igpu0/power")
    assert read_devices(Tree(root), probe(root), STRANGER).igpu_folder == ("power",)


def test_fc68_jtop_socket_that_became_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_jtop(Tree(tmp_path), STRANGER).socket == "absent"
    (tmp_path / "run/jtop.sock").mkdir(parents=True)
    assert read_jtop(Tree(tmp_path), STRANGER).socket == "folder"
    (tmp_path / "run/jtop.sock").rmdir()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # a socket's name is short, pytest's folders are not
        server.bind("run/jtop.sock")
        Path("run/jtop.sock").chmod(0o660)
        found = read_jtop(Tree(tmp_path), STRANGER)
    assert (found.socket, found.reachable) == ("socket", False)


# ---------------------------------------------------------------- memory, power, CUDA


def test_memory_use_of_a_board_with_a_desktop() -> None:
    use = read_memory_use(Tree(tree("orin-nano-8-desktop")))
    assert use.desktop is not None
    assert use.desktop.name == "gnome-shell"
    assert [process.name for process in use.biggest] == ["gnome-shell", "Xorg"]
    assert {swap.kind for swap in use.swaps} == {"zram"}


@pytest.mark.parametrize(
    ("line", "name", "kind"),
    [
        ("/swapfile file 4194300 0 -2", "/swapfile", "sd"),
        (r"/var/my\040swap file 4194300 0 -2", "/var/my swap", "sd"),
        (r"/swapfile\040(deleted) file 4194300 0 -2", "/swapfile", "sd"),
        ("/ssd/swapfile file 4194300 0 -2", "/ssd/swapfile", "nvme"),
        ("/dev/mmcblk0p2 partition 4194300 0 -2", "/dev/mmcblk0p2", "sd"),
        ("/dev/dm-1 partition 4194300 0 -2", "/dev/dm-1", "sd"),
        ("/dev/loop0 partition 4194300 0 -2", "/dev/loop0", "sd"),
        ("/dev/nvme0n1p3 partition 4194300 0 -2", "/dev/nvme0n1p3", "nvme"),
    ],
)
def test_swap_lies_on_the_disk_below_it(tmp_path: Path, line: str, name: str, kind: str) -> None:
    """A file, a volume of LVM and the file behind a loop device wear out the same card."""
    write(tmp_path, "proc/swaps", f"Filename Type Size Used Priority\n{line}\n")
    mounts = "1 0 179:1 / / rw - ext4 /dev/mmcblk0p1 rw\n2 1 259:1 / /ssd rw - ext4 /dev/nvme0n1p1 rw\n"
    write(tmp_path, "proc/self/mountinfo", mounts)
    for disk, device in (("mmcblk0p1", "179:1"), ("nvme0n1p1", "259:1"), ("dm-1", "253:1"), ("loop0", "7:0")):
        write(tmp_path, f"sys/class/block/{disk}/dev", device)
    write(tmp_path, "sys/class/block/mmcblk0/device/type", "SD\n")
    write(tmp_path, "sys/class/block/dm-1/slaves/mmcblk0p2/dev", "179:2")
    write(tmp_path, "sys/class/block/loop0/loop/backing_file", "/var/swap.img\n")
    (swap,) = read_memory_use(Tree(tmp_path)).swaps
    assert swap.device == name
    assert swap.storage is not None and swap.storage.kind == kind


def test_gpu_memory_of_a_jetson_is_in_nvmaps_list(tmp_path: Path) -> None:
    text = "CLIENT  PROCESS  PID  SIZE\nuser  llama-server  812  3145728K\nuser  Xorg  90  2M\ntotal  3147776K\n"
    write(tmp_path, "sys/kernel/debug/nvmap/iovmm/maps", text)
    found = read_memory_use(Tree(tmp_path)).on_gpu
    assert [(process.name, process.pid, process.bytes) for process in found] == [
        ("llama-server", 812, 3 << 30),
        ("Xorg", 90, 2 << 20),
    ]


def test_memory_use_of_this_machine() -> None:
    use = read_memory_use(LIVE)
    assert use.biggest[0].bytes >= use.biggest[-1].bytes > 0
    assert any(process.pid == os.getpid() for process in processes(LIVE))


def test_fc01_fc05_toolkits_are_found_where_path_does_not_look(tmp_path: Path) -> None:
    write(tmp_path, "usr/local/cuda-11.4/bin/nvcc", "")
    write(tmp_path, "usr/local/cuda-12.6/bin/nvcc", "")
    write(tmp_path, "usr/local/cuda-12.6/version.json", '{"cuda": {"version": "12.6.20240814"}}')
    write(tmp_path, "usr/local/cuda-13.0/version.json", "not json")
    (tmp_path / "usr/local/cuda").symlink_to("/usr/local/cuda-12.6")
    (tmp_path / "usr/local/cuda-13").symlink_to("cuda-13.0")
    found = read_cuda(Tree(tmp_path), {"PATH": "/usr/bin"}, tmp_path / "cache")
    assert [(kit.version, kit.nvcc) for kit in found.toolkits] == [("11.4", True), ("12.6", True), ("13.0", False)]


def test_toolkit_without_a_version_in_its_name(tmp_path: Path) -> None:
    write(tmp_path, "usr/local/cuda/bin/nvcc", "")
    write(tmp_path, "usr/local/cuda/version.json", '{"cuda": {"version": "11.4.19"}}')
    found = read_cuda(Tree(tmp_path), {}, tmp_path)
    assert [(kit.path, kit.version) for kit in found.toolkits] == [("/usr/local/cuda", "11.4")]


def test_kernel_cache_is_weighed(tmp_path: Path) -> None:
    write(tmp_path, "cuda/ab/kernel", b"x" * 1000)
    found = read_cuda(LIVE, {}, tmp_path / "cuda")
    assert (found.jit_cache_bytes, found.jit_cache_writable) == (1000, True)


# ---------------------------------------------------------------- model folder


def test_fc79_first_folder_that_blocks(tmp_path: Path) -> None:
    inner = tmp_path / "mnt/ssd/models"
    inner.mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if reaches(ANN, folder, 1):
            continue
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "mnt").chmod(0o755)
    (tmp_path / "mnt/ssd").chmod(0o700)
    assert first_blocked(ANN, inner) == tmp_path / "mnt/ssd"
    (tmp_path / "mnt/ssd").chmod(0o755)
    inner.chmod(0o755)
    assert first_blocked(ANN, inner) is None
    assert first_blocked(ANN, inner / "not/there") is None


def test_fc79_mount_point_of_fstab_that_is_not_mounted(tmp_path: Path) -> None:
    root = copy("orin-nano-8", tmp_path)
    write(root, "etc/fstab", "# disks\n/dev/sda1 /mnt/ssd ext4 defaults 0 2\n/dev/nvme0n1p1 / ext4 defaults 0 1\n")

    def missing(folder: str) -> bool:
        return read_model_folder(Tree(root), Path(folder), None, STRANGER, False).empty_mount_point

    assert missing("/mnt/ssd/models")
    assert not missing("/var/lib/edgellm/models")
    line = "2 1 8:1 / /mnt/ssd rw - ext4 /dev/sda1 rw\n"
    write(root, "proc/self/mountinfo", (root / "proc/self/mountinfo").read_text() + line)
    assert not missing("/mnt/ssd/models")


def test_model_folder_without_models_is_not_measured(tmp_path: Path) -> None:
    found = read_model_folder(LIVE, tmp_path, None, STRANGER, True)
    assert (found.exists, found.measured) == (True, None)
    assert "no model file" in (found.measure_problem or "")
    assert found.free_bytes is not None


def test_model_folder_is_measured_with_its_biggest_file(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"x" * 10)
    (tmp_path / "big.gguf").write_bytes(os.urandom(8 << 20))
    found = read_model_folder(LIVE, tmp_path, None, STRANGER, True)
    assert (found.measured is None) == (found.measure_problem is not None)


def test_the_model_that_will_be_loaded_is_measured_even_behind_a_link(tmp_path: Path) -> None:
    blob, link = tmp_path / "blobs/0123", tmp_path / "models/model.gguf"
    blob.parent.mkdir()
    link.parent.mkdir()
    blob.write_bytes(os.urandom(8 << 20))
    link.symlink_to(blob)
    found = read_model_folder(LIVE, link.parent, link, STRANGER, True)
    assert (found.measured is None) == (found.measure_problem is not None)


# ---------------------------------------------------------------- environment, our files


def test_environment_of_this_process(tmp_path: Path) -> None:
    about = read_environment(LIVE, places(tmp_path), {"LANG": "de_DE.UTF-8", "PATH": "/bin"})
    assert about.locale == "de_DE.UTF-8"
    assert about.cache_writable
    assert about.newest_file_s is not None
    assert about.time_synchronised in (True, False, None)
    assert about.prefix == sys.prefix


def test_wslconfig_is_read_through_the_windows_drive(tmp_path: Path) -> None:
    root = copy("wsl2", tmp_path)
    assert read_wsl(Tree(root)).settings is None
    write(root, "mnt/c/Users/Ann/.wslconfig", "[wsl2]\n# half\nmemory = 24GB\nvmIdleTimeout=-1\n")
    found = read_wsl(Tree(root))
    assert found.settings == {"memory": "24GB", "vmidletimeout": "-1"}
    assert (found.dxg, found.library, found.systemd) == (True, True, False)


def test_own_files_that_are_wrong_are_found(tmp_path: Path) -> None:
    ours = places(tmp_path)
    assert {file.kind for file in find_leftovers(ours, False)} == {"folder"}
    for folder in (ours.data, ours.models, ours.state, ours.cache, ours.run, ours.config, ours.instance_run):
        folder.mkdir(parents=True, exist_ok=True)
    ours.run.chmod(0o700)
    keys = ours.config / "keys.toml"
    keys.write_text("")
    keys.chmod(0o600)
    assert find_leftovers(ours, False) == ()
    keys.chmod(0o644)
    ours.run.chmod(0o777)
    assert [(file.kind, file.path) for file in find_leftovers(ours, False)] == [("mode", keys), ("mode", ours.run)]


def test_folders_of_an_installed_service_are_systemds(tmp_path: Path) -> None:
    assert find_leftovers(places(tmp_path), False, service=True) == ()


def test_keys_may_be_read_by_the_services_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = write(tmp_path, "config/keys.toml", "")
    keys.chmod(0o640)
    found = find_leftovers(places(tmp_path), False, service=True)
    assert [(file.path, file.mode) for file in found] == [(keys, 0o600)]
    group = grp.getgrgid(keys.stat().st_gid).gr_name
    monkeypatch.setattr(own_files, "SERVICE_GROUP", group)
    assert find_leftovers(places(tmp_path), False, service=True) == ()
    keys.chmod(0o666)
    found = find_leftovers(places(tmp_path), False, service=True)
    assert [file.mode for file in found] == [0o640]


def test_dead_sockets_are_found_and_living_ones_are_not(short_dir: Path) -> None:
    ours = places(short_dir)
    for folder in (ours.data, ours.models, ours.state, ours.cache, ours.config, ours.instance_run):
        folder.mkdir(parents=True, exist_ok=True)
    ours.run.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as dead:
        living.bind(str(ours.instance_run / "chat.sock"))
        living.listen()
        dead.bind(str(ours.instance_run / "control.sock"))
        (ours.instance_run / "plain.sock").write_text("not a socket")
        found = find_leftovers(ours, False)
        assert [(file.kind, file.path.name) for file in found] == [("socket", "control.sock")]
        assert find_leftovers(ours, True) == ()  # while our lock is held nothing is stale


def as_stranger(work: Callable[[], object]) -> None:
    """Run in a child that is an ordinary user; raises AssertionError where it failed."""
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_folders_of_a_service_that_this_user_may_not_enter(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the service an ordinary user meets closed folders: they are facts, and no error."""
    monkeypatch.setattr(
        resources, "data_dir", lambda name: short_dir / name
    )  # the checkout may be root's own, in /root
    ours = places(short_dir / "closed")
    for folder in (ours.models, ours.state, ours.cache / "cuda", ours.config, ours.instance_run):
        folder.mkdir(parents=True, exist_ok=True)
    short_dir.chmod(0o755)
    (short_dir / "closed").chmod(0)

    def look() -> None:
        assert find_leftovers(ours, False, service=True) == ()
        assert not creatable(ours.cache)
        assert read_cuda(LIVE, {}, ours.cache / "cuda").jit_cache_writable is False
        assert read_model_folder(LIVE, ours.models, None, STRANGER, True).blocked_by == short_dir / "closed"
        assert not read_environment(LIVE, ours, {}).cache_writable

    as_stranger(look)
    (short_dir / "closed").chmod(0o700)


def test_everything_of_this_machine_is_read(tmp_path: Path) -> None:
    facts = read_facts(Path("/"), places(tmp_path), dict(os.environ), {"listen": ["127.0.0.1:0"]}, measure=False)
    assert facts.live
    assert facts.ports[0].address == "127.0.0.1:0"
    assert facts.serving.config_problem is None


def test_an_installed_service_is_what_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examined_folders({}, tmp_path).data == tmp_path / "data"
    monkeypatch.setattr(doctor, "unit_files", lambda tree: (DropIn("/etc/systemd/system/edgellm.service", "x"),))
    assert examined_folders({"HOME": "/home/ann"}, None) == system_folders()
    assert examined_folders({"EDGELLM_STATE_DIR": str(tmp_path)}, None).data == tmp_path / "data"


def test_model_that_is_configured_and_not_here_is_a_fact(tmp_path: Path) -> None:
    flags = {"model": ["chat=/nonexistent/model.gguf"]}
    facts = read_facts(Path("/"), places(tmp_path), {}, flags, measure=False)
    (model,) = facts.serving.models
    assert (model.id, model.ref) == ("chat", "/nonexistent/model.gguf")
    assert "/nonexistent/model.gguf" in (model.problem or "")
    assert model.hint


def test_without_a_configured_model_the_planners_choice_is_named(tmp_path: Path) -> None:
    """It named the biggest of the store, where `plan` and `up` take another one."""
    folders = places(tmp_path)
    Gguf("llama").model().save(folders.models / "Small-Q5_K_M.gguf")
    biggest = (
        Gguf("llama").model().tensor("extra", 1 << 13, 1 << 13, 1 << 10).save_sparse(folders.models / "Big-F32.gguf")
    )
    flags = {"profile": "cpu", "set": ["reserve=0"]}
    facts = read_facts(Path("/"), folders, {}, flags, measure=False)
    plan = prepare(load(folders, flags, {}), folders, allow_missing=True).plan
    (chosen,) = plan.models.values()
    assert facts.serving.model_file == biggest, "for the storage rate"
    assert facts.serving.advised == f"{chosen.model.name}:{chosen.model.quant}" != "Big:F32"
    (check,) = [check for check in examine(facts) if check.name == "config.model"]
    assert facts.serving.advised in f"{check.says} {check.command}" and "Big" not in check.says


def test_what_a_running_edgellm_holds_is_free_for_its_own_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[bool] = []

    def planned(config: object, folders: object, view: HostView, **_: object) -> None:
        views.append(view.at_boot)
        raise UsageError("nothing to plan")

    monkeypatch.setattr(doctor_config, "prepare", planned)
    folders = places(tmp_path)
    read_facts(Path("/"), folders, {}, {"profile": "cpu"}, measure=False)
    folders.lock.parent.mkdir(parents=True, exist_ok=True)
    with folders.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        read_facts(Path("/"), folders, {}, {"profile": "cpu"}, measure=False)
    assert views == [False, True]


def test_a_store_that_cannot_be_planned_is_a_fact(tmp_path: Path) -> None:
    folders = places(tmp_path)
    Gguf("llama").model().save(folders.models / "Small-Q5_K_M.gguf")
    flags = {"profile": "cpu", "set": ["reserve=100TiB"]}
    facts = read_facts(Path("/"), folders, {}, flags, measure=False)
    (check,) = [check for check in examine(facts) if check.name == "config.model"]
    assert facts.serving.plan_problem and facts.serving.plan_problem in check.says
    assert (check.verdict, facts.serving.advised) == (CheckResult.WARN, None)


def test_wrong_configuration_is_a_fact(tmp_path: Path) -> None:
    facts = read_facts(Path("/"), places(tmp_path), {}, {"profile": "nosuch"}, measure=False)
    assert "nosuch" in (facts.serving.config_problem or "")


def remotes(tmp_path: Path, engine: Engine | None = RPC_ENGINE, **device: Any) -> list[Check]:
    """The checks of one [[device]], whose server is asked."""
    facts = replace(patient("orin-nano-8", tmp_path), serving=ServingFacts(engine=engine))
    serving = read_remotes(facts.serving, [DeviceConfig(**device)])
    return [check for check in examine(replace(facts, serving=serving)) if check.name == "config.device"]


def test_an_rpc_server_that_answers_lends_its_memory(tmp_path: Path) -> None:
    with serving() as port:
        (check,) = remotes(tmp_path, rpc=f"127.0.0.1:{port}")
    assert (check.verdict, check.next_step) == (CheckResult.OK, None)
    assert "lends 7.0 GiB" in check.says


def test_an_rpc_server_that_does_not_answer_is_named_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (waited,) = remotes(tmp_path, rpc=address)
    assert waited.verdict is CheckResult.BAD and address in waited.says
    assert "edgellm rpc serve" in (waited.next_step or "")
    (optional,) = remotes(tmp_path, rpc=address, absent="without")
    assert optional.verdict is CheckResult.WARN and "smaller plan" in optional.says


def test_an_rpc_server_of_another_version_and_a_foreign_program_are_told_apart(tmp_path: Path) -> None:
    with serving(version=PROTOCOL + 1) as port:
        (other,) = remotes(tmp_path, rpc=f"127.0.0.1:{port}")
    assert other.verdict is CheckResult.BAD and "speaks protocol" in other.says
    with serving(garbage=b"SSH-2.0-OpenSSH_9\r\n") as port:
        (foreign,) = remotes(tmp_path, rpc=f"127.0.0.1:{port}")
    assert foreign.verdict is CheckResult.BAD and "does not answer as an rpc-server" in foreign.says


def test_an_rpc_server_that_serves_an_engine_here_is_not_asked(tmp_path: Path) -> None:
    """A connection that waits behind the engine's own tells the other board that the engine is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        with listener.accept()[0]:
            (check,) = remotes(tmp_path, rpc=f"127.0.0.1:{listener.getsockname()[1]}")
        assert check.verdict is CheckResult.OK and "serves an engine of this board" in check.says
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_way_that_is_not_the_named_interface_is_a_finding(tmp_path: Path) -> None:
    (check,) = remotes(tmp_path, rpc="10.255.255.1:50052", interface="nosuch0")
    assert check.verdict is CheckResult.BAD and "nosuch0" in check.says


def test_an_engine_without_rpc_is_a_finding_however_the_servers_answer(tmp_path: Path) -> None:
    (check,) = remotes(tmp_path, replace(RPC_ENGINE, rpc=False), rpc="127.0.0.1:1")
    assert check.verdict is CheckResult.BAD and "built without it" in check.says
    assert check.command == "edgellm build --rpc"


def test_an_address_that_rpc_may_not_use_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    folders = places(tmp_path)
    folders.config.mkdir(parents=True)
    (folders.config / "edgellm.toml").write_text('schema = 1\n[[device]]\nrpc = "8.8.8.8:50052"\n')
    checks = {each.name: each for each in examine(read_facts(Path("/"), folders, {}, {}, measure=False))}
    assert checks["config.valid"].verdict is CheckResult.BAD
    assert "no authentication" in checks["config.valid"].says
    assert "config.device" not in checks


def test_foreign_process_is_named_by_a_doctor_that_may_see_it() -> None:
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True);"
        "import sys; sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        number = int(other.stdout.readline())
        (port,) = read_ports((f"127.0.0.1:{number}",), Path("/nonexistent"), False)
        assert (port.pid, port.ours) == (other.pid, False)
        assert other.stdin is not None
        other.stdin.close()
