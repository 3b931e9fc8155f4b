"""The list of checks of `edgellm doctor`, and how all facts are read."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge.board import jetson
from edge.board.memory import snapshot
from edge.board.probe import probe
from edge.doctor import board, config, engine, gpu, memory, own_files, service, storage, wsl
from edge.doctor.accounts import serving_account
from edge.doctor.check import Check, CheckResult, Finding, unknown, worst
from edge.doctor.config import read_serving
from edge.doctor.engine import read_cuda
from edge.doctor.facts import DoctorFacts, OwnFile
from edge.doctor.gpu import read_devices, read_jtop
from edge.doctor.memory import read_memory_use
from edge.doctor.own_files import find_leftovers
from edge.doctor.service import OURS, read_ports, read_units, unit_files
from edge.doctor.storage import read_model_folder
from edge.doctor.wsl import read_environment, read_wsl
from edge.linux.files import try_lock
from edge.linux.procfs import lock_holders
from edge.linux.systemctl import booted
from edge.linux.tree import Tree
from edge.paths import Folders, folders, system_folders
from edge.telemetry.sample import plausible
from edge.telemetry.sysfs import SysfsSource

# By name, in the order of the report. A check that does not apply to a machine finds nothing.
CHECKS: dict[str, Callable[[DoctorFacts], Finding | Sequence[Finding] | None]] = {
    **board.CHECKS,
    **config.CHECKS,
    **memory.CHECKS,
    **gpu.CHECKS,
    **engine.CHECKS,
    **board.POWER_CHECKS,
    **storage.CHECKS,
    **service.CHECKS,
    **wsl.CHECKS,
    **own_files.CHECKS,
}


def examine(facts: DoctorFacts) -> tuple[Check, ...]:
    """Run every check that applies to this machine, in order."""
    results: list[Check] = []
    for name, check in CHECKS.items():
        try:
            found = check(facts)
        except Exception as error:  # one odd value of a machine costs its own check, not all others
            found = unknown(f"cannot be judged: {type(error).__name__}: {error}", "please report this")
        rows = [found] if isinstance(found, Finding) else found or ()
        results.extend(Check(name, *row) for row in rows)
    return tuple(results)


# ---- the document of --json

SCHEMA = 1


def document(checks: tuple[Check, ...], fixed: tuple[str, ...]) -> dict[str, Any]:
    """Return the document: the worst verdict, counts by verdict, the checks, and what `--fix` changed."""
    return {
        "schema": SCHEMA,
        "verdict": worst(checks).value,
        "counts": {verdict.value: sum(check.verdict is verdict for check in checks) for verdict in CheckResult},
        "checks": [
            {
                "name": check.name,
                "verdict": check.verdict.value,
                "says": check.says,
                "next": check.next_step,
                "command": check.command,
            }
            for check in checks
        ],
        "fixed": list(fixed),
    }


# `edgellm doctor --fix`: create edgellm's folders, tighten modes and remove stale sockets; touch nothing else.


def apply(files: tuple[OwnFile, ...]) -> tuple[str, ...]:
    """Repair each file and return one sentence per file, also for what failed."""
    return tuple(_one(file) for file in files)


def _one(file: OwnFile) -> str:
    try:
        if file.kind == "folder":
            file.path.mkdir(parents=True, exist_ok=True)
            _set_mode(file.path, file.mode)
            return f"created {file.path}"
        if file.kind == "mode":
            _set_mode(file.path, file.mode)
            return f"set the mode of {file.path} to {file.mode:o}"
        return _remove_socket(file.path)
    except OSError as error:
        return f"could not change {file.path}: {error.strerror}"


def _set_mode(path: Path, mode: int) -> None:
    """Change the mode of a file, and of no link's target: root repairs folders in which other users have files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _remove_socket(path: Path) -> str:
    """Remove a stale socket under the instance's lock, so that an instance that is starting keeps its new socket."""
    # Through one descriptor: the owner of the run folder, the service's user, could put a link in this one's place.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return f"kept {path}: its folder belongs to another user"
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640, dir_fd=folder)
        try:
            if not try_lock(lock):
                return f"kept {path}: edgellm has started"
            # A file may have taken its place since the check.
            if stat.S_ISSOCK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(path.name, dir_fd=folder)
        finally:
            os.close(lock)
    finally:
        os.close(folder)
    return f"removed the stale socket {path}"


# Read all facts of `edgellm doctor`.


def examined_folders(env: Mapping[str, str], state_dir: Path | None) -> Folders:
    """Return the folders to examine: --state-dir, EDGELLM_STATE_DIR, an installed service's, else the caller's."""
    named = state_dir is not None or bool(env.get("EDGELLM_STATE_DIR"))
    return system_folders() if not named and unit_files(Tree()) else folders(env, state_dir)


def read_facts(
    root: Path,
    places: Folders,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    measure: bool,
) -> DoctorFacts:
    """Read everything once. A `root` other than / is a copied tree without processes, units and ports."""
    tree = Tree(root)
    board = probe(root)
    unit_texts = unit_files(tree)
    account = serving_account(tree, "\n".join(file.text for file in unit_texts))
    serving = read_serving(board, places, env, flags, tree.live)
    model_folder = places.models if tree.live else system_folders().models
    facts = DoctorFacts(
        live=tree.live,
        board=board,
        memory=snapshot(root, board),
        use=read_memory_use(tree),
        devices=read_devices(tree, board, account),
        cuda=read_cuda(tree, env, places.cache / "cuda", account.user),
        serving=serving,
        sensors=plausible(SysfsSource(root, board, since_boot=True).read(time.monotonic())),
        models=read_model_folder(tree, model_folder, serving.model_file, account, measure),
        environment=read_environment(tree, places, env, account.user),
        power_modes=jetson.modes(tree.text("/etc/nvpmodel.conf") or ""),
        systemd=booted(root),
        units=read_units(tree),
        drop_ins=unit_texts,
        jtop=read_jtop(tree, account) if board.soc else None,
        wsl=read_wsl(tree) if board.container == "wsl2" else None,
    )
    return _with_live(facts, places) if tree.live else facts


def _with_live(facts: DoctorFacts, places: Folders) -> DoctorFacts:
    service = bool(facts.drop_ins) and places.data == system_folders().data
    active = service and any(unit.active == "active" for name, unit in facts.units.items() if name in OURS)
    return replace(
        facts,
        ports=read_ports(facts.serving.listen, places.lock, active),
        leftovers=find_leftovers(places, bool(lock_holders(places.lock)), service),
    )
