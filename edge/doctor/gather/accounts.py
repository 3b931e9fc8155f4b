"""Users and groups, and what they may reach. Reads /etc/passwd and /etc/group under the root."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from edge.board.tree import Tree


@dataclass(frozen=True, slots=True)
class Account:
    """`groups` are those a process of this user has; `pending` those that /etc/group adds at the next login."""

    name: str
    uid: int
    gids: frozenset[int]
    groups: tuple[str, ...]
    pending: tuple[str, ...] = ()

    def reaches(self, path: Path, wanted: int) -> bool:
        """Mode bits alone: `wanted` is 4 read, 2 write, 1 enter. False when the path is not there."""
        try:
            about = path.stat()
        except OSError:
            return False
        if self.uid == 0:
            return True
        if about.st_uid == self.uid:
            bits = about.st_mode >> 6
        elif about.st_gid in self.gids:
            bits = about.st_mode >> 3
        else:
            bits = about.st_mode
        return bits & wanted == wanted


def serving_account(tree: Tree, unit_text: str) -> Account:
    """The user of the installed service (`User=`, `SupplementaryGroups=`), else whoever runs this."""
    settings: dict[str, list[str]] = {}
    for line in unit_text.splitlines():
        key, _, value = line.partition("=")
        settings.setdefault(key.strip(), []).extend(value.split())
    names = group_ids(tree)
    user = settings.get("User", [None])[-1]
    entry = next((line.split(":") for line in tree.lines("/etc/passwd") if line.startswith(f"{user}:")), None)
    if user is not None and entry is not None and len(entry) > 3:
        listed = set(_listed(tree, user)) | set(settings.get("SupplementaryGroups", []))
        gids = {int(entry[3])} | {names[name] for name in listed if name in names}
        return Account(user, int(entry[2]), frozenset(gids), _names(names, gids))
    return _asking(tree, names)


def _asking(tree: Tree, names: dict[str, int]) -> Account:
    uid = os.geteuid()
    gids = {os.getegid(), *os.getgroups()}
    user = next(
        (line.split(":")[0] for line in tree.lines("/etc/passwd") if line.split(":")[2:3] == [str(uid)]), str(uid)
    )
    pending = tuple(sorted(name for name in _listed(tree, user) if names.get(name) not in gids))
    return Account(user, uid, frozenset(gids), _names(names, gids), pending)


def group_ids(tree: Tree) -> dict[str, int]:
    fields = (line.split(":") for line in tree.lines("/etc/group"))
    return {entry[0]: int(entry[2]) for entry in fields if len(entry) > 2 and entry[2].isdecimal()}


def _listed(tree: Tree, user: str) -> list[str]:
    fields = (line.split(":") for line in tree.lines("/etc/group"))
    return [entry[0] for entry in fields if len(entry) > 3 and user in entry[3].split(",")]


def _names(names: dict[str, int], gids: set[int]) -> tuple[str, ...]:
    return tuple(sorted(name for name, gid in names.items() if gid in gids))


def group_of(path: Path, names: dict[str, int]) -> str | None:
    try:
        gid = path.stat().st_gid
    except OSError:
        return None
    return next((name for name, number in names.items() if number == gid), str(gid))


def first_blocked(account: Account, folder: Path) -> Path | None:
    """The outermost folder on the way to (and with) `folder` that this user may not enter."""
    for step in [*reversed(folder.parents), folder]:
        try:
            is_folder = stat.S_ISDIR(step.stat().st_mode)
        except FileNotFoundError:
            return None
        except OSError:
            return step
        if is_folder and not account.reaches(step, 1):
            return step
    return None
