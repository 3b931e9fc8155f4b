"""The five folders of one edgellm: data, state, cache, run, config."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from edge.errors import UnavailableError

# unix(7): sun_path holds 108 bytes with its final zero. The longest name under run/<instance>/ is a model's socket.
SOCKET_PATH_MAX_BYTES = 107
# systemd gives /var/cache/edgellm to the service's user, who could plant sources for a build by root.
ROOT_CACHE = Path("/var/cache/edgellm-root")
_XDG = ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")
LINKS_MAX = 40  # MAXSYMLINKS of the kernel
_LONGEST_SOCKET_NAME = 40  # 24 bytes of the id, its hash, `~N` of a reload, `.sock`
_OURS = frozenset({"access", "control"})  # access.log, control.sock


class Folders(NamedTuple):
    """The paths of one edgellm; nothing is created here. `instance` names the part of one running process.

    `shared_stores`: models are also looked for in the system service's folder and in the user's Hugging Face cache.
    False for a folder named by --state-dir or EDGELLM_STATE_DIR, which has to hold everything that it serves.
    """

    data: Path
    state: Path
    cache: Path
    run: Path
    config: Path
    instance: str = "main"
    shared_stores: bool = False

    @property
    def engines(self) -> Path:
        return self.data / "engines"

    @property
    def models(self) -> Path:
        return self.data / "models"

    @property
    def instance_run(self) -> Path:
        return self.run / self.instance

    @property
    def instance_state(self) -> Path:
        return self.state / self.instance

    @property
    def saved_prompts(self) -> Path:
        return self.cache / "prompts" / self.instance

    @property
    def kept_headers(self) -> Path:
        return self.cache / "headers"

    @property
    def lock(self) -> Path:
        return self.instance_run / "lock"

    @property
    def control_socket(self) -> Path:
        return self.instance_run / "control.sock"

    @property
    def starts(self) -> Path:
        return self.instance_state / "starts.jsonl"

    @property
    def crashes(self) -> Path:
        return self.instance_state / "crashes.jsonl"

    def model_socket(self, model_id: str) -> Path:
        """Return the path of an engine's private socket; ids that are long or no plain file name are cut and hashed.

        So are those that name a file of ours: its stem is the name of the engine's log, too.
        """
        plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in model_id)
        if plain != model_id or len(plain.encode()) > 24 or plain in _OURS:
            plain = f"{plain.encode()[:15].decode(errors='ignore')}-{_digest(model_id.encode(), 8)}"
        return self.instance_run / f"{plain}.sock"


def folders(env: Mapping[str, str], state_dir: Path | None = None, *, root_user: bool | None = None) -> Folders:
    """Resolve `--state-dir` > EDGELLM_STATE_DIR > the system's folders for root and its service, else XDG's.

    Root has a cache of its own. Raises UnavailableError for a named folder that another user prepared in /tmp.
    """
    chosen = state_dir or (Path(env["EDGELLM_STATE_DIR"]) if env.get("EDGELLM_STATE_DIR") else None)
    if chosen is not None:
        _refuse_prepared(chosen.absolute(), env)
        return _under(chosen.absolute())
    if os.geteuid() == 0 if root_user is None else root_user:
        return system_folders()._replace(cache=ROOT_CACHE)
    if str(system_folders().run) in env.get("RUNTIME_DIRECTORY", "").split(":"):  # RuntimeDirectory= of our unit
        return system_folders()
    for name in _XDG:
        if env.get(name, "").startswith("/"):
            _refuse_prepared(Path(env[name], "edgellm"), env)
    return user_folders(env)


def _refuse_prepared(base: Path, env: Mapping[str, str]) -> None:
    """Raise UnavailableError if another user made the folder, or one above it, where every user may make one.

    Its configuration would name the engine to run, and its links the files to write.
    """
    folder = prepared_by_another(base, env)
    if folder is not None:
        hint = "remove it as root, or name a folder of your own with --state-dir"
        owner = folder.lstat().st_uid
        raise UnavailableError(f"user {owner} made {folder}, in a folder that every user may write to", hint)


def our_users(env: Mapping[str, str]) -> frozenset[int]:
    """Return root, this process's user and the caller of sudo."""
    caller = env.get("SUDO_UID", "")
    return frozenset({0, os.geteuid(), int(caller) if caller.isdecimal() and len(caller) < 11 else 0})


def prepared_by_another(path: Path, env: Mapping[str, str]) -> Path | None:
    """Return the part of a path that another user made where every user may make one, or None.

    Links on the way are followed. root and the caller of sudo own what they prepare.
    """
    ours = our_users(env)
    ways = [path]
    for way in ways:  # it grows by the target of each link
        for part in (way, *way.parents):
            try:
                state, parent = part.lstat(), part.parent.stat().st_mode
                target = part.readlink() if stat.S_ISLNK(state.st_mode) else None
            except OSError:  # not there yet, or the next use of it fails
                continue
            if state.st_uid not in ours and parent & stat.S_IWOTH:
                return part
            if target is not None and len(ways) < LINKS_MAX:
                ways.append(part.parent / target / way.relative_to(part))
    return None


def system_folders() -> Folders:
    """Return the folders of the installed service (FHS)."""
    lib = Path("/var/lib/edgellm")
    cache, run, config = Path("/var/cache/edgellm"), Path("/run/edgellm"), Path("/etc/edgellm")
    return Folders(lib, lib / "state", cache, run, config, shared_stores=True)


def user_folders(env: Mapping[str, str]) -> Folders:
    """Return a user's folders by the XDG base directories; relative paths are ignored, as the standard asks."""
    home = Path(env.get("HOME") or "/nonexistent")

    def xdg(variable: str, default: Path) -> Path:
        return (Path(env[variable]) if env.get(variable, "").startswith("/") else default) / "edgellm"

    run = Path(env["XDG_RUNTIME_DIR"]) / "edgellm" if env.get("XDG_RUNTIME_DIR", "").startswith("/") else None
    return Folders(
        data=xdg("XDG_DATA_HOME", home / ".local/share"),
        state=xdg("XDG_STATE_HOME", home / ".local/state"),
        cache=xdg("XDG_CACHE_HOME", home / ".cache"),
        run=run or temporary() / f"edgellm-{os.getuid()}",
        config=xdg("XDG_CONFIG_HOME", home / ".config"),
        shared_stores=True,
    )


def _under(base: Path) -> Folders:
    run = base / "run"
    if len(os.fsencode(run / "main")) + 1 + _LONGEST_SOCKET_NAME > SOCKET_PATH_MAX_BYTES:
        digest = _digest(os.fsencode(base), 12)
        run = temporary() / f"edgellm-{os.getuid()}-{digest}"
    return Folders(base / "data", base / "state", base / "cache", run, base / "config")


def temporary() -> Path:
    """Return TMPDIR or /tmp. The standard library's tempfile would write a file there to try it."""
    return Path(os.environ.get("TMPDIR") or "/tmp")


def _digest(data: bytes, length: int) -> str:
    import hashlib  # loads OpenSSL, 3 ms: only for names that do not fit

    return hashlib.sha256(data).hexdigest()[:length]
