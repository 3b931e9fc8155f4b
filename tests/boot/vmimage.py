"""Disk, kernel and initrd of a virtual machine with edgellm in /opt/edgellm, not yet installed as a service."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from edge.models.pull import pull
from tests.boot import image
from tests.boot.board import Disk
from tests.conftest import CACHE
from tests.kept import kept
from tests.serving import DEMO

SUITE = image.SUITES["bookworm"]
HERE = Path(__file__).parent
TOOLS = {"mmdebstrap": "mmdebstrap", "depmod": "kmod", "cpio": "cpio", "mke2fs": "e2fsprogs"}


@dataclass(frozen=True)
class Machine:
    name: str
    debian: str
    console: str
    package: str  # of its qemu
    options: tuple[str, ...]

    @property
    def qemu(self) -> str:
        return f"qemu-system-{self.name}"


MACHINES = {
    "aarch64": Machine("aarch64", "arm64", "ttyAMA0", "qemu-system-arm", ("-machine", "virt", "-cpu", "cortex-a76")),
    "x86_64": Machine("x86_64", "amd64", "ttyS0", "qemu-system-x86", ("-machine", "q35", "-cpu", "max")),
}

GUEST = """[Unit]
DefaultDependencies=no
After=systemd-remount-fs.service
[Service]
ExecStart=/opt/edgellm/bin/python /opt/vm/guest.py
[Install]
WantedBy=sysinit.target
"""
# systemd never lets the clock start before its own release: a board without a battery is made here.
CLOCK = """[Unit]
DefaultDependencies=no
ConditionPathExists=/opt/vm/measured
Before=sysinit.target edgellm.service
[Service]
Type=oneshot
ExecStart=/bin/date -s @86400
[Install]
WantedBy=sysinit.target
"""
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs d /dev
/bin/busybox mount -t proc p /proc
for module in {modules}; do /bin/busybox insmod /modules/$module; done
while [ ! -b /dev/vda ]; do /bin/busybox usleep 20000; done
/bin/busybox mount -t ext4 -o rw /dev/vda /new
/bin/busybox umount /proc
/bin/busybox mount --move /dev /new/dev
exec /bin/busybox switch_root /new /sbin/init
"""


def missing(machine: Machine) -> list[str]:
    """Debian packages."""
    return [package for tool, package in (TOOLS | {machine.qemu: machine.package}).items() if not shutil.which(tool)]


def rootfs(machine: Machine) -> Path:
    """The same packages as a board's, of another architecture and with a kernel.

    Nothing of it runs here: files are the other architecture's, and what their scripts would have set up in /etc and
    /var is taken from the system that this machine could configure.
    """
    base = image.rootfs(SUITE)
    status = (base / "var/lib/dpkg/status").read_text()
    packages = re.findall(r"^Package: (\S+)$", status, re.MULTILINE)
    packages += [f"linux-image-cloud-{machine.debian}", "busybox-static"]
    root = CACHE / "boot" / f"vm-{machine.name}-{sha256(' '.join(packages).encode()).hexdigest()[:8]}"

    def make(_: Path) -> None:
        merged = 'for d in bin sbin lib lib64; do mkdir -p "$1/usr/$d"; ln -s usr/$d "$1/$d"; done'
        command = ["mmdebstrap", "--quiet", "--variant=extract", f"--arch={machine.debian}", f"--setup-hook={merged}"]
        command += [f"--include={','.join(packages)}", SUITE.name, str(root)]
        subprocess.run([*command, f"deb {image.mirror()} {SUITE.name} main"], check=True)
        for part in ("etc", "var"):
            shutil.rmtree(root / part)
            subprocess.run(["cp", "-a", str(base / part), str(root)], check=True)
        (root / "etc/ld.so.cache").unlink()  # of the wrong architecture; the default folders do
        subprocess.run(["depmod", "-b", str(root), _kernel(root)], check=True)

    return kept(root, make)


def _kernel(root: Path) -> str:
    return next((root / "lib/modules").iterdir()).name


def install(machine: Machine, disk: Disk) -> None:
    """What `pip install 'edgellm[embedded]'` in a new environment would give, and the model beside it."""
    assert SUITE.python is not None
    venv = disk.root / "opt/edgellm"
    site = venv / f"lib/python{SUITE.python}/site-packages"
    site.mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin/python").symlink_to("/usr/bin/python3")
    disk.write("/opt/edgellm/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n")
    wheels = image.wheels(SUITE.python, image.wheel(), machine=machine.name)
    where = [f"--platform={platform}_{machine.name}" for platform in image.PLATFORMS]
    only = ["--only-binary=:all:", "--implementation=cp", f"--python-version={SUITE.python}", *where, "--platform=any"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", f"--find-links={wheels}", *only]
    subprocess.run([*pip, f"--target={site}", "edgellm[embedded]"], check=True)
    shutil.rmtree(wheels)
    models = disk.root / "opt/offline/models"
    models.mkdir(parents=True)
    shutil.copy(pull(DEMO, CACHE / "models").path, models)


def build(machine: Machine, disk: Disk) -> None:
    """`disk.work` gets vmlinuz, initrd and disk.ext4."""
    install(machine, disk)
    for name in ("guest.py", "prober.py"):
        disk.write(f"/opt/vm/{name}", (HERE / name).read_text())
    for name, text in (("guest", GUEST), ("clock", CLOCK)):
        disk.write(f"/etc/systemd/system/{name}.service", text)
        subprocess.run(["systemctl", f"--root={disk.root}", "-q", "enable", f"{name}.service"], check=True)
    _initrd(disk)
    shutil.copy(next((disk.root / "boot").glob("vmlinuz-*")), disk.work / "vmlinuz")
    with (disk.work / "disk.ext4").open("wb") as empty:
        empty.truncate(2 * 2**30)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(disk.root), str(disk.work / "disk.ext4")], check=True)


def _initrd(disk: Disk) -> None:
    tree = disk.work / "initrd.d"
    for name in ("bin", "dev", "proc", "new", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy(disk.root / "bin/busybox", tree / "bin")
    modules: dict[str, None] = {}
    for name in ("virtio_pci", "virtio_blk"):
        show = ["modprobe", "-d", str(disk.root), "-S", _kernel(disk.root), "--show-depends", name]
        for line in subprocess.run(show, check=True, capture_output=True, text=True).stdout.splitlines():
            kind, _, path = line.strip().partition(" ")
            if kind == "insmod":
                modules[Path(path).name] = None
                shutil.copy(path, tree / "modules")
    (tree / "init").write_text(INIT.format(modules=" ".join(modules)))
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with (disk.work / "initrd").open("wb") as out:
        pack = ["cpio", "-o", "-H", "newc", "--quiet"]
        subprocess.run(pack, cwd=tree, input=names.encode(), stdout=out, check=True)
