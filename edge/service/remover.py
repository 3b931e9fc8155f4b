"""`edgellm service uninstall`: remove the units; with `--purge` also models, engines and configuration."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from edge.linux import systemctl
from edge.paths import ROOT_CACHE, system_folders
from edge.service import program
from edge.service import units as layout
from edge.service.access import user_exists
from edge.service.contents import InstallStep
from edge.service.program import COMMAND
from edge.service.request import ETC
from edge.service.units import PREFIX, USER


def steps(*, purge: bool, root: Path = Path("/")) -> list[InstallStep]:
    """Return the steps in order; what does not exist counts as done."""
    return [*_stop(root), *_files(root), *(_purge(root) if purge else [])]


def kept(root: Path = Path("/")) -> list[str]:
    """Return the folders that a removal without --purge leaves."""
    system = system_folders()
    places = [root / str(path).lstrip("/") for path in (system.data, system.cache, Path("/") / ETC, PREFIX)]
    return [str(path) for path in places if path.exists()]


def _stop(root: Path) -> Iterator[InstallStep]:
    units = [unit for unit in layout.UNITS if (root / layout.UNIT_DIR / unit).exists()]
    enabled = [unit for unit in units if systemctl.enabled(unit)]
    running = [unit for unit in units if systemctl.active(unit)] if systemctl.booted() else []
    # Sockets first: otherwise a client starts the service again.
    running.sort(key=lambda unit: not unit.endswith(".socket"))
    stop = partial(systemctl.run, ["systemctl", "stop", *running])
    yield InstallStep(f"stop {', '.join(running)}" if running else "stop it", stop, done=not running)
    disable = partial(systemctl.run, ["systemctl", "disable", *enabled])
    yield InstallStep(f"disable {', '.join(enabled)}" if enabled else "disable it", disable, done=not enabled)


def _files(root: Path) -> Iterator[InstallStep]:
    for path in layout.all_paths():
        full = root / path
        if full.exists():
            yield InstallStep(f"remove {full}", partial(_unlink, full))
    if systemctl.booted():
        yield InstallStep("reload systemd", partial(systemctl.run, ["systemctl", "daemon-reload"]))


def _unlink(path: Path) -> None:
    path.unlink()
    # The folder of drop-ins goes with its last file; one of the operator's keeps it.
    if path.parent.name.endswith(".d") and path.parent.parent.name == "system" and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _purge(root: Path) -> Iterator[InstallStep]:
    system = system_folders()
    for folder in (system.data, system.cache, ROOT_CACHE, Path("/") / ETC, Path("/var/lib/edgellm-power")):
        full = root / str(folder).lstrip("/")
        if full.exists():
            yield InstallStep(f"delete {full}", partial(shutil.rmtree, full))
    if program.stamp() is not None:
        yield InstallStep(f"delete {PREFIX}", partial(shutil.rmtree, PREFIX))
        if COMMAND.is_symlink() and COMMAND.readlink() == PREFIX / "bin/edgellm":
            yield InstallStep(f"remove {COMMAND}", COMMAND.unlink)
    for user in (USER, "edgellm-jtop"):
        if user_exists(user):
            yield InstallStep(f"remove user {user}", partial(systemctl.run, ["userdel", user]))
