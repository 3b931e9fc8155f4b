"""Read all facts of `edgellm doctor`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edge.board import power
from edge.board.memory import snapshot
from edge.board.probe import probe
from edge.board.tree import Tree
from edge.doctor.facts import Facts
from edge.doctor.gather.accounts import serving_account
from edge.doctor.gather.cuda import read_cuda
from edge.doctor.gather.devices import read_devices, read_jtop
from edge.doctor.gather.environment import read_environment, read_wsl
from edge.doctor.gather.memory import read_memory_use
from edge.doctor.gather.models import read_model_folder
from edge.doctor.gather.ports import read_ports
from edge.doctor.gather.serving import read_serving
from edge.doctor.gather.units import OURS, read_units, unit_files
from edge.doctor.gather.untidy import find_leftovers
from edge.folders import Folders, folders, system_folders
from edge.linux.procfs import lock_holders
from edge.service.systemctl import booted
from edge.telemetry.sysfs import SysfsSource


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
    measure: bool = True,
    systemctl: str = "systemctl",
) -> Facts:
    """Read everything once. A `root` other than / is a copied tree without processes, units and ports."""
    tree = Tree(root)
    board = probe(root)
    unit_texts = unit_files(tree)
    account = serving_account(tree, "\n".join(file.text for file in unit_texts))
    serving = read_serving(board, places, env, flags, tree.live)
    model_folder = places.models if tree.live else system_folders().models
    facts = Facts(
        live=tree.live,
        board=board,
        memory=snapshot(root, board),
        use=read_memory_use(tree),
        devices=read_devices(tree, board, account),
        cuda=read_cuda(tree, env, places.cache / "cuda"),
        serving=serving,
        sensors=SysfsSource(root).read(time.monotonic()),
        models=read_model_folder(tree, model_folder, serving.model_file, account, measure),
        environment=read_environment(tree, places, env),
        power_modes=power.modes(tree.text("/etc/nvpmodel.conf") or ""),
        systemd=booted(root),
        units=read_units(tree, systemctl),
        drop_ins=unit_texts,
        jtop=read_jtop(tree, account) if board.soc else None,
        wsl=read_wsl(tree) if board.container == "wsl2" else None,
    )
    return _with_live(facts, places) if tree.live else facts


def _with_live(facts: Facts, places: Folders) -> Facts:
    service = bool(facts.drop_ins) and places.data == system_folders().data
    active = service and any(unit.active == "active" for name, unit in facts.units.items() if name in OURS)
    return replace(
        facts,
        ports=read_ports(facts.serving.listen, places.lock, active),
        leftovers=find_leftovers(places, bool(lock_holders(places.lock)), service),
    )
