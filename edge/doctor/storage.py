"""Checks of the model folder (disk, read rate, access, space), and how their facts are read."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from msgspec.structs import replace

from edge.board import readrate
from edge.board.storage import classify, mounts
from edge.doctor.accounts import Account, first_blocked
from edge.doctor.check import Finding, bad, ok, unknown, warn
from edge.doctor.facts import DoctorFacts, ModelFolder
from edge.linux.files import visible
from edge.linux.tree import Tree
from edge.units import GIB, format_bytes, format_seconds

_GOOD = {"nvme": "NVMe", "ssd": "SSD"}
_POOR = {
    "hdd": ("a spinning disk", "an NVMe disk reads ten times as fast"),
    "usb": ("a USB disk", "check that it runs at USB 3 speed; NVMe is better"),
    "emmc": ("eMMC", "NVMe reads five to ten times as fast"),
    "sd": ("an SD card", "put models on NVMe: a card reads below 100 MB/s and wears out"),
    "network": ("a network file system", "keep models on a local disk, or the start waits for the network"),
    "windows": ("a Windows drive", "keep models inside the Linux file system: /mnt/c is read through Windows"),
    "container": ("the container's own layer", "mount a folder of the host: models are lost with the container"),
}
_COLD_S = 30.0  # longer than clients of an API usually wait
_SPACE_BYTES = 10 * GIB  # a model of 8B at Q5 and a build fit below it


def kind(facts: DoctorFacts) -> Finding | None:
    """Judge the kind of disk under the model folder."""
    storage, path = facts.models.storage, facts.models.path
    if facts.models.empty_mount_point:
        step = "mount it first: models written now would lie on the disk below it"
        return bad(f"{path} is on a mount point of /etc/fstab that is not mounted", step, "sudo mount -a")
    # Without /proc, in some sandboxes.
    if storage is None:
        return unknown("the mount table cannot be read")
    where = f"{path} is on "
    if storage.kind in _GOOD:
        return ok(f"{where}{_GOOD[storage.kind]} ({storage.disk}, {storage.filesystem})")
    if storage.kind == "windows" and facts.wsl is not None:
        return None  # wsl.models reports it
    if storage.kind in _POOR:
        what, step = _POOR[storage.kind]
        return warn(f"{where}{what} ({storage.disk or storage.mount}, {storage.filesystem})", step)
    if storage.kind == "memory":
        return warn(f"{where}{storage.filesystem}: models there take memory and are lost at reboot", "use a disk")
    return ok(f"{where}{storage.disk or storage.filesystem} ({storage.kind})")


def rate(facts: DoctorFacts) -> Finding | None:
    """Judge the read rate past the page cache, the lower bound of every cold start."""
    models = facts.models
    if not facts.live:
        return None
    if models.measured is None:
        says = f"not measured: {models.measure_problem}" if models.measure_problem else "not measured (--quick)"
        return unknown(says)
    speed = models.measured.bytes_s
    says = f"{speed / 1e6:.0f} MB/s past the cache, best with {models.measured.streams} of 1, 2, 4, 8 streams"
    size = facts.serving.model_bytes
    if not size:
        return ok(says)
    says += f": the biggest model ({format_bytes(size)}) needs at least {format_seconds(size / speed)} from cold"
    if size / speed > _COLD_S:
        return warn(says, "only a faster disk helps")
    return ok(says)


def access(facts: DoctorFacts) -> Finding | None:
    """Find a closed folder above an open model folder: the engine reports `permission denied` (FC-79)."""
    models, user = facts.models, facts.devices.user
    if models.blocked_by is not None:
        step = f"let {user} pass through {models.blocked_by}, or choose another model folder"
        return bad(
            f"{user} may not enter {models.blocked_by}, on the way to {models.path}",
            step,
            f"sudo chmod o+x {shlex.quote(str(models.blocked_by))}",
        )
    if not facts.live:
        return None
    if not models.exists:
        return ok(f"{models.path} does not exist yet; the first model creates it")
    if models.storage is not None and models.storage.read_only:
        return warn(f"{models.path} is mounted read-only", "serving works, fetching a model does not")
    return ok(f"{user} may enter it")


def space(facts: DoctorFacts) -> Finding | None:
    """Warn of little free space: a build or a download that fills the disk fails near its end (FC-14)."""
    free = facts.models.free_bytes
    if free is None:
        return None
    if free < _SPACE_BYTES:
        return warn(f"{format_bytes(free)} free for models", "a model of 8B needs about 6 GB, a build 3 GB")
    return ok(f"{format_bytes(free)} free for models")


CHECKS = {"storage.kind": kind, "storage.rate": rate, "storage.access": access, "storage.space": space}


# Read the model folder: its disk, access and read rate.


def read_model_folder(tree: Tree, folder: Path, model: Path | None, account: Account, measure: bool) -> ModelFolder:
    """Read the folder; measure its rate with `model`, else with the biggest file of the folder."""
    here = tree.path(folder)
    found = ModelFolder(
        path=folder,
        exists=(visible(here) and here.is_dir()) if tree.live else tree.exists(folder),
        storage=classify(tree, folder.resolve() if tree.live else folder),
        free_bytes=_free_bytes(here) if tree.live else None,
        blocked_by=first_blocked(account.user, here) if tree.live else None,
        empty_mount_point=_not_mounted(tree, folder),
    )
    return _measured(found, model or readrate.biggest_file((here,))) if measure and tree.live else found


def _measured(folder: ModelFolder, file: Path | None) -> ModelFolder:
    if file is None:
        return replace(folder, measure_problem="there is no model file to measure with yet")
    try:
        rate = readrate.measure(file)
    except OSError as error:
        return replace(folder, measure_problem=error.strerror or str(error))
    problem = None if rate else "this file system has no direct reads, or the file is too small"
    return replace(folder, measured=rate, measure_problem=problem)


def _free_bytes(folder: Path) -> int | None:
    near = next((step for step in (folder, *folder.parents) if visible(step)), None)
    try:
        about = os.statvfs(near) if near else None
    except OSError:
        return None
    # f_bavail, not f_bfree: ext4 keeps 5 % for root, which the service cannot use.
    return about.f_bavail * about.f_frsize if about else None


def _not_mounted(tree: Tree, folder: Path) -> bool:
    """Find a mount point of fstab on the path that is not mounted: models would land on the disk below."""
    points = {
        line.split()[1] for line in tree.lines("/etc/fstab") if not line.startswith("#") and len(line.split()) > 3
    }
    wanted = {point for point in points if point != "/" and Path(point) in (folder, *folder.parents)}
    return bool(wanted - {mount.point for mount in mounts(tree)})
