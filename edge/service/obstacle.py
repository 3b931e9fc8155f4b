"""Why a path cannot be used: the exact folder that is missing, or that does not let somebody through (FC-79)."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from edge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Who:
    """A user as the kernel judges him."""

    name: str
    uid: int
    gids: frozenset[int]

    @classmethod
    def me(cls) -> Who:
        uid = os.geteuid()
        return cls(_name(uid), uid, frozenset({os.getegid(), *os.getgroups()}))

    @classmethod
    def named(cls, name: str, extra_groups: tuple[str, ...] = ()) -> Who:
        """Raises ConfigError when there is no such user."""
        try:
            entry = pwd.getpwnam(name)
        except KeyError as error:
            raise ConfigError(f"there is no user {name!r}", "name an existing user with --run-as") from error
        extra = {grp.getgrnam(group).gr_gid for group in extra_groups}
        return cls(name, entry.pw_uid, frozenset({*os.getgrouplist(name, entry.pw_gid), *extra}))


def future(name: str, extra_groups: tuple[str, ...] = ()) -> Who:
    """A user as he will be; one that does not exist yet owns nothing and is in the extra groups only."""
    try:
        return Who.named(name, extra_groups)
    except ConfigError:
        return Who(name, -1, frozenset(grp.getgrnam(group).gr_gid for group in extra_groups))


@dataclass(frozen=True, slots=True)
class Obstacle:
    """`path` is the first part of the way that stops; `kind`: missing | empty | closed | unreadable."""

    path: Path
    kind: str
    sentence: str
    hint: str


def find(path: Path, who: Who) -> Obstacle | None:
    """Walks from / to `path`, then to what it links to. None: it can be read. ACLs are not looked at."""
    for end in dict.fromkeys((path, Path(os.path.realpath(path)))):
        for part in [*reversed(end.parents), end]:
            found = _at(part, last=part == end, who=who)
            if found is not None:
                return found
    return None


def _at(part: Path, *, last: bool, who: Who) -> Obstacle | None:
    try:
        state = part.stat()
    except OSError as error:  # a closed folder of ours was found one step before; root never meets one
        return _closed(part.parent, who) if error.errno == errno.EACCES else _missing(part)
    folder = stat.S_ISDIR(state.st_mode)
    if folder and not allowed(state, who, 1):
        return _closed(part, who)
    if last and not allowed(state, who, 4):
        return _unreadable(part, who)
    if last and folder and _is_empty(part):
        return Obstacle(part, "empty", f"{part} is empty: is its disk mounted?", f"mount it, or put models into {part}")
    return None


def allowed(state: os.stat_result, who: Who, bit: int) -> bool:
    """One of r=4, w=2, x=1 by owner, group and mode. Root is let through."""
    if who.uid == 0:
        return True
    shift = 6 if state.st_uid == who.uid else 3 if state.st_gid in who.gids else 0
    return bool(state.st_mode >> shift & bit)


def writable_by_others(path: Path, owners: frozenset[int] = frozenset({0})) -> Path | None:
    """The first part of the way to `path` (and of what it links to) that anyone but `owners` could exchange."""
    for end in dict.fromkeys((path, Path(os.path.realpath(path)))):
        for part in [*reversed(end.parents), end]:
            state = part.lstat()
            if state.st_uid not in owners:
                return part
            if stat.S_ISLNK(state.st_mode):
                continue  # a link's own mode means nothing
            sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX  # others add, and exchange nothing
            others = stat.S_IWOTH | (stat.S_IWGRP if state.st_gid != 0 else 0)
            if state.st_mode & others and not sticky:
                return part
    return None


def _missing(part: Path) -> Obstacle:
    parent = part.parent
    empty = parent.is_dir() and _is_empty(parent)
    not_there = f"{part} is not there" + (f": {parent} is empty, is its disk mounted?" if empty else "")
    return Obstacle(part, "missing", not_there, f"mount or create {part}; edgellm never creates it")


def _is_empty(folder: Path) -> bool:
    try:
        return next(folder.iterdir(), None) is None
    except OSError:
        return False


def _closed(part: Path, who: Who) -> Obstacle:
    sentence = f"{part} does not let user {who.name} through ({_mode(part)})"
    return Obstacle(part, "closed", sentence, f"chmod o+x {part}, or keep the models elsewhere")


def _unreadable(part: Path, who: Who) -> Obstacle:
    letters = "o+rx" if part.is_dir() else "o+r"
    sentence = f"{part} cannot be read by user {who.name} ({_mode(part)})"
    return Obstacle(part, "unreadable", sentence, f"chmod {letters} {part}")


def _mode(part: Path) -> str:
    try:
        state = part.stat()
    except OSError:
        return "its mode cannot be read"
    return f"mode {stat.S_IMODE(state.st_mode):04o}, owner {_name(state.st_uid)}"


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
