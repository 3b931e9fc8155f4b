"""Read users and groups from /etc/passwd and /etc/group of a (copied) machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    entry = next((row for row in _rows(tree, "/etc/passwd") if row[0] == user), None)
    if user is not None and entry is not None:
        # systemd sets the groups of /etc/group and those of the unit, as initgroups(3) does.
        listed = {*_memberships(tree, user), *settings.get("SupplementaryGroups", [])}
        gids = {int(entry[3])} | {ids[name] for name in listed if name in ids}
        return Account(PathUser(user, int(entry[2]), frozenset(gids)))
    return _caller(tree, ids)


def _caller(tree: Tree, ids: dict[str, int]) -> Account:
    uid = os.geteuid()
    gids = {os.getegid(), *os.getgroups()}
    user = next((row[0] for row in _rows(tree, "/etc/passwd") if row[2] == str(uid)), str(uid))
    pending = tuple(sorted(name for name in _memberships(tree, user) if ids.get(name) not in gids))
    return Account(PathUser(user, uid, frozenset(gids)), pending)


def group_ids(tree: Tree) -> dict[str, int]:
    """Return the group ids by name."""
    return {row[0]: int(row[2]) for row in _rows(tree, "/etc/group") if row[2].isdecimal()}


def _memberships(tree: Tree, user: str) -> list[str]:
    return [row[0] for row in _rows(tree, "/etc/group") if user in row[3].split(",")]


def _rows(tree: Tree, file: str) -> Iterator[list[str]]:
    """Yield the fields of passwd(5) or group(5), of which both have four and more."""
    return (row for line in tree.lines(file) if len(row := line.split(":")) > 3)


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
