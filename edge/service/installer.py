"""`edgellm service install` as a list of repeatable steps.

program → users and folders → engine → models → configuration → units → start.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from edge.errors import AddressInUseError, UnavailableError
from edge.folders import system_folders
from edge.listen import bind
from edge.service import layout, program, systemctl
from edge.service.contents import Contents
from edge.service.disk import has_text, user_exists, write_file
from edge.service.offline import Bundle
from edge.service.request import RECORD, Request, unit_settings
from edge.service.step import Step, apply_all, nothing
from edge.service.wish import PREFIX, USER, record_text, write_record

COMMAND = Path("/usr/local/bin/edgellm")


class Installer:
    """Plans an installation: `steps()` changes nothing and raises what makes it impossible."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.system = system_folders()
        self.bundle = Bundle(request.offline) if request.offline else None
        self.settings = unit_settings(request, self.bundle.wheels if self.bundle else None)

    def steps(self) -> list[Step]:
        contents = Contents(self.request, self.settings, self.bundle)
        steps = [*self._program(), *self._users()]
        if self.bundle is not None and self.bundle.engine is not None:
            # The models depend on the engine, so the engine has to be installed before they are planned.
            archive = partial(self.bundle.import_engine, self.system.engines)
            steps.append(Step(f"import the engine of {self.bundle.engine}, verified", archive))
            later = Step("install the models and the configuration of the plan", lambda: apply_all(contents.steps()))
            steps.append(later)
        else:
            steps += contents.steps()
        steps += self._units()
        return [*steps, *self._start(steps)]

    def _program(self) -> list[Step]:
        source = program.needed(wheels=self.bundle.wheels if self.bundle else None)
        if source is None:
            return [Step(f"run {self.settings.python}", nothing, done=True)]
        origin = f"the wheels of {source.wheels}" if source.wheels else "the running edgellm"
        make = Step(f"create {PREFIX} from {origin}", partial(program.make, source), note=source.why)
        target = PREFIX / "bin/edgellm"
        linked = COMMAND.is_symlink() and COMMAND.readlink() == target
        if os.path.lexists(COMMAND) and not linked:
            return [make]  # the operator's own file stays
        return [make, Step(f"link {COMMAND} to {target}", partial(COMMAND.symlink_to, target), done=linked)]

    def _users(self) -> list[Step]:
        conf = [file for file in layout.files(self.settings) if file.path in layout.PREPARING]
        users = [USER, *(["edgellm-jtop"] if self.settings.jtop else [])]
        accounts = [file.path.name for file in conf if file.path != layout.TMPFILES]
        make_users = partial(systemctl.run, ["systemd-sysusers", *accounts])
        make_folders = partial(systemctl.run, ["systemd-tmpfiles", "--create", layout.TMPFILES.name])
        folders = (self.system.data, self.system.models, self.system.engines)
        return [
            *map(self._write, conf),
            Step(f"create {' and '.join(users)}", make_users, done=all(map(user_exists, users))),
            Step(f"create {self.system.data}", make_folders, done=all(folder.is_dir() for folder in folders)),
        ]

    def _units(self) -> list[Step]:
        files = [file for file in layout.files(self.settings) if file.path not in layout.PREPARING]
        steps = [self._write(file) for file in files]
        kept = {file.path for file in layout.files(self.settings)}
        stale = [self._at(path) for path in layout.all_paths() if path not in kept]
        steps += [Step(f"remove {path}", path.unlink) for path in stale if path.exists()]
        record = self.system.data / RECORD
        done = has_text(record, record_text(self.settings))
        return [*steps, Step(f"record it in {record}", lambda: write_record(record, self.settings), done=done)]

    def _start(self, before: list[Step]) -> list[Step]:
        units = ["edgellm.socket", "edgellm.service"]
        units += ["edgellm-jtop.service"] if self.settings.jtop else []
        units += ["edgellm-power.service"] if self._at(layout.POWER).exists() or self.settings.power_mode else []
        enabled = all(systemctl.enabled(unit) for unit in units)
        enable = Step(
            f"enable {', '.join(units)}", partial(systemctl.run, ["systemctl", "enable", *units]), done=enabled
        )
        if not systemctl.booted():
            return [enable]
        listens = systemctl.active("edgellm.socket")
        if not listens:
            self._check_free()
        changed = [step for step in before if not step.done]
        moved = any("edgellm.socket" in step.what for step in changed)
        done = listens and systemctl.active("edgellm.service") and not changed
        return [enable, Step("start it", partial(self._go, units, moved), done=done)]

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

    def _write(self, file: layout.UnitFile) -> Step:
        path = self._at(file.path)
        return Step(f"write {path}", partial(write_file, path, file.text), done=has_text(path, file.text))

    def _at(self, path: Path) -> Path:
        return self.request.root / path
