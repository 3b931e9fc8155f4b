"""`edgellm service install` and `uninstall` as lists of repeatable steps.

Install: program → users and folders → engine → models → configuration → units → start.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from edge.builder.install import import_engine
from edge.errors import AddressInUseError, UnavailableError, UsageError
from edge.linux import systemctl
from edge.linux.sockets import bind
from edge.paths import ROOT_CACHE, system_folders
from edge.service import program
from edge.service import units as layout
from edge.service.access import has_text, user_exists, write_file
from edge.service.contents import Contents, InstallStep, apply_all
from edge.service.program import COMMAND
from edge.service.request import ETC, RECORD, InstallRequest, unit_settings
from edge.service.takeover import OfflineBundle
from edge.service.units import PREFIX, USER, read_record, record_text, write_record


class Installer:
    """Plans an installation: `steps()` changes nothing and raises what makes it impossible."""

    def __init__(self, request: InstallRequest) -> None:
        self.request = request
        self.system = system_folders()
        self.bundle = OfflineBundle(request.offline) if request.offline else None
        self.settings = unit_settings(request, self.bundle.wheels if self.bundle else None)

    def steps(self) -> list[InstallStep]:
        contents = Contents(self.request, self.settings, self.bundle)
        if self.settings.rpc_only:
            self._refuse_a_second_kind()
            steps = [*self._program(), *self._users(), contents.lending_engine(), *self._units()]
            return [*steps, *self._start(steps)]
        steps = [*self._program(), *self._users()]
        if self.bundle is not None and self.bundle.engine is not None:
            # The models depend on the engine, so the engine has to be installed before they are planned.
            archive = partial(import_engine, self.system.engines, self.bundle.engine)
            steps.append(InstallStep(f"import the engine of {self.bundle.engine}, verified", archive))
            what = "install the models and the configuration of the plan"
            steps.append(InstallStep(what, lambda: apply_all(contents.steps())))
        else:
            steps += contents.steps()
        steps += self._units()
        return [*steps, *self._start(steps)]

    def _refuse_a_second_kind(self) -> None:
        """Refuse to take the units of a board that serves a model for one that only lends memory."""
        before = read_record(self.system.data / RECORD)
        if before is not None and not before.rpc_only:
            hint = "leave --rpc-only out to do both, or `edgellm service uninstall` first"
            raise UsageError("this board serves a model as a service", hint)

    def _program(self) -> list[InstallStep]:
        source = program.needed(wheels=self.bundle.wheels if self.bundle else None)
        if source is None:
            return [InstallStep(f"run {self.settings.python}", done=True)]
        origin = f"the wheels of {source.wheels}" if source.wheels else "the running edgellm"
        make = InstallStep(f"create {PREFIX} from {origin}", partial(program.make, source), note=source.why)
        target = PREFIX / "bin/edgellm"
        linked = COMMAND.is_symlink() and COMMAND.readlink() == target
        if os.path.lexists(COMMAND) and not linked:
            return [make]  # the operator's own file stays
        return [make, InstallStep(f"link {COMMAND} to {target}", partial(COMMAND.symlink_to, target), done=linked)]

    def _users(self) -> list[InstallStep]:
        conf = [file for file in layout.files(self.settings) if file.path in layout.PREPARING]
        users = [USER, *(["edgellm-jtop"] if self.settings.jtop else [])]
        accounts = [file.path.name for file in conf if file.path != layout.TMPFILES]
        make_users = partial(systemctl.run, ["systemd-sysusers", *accounts])
        make_folders = partial(systemctl.run, ["systemd-tmpfiles", "--create", layout.TMPFILES.name])
        folders = (self.system.data, self.system.models, self.system.engines)
        return [
            *map(self._write, conf),
            InstallStep(f"create {' and '.join(users)}", make_users, done=all(map(user_exists, users))),
            InstallStep(f"create {self.system.data}", make_folders, done=all(folder.is_dir() for folder in folders)),
        ]

    def _units(self) -> list[InstallStep]:
        files = [file for file in layout.files(self.settings) if file.path not in layout.PREPARING]
        steps = [self._write(file) for file in files]
        kept = {file.path for file in layout.files(self.settings)}
        stale = [self._at(path) for path in layout.all_paths() if path not in kept]
        gone = [path.name for path in stale if path.exists() and path.parent == self._at(layout.UNIT_DIR)]
        if gone:  # unlinked only, it would run until the next boot
            words = ["systemctl", "disable", *(["--now"] if systemctl.booted() else []), *gone]
            steps.append(InstallStep(f"stop {', '.join(gone)}", partial(systemctl.run, words)))
        steps += [InstallStep(f"remove {path}", path.unlink) for path in stale if path.exists()]
        record = self.system.data / RECORD
        done = has_text(record, record_text(self.settings))
        return [*steps, InstallStep(f"record it in {record}", lambda: write_record(record, self.settings), done=done)]

    def _start(self, before: list[InstallStep]) -> list[InstallStep]:
        if self.settings.rpc_only:
            return self._start_lending(before)
        units = ["edgellm.socket", "edgellm.service"]
        units += ["edgellm-jtop.service"] if self.settings.jtop else []
        units += ["edgellm-prefetch.service"] if self.settings.prefetch else []
        units += ["edgellm-power.service"] if self._at(layout.POWER).exists() or self.settings.power_mode else []
        units += [layout.RPC_UNIT] if self.settings.rpc_listen else []
        enabled = all(systemctl.enabled(unit) for unit in units)
        enable = InstallStep(
            f"enable {', '.join(units)}", partial(systemctl.run, ["systemctl", "enable", *units]), done=enabled
        )
        # In a chroot or an image build: enabled now, started at the first boot.
        if not systemctl.booted():
            return [enable]
        # Our own socket holds the address, so it is only tried where that does not run.
        listens = systemctl.active("edgellm.socket")
        if not listens:
            self._check_free()
        changed = [step for step in before if not step.done]
        moved = any("edgellm.socket" in step.what for step in changed)
        done = listens and systemctl.active("edgellm.service") and not changed
        return [enable, InstallStep("start it", partial(self._go, units, moved), done=done)]

    def _start_lending(self, before: list[InstallStep]) -> list[InstallStep]:
        unit = layout.RPC_UNIT
        start = partial(systemctl.run, ["systemctl", "enable", unit])
        enable = InstallStep(f"enable {unit}", start, done=systemctl.enabled(unit))
        if not systemctl.booted():
            return [enable]

        def go() -> None:
            systemctl.run(["systemctl", "daemon-reload"])
            systemctl.run(["systemctl", "restart", unit], "see `journalctl -u edgellm-rpc -n 20`")

        return [enable, InstallStep("start it", go, done=systemctl.active(unit) and all(step.done for step in before))]

    def _go(self, units: list[str], moved: bool) -> None:
        systemctl.run(["systemctl", "daemon-reload"])
        if moved:  # systemd does not rebind a socket that is active
            systemctl.run(["systemctl", "stop", "edgellm.service", "edgellm.socket"])
        systemctl.run(["systemctl", "start", "edgellm.socket"])
        systemctl.run(["systemctl", "restart", *units[1:]], "see `journalctl -u edgellm -n 20`")

    def _check_free(self) -> None:
        try:
            for each in bind(self.settings.listen):
                each.close()
        except AddressInUseError as error:
            hint = f"started by hand? `edgellm stop`. {error.hint}"
            raise AddressInUseError(str(error), hint) from error
        except UnavailableError:
            pass  # an address that this machine does not have yet: FreeBind= of the socket

    def _write(self, file: layout.UnitFile) -> InstallStep:
        path = self._at(file.path)
        return InstallStep(f"write {path}", partial(write_file, path, file.text), done=has_text(path, file.text))

    def _at(self, path: Path) -> Path:
        return self.request.root / path


# `edgellm service uninstall`: remove the units; with `--purge` also models, engines and configuration.

_ROOT = Path("/")


def removal_steps(*, purge: bool) -> list[InstallStep]:
    """Return the steps in order; what does not exist counts as done."""
    return [*_stop_units(), *_remove_files(), *(_purge() if purge else [])]


def kept_folders() -> list[str]:
    """Return the folders that a removal without --purge leaves."""
    system = system_folders()
    return [str(path) for path in (system.data, system.cache, _ROOT / ETC, PREFIX) if path.exists()]


def _stop_units() -> Iterator[InstallStep]:
    units = [unit for unit in layout.UNITS if (_ROOT / layout.UNIT_DIR / unit).exists()]
    enabled = [unit for unit in units if systemctl.enabled(unit)]
    running = [unit for unit in units if systemctl.active(unit)] if systemctl.booted() else []
    # Sockets first: otherwise a client starts the service again.
    running.sort(key=lambda unit: not unit.endswith(".socket"))
    stop = partial(systemctl.run, ["systemctl", "stop", *running])
    yield InstallStep(f"stop {', '.join(running)}" if running else "stop it", stop, done=not running)
    disable = partial(systemctl.run, ["systemctl", "disable", *enabled])
    yield InstallStep(f"disable {', '.join(enabled)}" if enabled else "disable it", disable, done=not enabled)


def _remove_files() -> Iterator[InstallStep]:
    for path in layout.all_paths():
        full = _ROOT / path
        if full.exists():
            yield InstallStep(f"remove {full}", partial(_unlink, full))
    if systemctl.booted():
        yield InstallStep("reload systemd", partial(systemctl.run, ["systemctl", "daemon-reload"]))


def _unlink(path: Path) -> None:
    path.unlink()
    # The folder of drop-ins goes with its last file; one of the operator's keeps it.
    if path.parent.name.endswith(".d") and path.parent.parent.name == "system" and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _purge() -> Iterator[InstallStep]:
    system = system_folders()
    for folder in (system.data, system.cache, ROOT_CACHE, _ROOT / ETC, Path("/var/lib/edgellm-power")):
        if folder.exists():
            yield InstallStep(f"delete {folder}", partial(shutil.rmtree, folder))
    if program.stamp() is not None:
        yield InstallStep(f"delete {PREFIX}", partial(shutil.rmtree, PREFIX))
        if COMMAND.is_symlink() and COMMAND.readlink() == PREFIX / "bin/edgellm":
            yield InstallStep(f"remove {COMMAND}", COMMAND.unlink)
    for user in (USER, "edgellm-jtop"):
        if user_exists(user):
            yield InstallStep(f"remove user {user}", partial(systemctl.run, ["userdel", user]))
