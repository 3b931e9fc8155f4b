"""Reads all facts once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edge.board.memory import snapshot
from edge.board.probe import probe
from edge.board.tree import Tree
from edge.doctor.facts import Facts
from edge.doctor.gather import (
    accounts,
    cuda,
    devices,
    environment,
    memory,
    models,
    ports,
    power,
    serving,
    units,
    untidy,
)
from edge.folders import Folders, system_folders
from edge.folders import folders as folders_of


def examined(env: Mapping[str, str], state_dir: Path | None) -> Folders:
    """--state-dir > EDGELLM_STATE_DIR > an installed system service > ours."""
    named = state_dir is not None or bool(env.get("EDGELLM_STATE_DIR"))
    return system_folders() if not named and units.our_files(Tree()) else folders_of(env, state_dir)


def read(
    root: Path,
    folders: Folders,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    measure: bool = True,
    systemctl: str = "systemctl",
) -> Facts:
    """`root` other than / is a copied tree: what only a running system tells stays unknown."""
    tree = Tree(root)
    board = probe(root)
    account = accounts.serving_account(tree, units.our_text(tree))
    wanted = serving.read(board, folders, env, flags, tree.live)
    known_units = units.read(tree, systemctl)
    model_folder = folders.models if tree.live else system_folders().models
    facts = Facts(
        live=tree.live,
        board=board,
        memory=snapshot(root, board),
        use=memory.read(tree),
        devices=devices.read(tree, board, account),
        cuda=cuda.read(tree, env, folders.cache / "cuda"),
        serving=wanted,
        power=power.read(tree),
        heat=power.heat(tree),
        models=models.read(tree, model_folder, wanted.model_file, account, measure),
        environment=environment.read(tree, folders, env),
        systemd=units.running(tree),
        units=known_units,
        drop_ins=units.our_files(tree),
        jtop=devices.jtop(tree, account) if board.soc else None,
        wsl=environment.wsl(tree) if board.container == "wsl2" else None,
    )
    return _with_live(facts, tree, folders) if tree.live else facts


def _with_live(facts: Facts, tree: Tree, folders: Folders) -> Facts:
    service = bool(facts.drop_ins) and folders.data == system_folders().data
    active = service and any(unit.active == "active" for name, unit in facts.units.items() if name in units.OURS)
    return replace(
        facts,
        ports=ports.read(tree, facts.serving.listen, folders.lock, active),
        untidy=untidy.read(folders, bool(ports.holders(tree, folders.lock)), service),
    )
