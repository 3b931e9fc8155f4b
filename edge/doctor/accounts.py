"""Read users and groups from /etc/passwd and /etc/group of a (copied) machine."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from edge.linux.tree import Tree
from edge.service.access import PathUser, allowed, find_problem


class Account(Struct, frozen=True):
    """The user that serves. `pending`: groups that /etc/group adds at the next login."""

    user: PathUser
    pending: tuple[str, ...] = ()


def serving_account(tree: Tree, unit_text: str) -> Account:
    """Return the user of the installed service (`User=`, `SupplementaryGroups=`), else the caller."""
    settings: dict[str, list[str]] = {}
    for line in unit_text.splitlines():
        key, _, value = line.partition("=")
        settings.setdefault(key.strip(), []).extend(value.split())
    ids = group_ids(tree)
    user = settings.get("User", [None])[-1]
    entry = next((line.split(":") for line in tree.lines("/etc/passwd") if line.startswith(f"{user}:")), None)
    if user is not None and entry is not None and len(entry) > 3:
        # systemd sets the groups of /etc/group and those of the unit, as initgroups(3) does.
        listed = {*_memberships(tree, user), *settings.get("SupplementaryGroups", [])}
        gids = {int(entry[3])} | {ids[name] for name in listed if name in ids}
        return Account(PathUser(user, int(entry[2]), frozenset(gids)))
    return _caller(tree, ids)


def _caller(tree: Tree, ids: dict[str, int]) -> Account:
    uid = os.geteuid()
    gids = {os.getegid(), *os.getgroups()}
    entries = (line.split(":") for line in tree.lines("/etc/passwd"))
    user = next((entry[0] for entry in entries if entry[2:3] == [str(uid)]), str(uid))
    pending = tuple(sorted(name for name in _memberships(tree, user) if ids.get(name) not in gids))
    return Account(PathUser(user, uid, frozenset(gids)), pending)


def group_ids(tree: Tree) -> dict[str, int]:
    """Return the group ids by name."""
    entries = (line.split(":") for line in tree.lines("/etc/group"))
    return {entry[0]: int(entry[2]) for entry in entries if len(entry) > 2 and entry[2].isdecimal()}


def _memberships(tree: Tree, user: str) -> list[str]:
    entries = (line.split(":") for line in tree.lines("/etc/group"))
    return [entry[0] for entry in entries if len(entry) > 3 and user in entry[3].split(",")]


def group_of(path: Path, ids: dict[str, int]) -> str | None:
    """Return the group of a file by name, or its number; None where there is no file."""
    try:
        gid = path.stat().st_gid
    except OSError:
        return None
    return next((name for name, number in ids.items() if number == gid), str(gid))


def reaches(user: PathUser, path: Path, wanted: int) -> bool:
    """Judge by mode bits: `wanted` adds 4 read, 2 write, 1 enter. False where the file does not exist."""
    try:
        state = path.stat()
    except OSError:
        return False
    return allowed(state, user, wanted)


def first_blocked(user: PathUser, folder: Path) -> Path | None:
    """Return the outermost folder on the path that the user may not enter."""
    found = find_problem(folder, user)
    return found.path if found is not None and found.kind == "closed" else None
