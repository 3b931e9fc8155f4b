"""Find why a user cannot read a path: the exact folder that is missing or closed (FC-79)."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

from msgspec import Struct

from edge.errors import ConfigError
from edge.linux.files import visible, write_atomic


class PathUser(Struct, frozen=True):
    """A user with the ids that the kernel compares with a file's mode."""

    name: str
    uid: int
    gids: frozenset[int]

    @classmethod
    def me(cls) -> PathUser:
        """Return the user of this process."""
        uid = os.geteuid()
        return cls(_name(uid), uid, frozenset({os.getegid(), *os.getgroups()}))

    @classmethod
    def named(cls, name: str, extra_groups: tuple[str, ...] = ()) -> PathUser:
        """Return a user of the user database. Raises ConfigError for an unknown name."""
        try:
            entry = pwd.getpwnam(name)
        except KeyError as error:
            raise ConfigError(f"there is no user {name!r}", "name an existing user with --run-as") from error
        extra = {grp.getgrnam(group).gr_gid for group in extra_groups}
        return cls(name, entry.pw_uid, frozenset({*os.getgrouplist(name, entry.pw_gid), *extra}))


def future_user(name: str, extra_groups: tuple[str, ...] = ()) -> PathUser:
    """Return a user that may not exist yet: it owns nothing and is in the extra groups only."""
    try:
        return PathUser.named(name, extra_groups)
    except ConfigError:
        return PathUser(name, -1, frozenset(grp.getgrnam(group).gr_gid for group in extra_groups))


class PathProblem(Struct, frozen=True):
    """The first part of a path that stops a user. `kind`: missing, empty, closed or unreadable."""

    path: Path
    kind: str
    sentence: str
    hint: str


def find_problem(path: Path, user: PathUser) -> PathProblem | None:
    """Walk from / to the path, then to its link target; None where the user can read it. ACLs are ignored."""
    for end in dict.fromkeys((path, Path(os.path.realpath(path)))):
        for part in [*reversed(end.parents), end]:
            found = _at(part, last=part == end, user=user)
            if found is not None:
                return found
    return None


def _at(part: Path, *, last: bool, user: PathUser) -> PathProblem | None:
    try:
        state = part.stat()
    except OSError as error:  # EACCES: the folder above is closed to this process too
        return _closed(part.parent, user) if error.errno == errno.EACCES else _missing(part)
    folder = stat.S_ISDIR(state.st_mode)
    if folder and not allowed(state, user, 1):
        return _closed(part, user)
    if last and not allowed(state, user, 4):
        return _unreadable(part, user)
    if last and folder and _is_empty(part):
        return PathProblem(
            part, "empty", f"{part} is empty: is its disk mounted?", f"mount it, or put models into {part}"
        )
    return None


def allowed(state: os.stat_result, user: PathUser, bit: int) -> bool:
    """Return whether the mode grants all of `bit` (r=4, w=2, x=1) to the user. Root passes."""
    if user.uid == 0:
        return True
    # One class counts, the first that fits: an owner without permission is refused even if the group has it.
    shift = 6 if state.st_uid == user.uid else 3 if state.st_gid in user.gids else 0
    return state.st_mode >> shift & bit == bit


def _missing(part: Path) -> PathProblem:
    parent = part.parent
    empty = parent.is_dir() and _is_empty(parent)
    sentence = f"{part} does not exist" + (f": {parent} is empty, is its disk mounted?" if empty else "")
    return PathProblem(part, "missing", sentence, f"mount or create {part}; edgellm does not create it")


def _is_empty(folder: Path) -> bool:
    try:
        return next(folder.iterdir(), None) is None
    except OSError:
        return False


def _closed(part: Path, user: PathUser) -> PathProblem:
    sentence = f"user {user.name} may not enter {part} ({_mode(part)})"
    return PathProblem(part, "closed", sentence, f"chmod o+x {shlex.quote(str(part))}, or keep the models elsewhere")


def _unreadable(part: Path, user: PathUser) -> PathProblem:
    letters = "o+rx" if part.is_dir() else "o+r"
    sentence = f"user {user.name} may not read {part} ({_mode(part)})"
    return PathProblem(part, "unreadable", sentence, f"chmod {letters} {shlex.quote(str(part))}")


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


# Write files as root, and test owners and access.


def write_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically, creating its folder (0755). Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    write_atomic(path, text, mode)


def has_text(path: Path, text: str) -> bool:
    """Return whether the file has exactly this text."""
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def user_exists(name: str) -> bool:
    """Return whether the user database has this name."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def belongs_to(path: Path, user: str) -> bool:
    """Return whether the file exists and the user owns it."""
    try:
        return path.stat().st_uid == pwd.getpwnam(user).pw_uid
    except (OSError, KeyError):
        return False


def give(path: Path, user: str) -> None:
    """Change the owner to a user and its primary group, without following a link."""
    entry = pwd.getpwnam(user)
    os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)


def creatable(folder: Path, user: PathUser | None = None) -> bool:
    """Return whether a user (None: this process) may write to a folder, or create it in the nearest that is visible."""
    near = next(step for step in (folder, *folder.parents) if visible(step))
    if user is None or user.uid == os.geteuid():
        return near.is_dir() and os.access(near, os.W_OK | os.X_OK)
    return near.is_dir() and allowed(near.stat(), user, 3)
