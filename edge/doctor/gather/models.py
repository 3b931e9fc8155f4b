"""Read the model folder: its disk, access and read rate."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from edge.board import readrate
from edge.board.storage import classify, mounts
from edge.board.tree import Tree
from edge.doctor.facts import ModelFolder
from edge.doctor.gather.accounts import Account, first_blocked


def read_model_folder(tree: Tree, folder: Path, model: Path | None, account: Account, measure: bool) -> ModelFolder:
    """Read the folder; measure its rate with `model`, else with the biggest file of the folder."""
    here = tree.path(folder)
    found = ModelFolder(
        path=folder,
        exists=here.is_dir() if tree.live else tree.exists(folder),
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
    near = next((step for step in (folder, *folder.parents) if step.exists()), None)
    try:
        about = os.statvfs(near) if near else None
    except OSError:
        return None
    return about.f_bavail * about.f_frsize if about else None


def _not_mounted(tree: Tree, folder: Path) -> bool:
    """Find a mount point of fstab on the path that is not mounted: models would land on the disk below."""
    points = {
        line.split()[1] for line in tree.lines("/etc/fstab") if not line.startswith("#") and len(line.split()) > 3
    }
    wanted = {point for point in points if point != "/" and Path(point) in (folder, *folder.parents)}
    return bool(wanted - {mount.point for mount in mounts(tree)})
