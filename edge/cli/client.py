"""Client of a running edgellm's control socket, for the short-lived commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from edge.daemon.lock import held
from edge.errors import EdgeError, NotRunningError, UnavailableError, UsageError
from edge.linux.files import is_trusted_dir, visible
from edge.paths import Folders, folders, prepared_by_another, system_folders, user_folders

# The control socket answers in milliseconds; forking a large process for an engine may hold up its event loop.
TIMEOUT_S = 10.0


def find(env: Mapping[str, str], state_dir: Path | None, *, running: bool = True) -> Folders:
    """Return the folders of the instance to talk to: --state-dir, EDGELLM_STATE_DIR, a running service, the user's.

    Raises UnavailableError beside a service that this user may not ask, or cannot see, unless the user runs an instance
    too. Without `running`, for commands that only use files, one that is not known to run is none.
    """
    if state_dir is not None or env.get("EDGELLM_STATE_DIR"):
        return folders(env, state_dir)
    system, own = system_folders(), user_folders(env)
    if held(system.lock):
        return system
    # Another user's process in a run folder that it made first is no instance of this user.
    if held(own.lock) and prepared_by_another(own.lock, env) is None:
        return own
    if _is_closed(system.lock):
        runs = _service_runs()
        if runs or (running and runs is None):
            closed = f"this user may not enter {system.run}"
            says = f"edgellm runs as a service, and {closed}" if runs else f"{closed} to see whether edgellm runs there"
            hint = "use sudo, or join the group edgellm (`sudo usermod -aG edgellm $USER`, then log in again)"
            raise UnavailableError(says, hint)
    return folders(env)


def _service_runs() -> bool | None:
    """Return whether systemd runs edgellm.service; None where it cannot be asked."""
    from edge.linux import systemctl  # late: only beside a closed folder

    state = systemctl.query("is-active", "edgellm.service") if systemctl.booted() else "unknown"
    if state in ("active", "activating", "reloading", "deactivating"):
        return True
    return False if state in ("inactive", "failed") else None


def _is_closed(lock: Path) -> bool:
    """Return whether the folder of a lock exists and may not be entered, or the lock may not be read."""
    try:
        lock.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(lock, os.R_OK)


class Client:
    """A connection to one running instance. Methods raise NotRunningError when nothing answers."""

    def __init__(self, instance: Folders) -> None:
        """Make a client that connects at its first request.

        Raises UnavailableError for a run folder that another user prepared in /tmp.
        """
        planted = instance.run.is_symlink() or prepared_by_another(instance.run, os.environ) is not None
        if planted or (visible(instance.run) and not is_trusted_dir(instance.run)):
            hint = "remove it as root, or name a folder of your own with --state-dir"
            raise UnavailableError(f"the run folder {instance.run} belongs to another user", hint)
        self.folders = instance
        # No TLS on a Unix socket: with `verify` httpx loads its certificates, 22 ms of a PC's processor.
        transport = httpx.HTTPTransport(uds=str(instance.control_socket), verify=False)
        self._http = httpx.Client(transport=transport, base_url="http://edgellm", timeout=TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "/status")

    def telemetry(self) -> dict[str, Any]:
        return self._ask("GET", "/telemetry")

    def logs(
        self, *, engine: bool, model: str | None = None, since: Mapping[str, int] | None = None
    ) -> tuple[list[str], dict[str, int]]:
        """Return the new lines and the value of `since` for the next call."""
        query = {"engine": "1" if engine else "0", "since": json.dumps(dict(since or {}))}
        answer = self._ask("GET", "/logs", query | ({"model": model} if model else {}))
        return answer["lines"], answer["next"]

    def stop(self, *, now: bool = False) -> None:
        self._ask("POST", "/stop", {"now": "1"} if now else {})

    def restart(self, model: str | None = None) -> tuple[list[str], list[str]]:
        """Return the ids of the models that are restarted, and of those that stay asleep."""
        answer = self._ask("POST", "/restart", {"model": model} if model else {})
        return answer["restarting"], answer.get("asleep", [])  # a daemon of the release before has no `asleep`

    def reload(self) -> dict[str, Any]:
        """Wait until the new plan serves or has failed. Raises EdgeError when it cannot be planned."""
        return self._ask("POST", "/reload", timeout_s=None)

    def load(self, model: str) -> str:
        """Wait until the model serves. Return its id. Raises EdgeError when it cannot."""
        return str(self._ask("POST", "/load", {"model": model}, timeout_s=None)["model"])

    def unload(self, model: str) -> None:
        """Put the model to sleep after its open requests. Raises EdgeError for an unknown one."""
        self._ask("POST", "/unload", {"model": model})

    def _ask(
        self, method: str, path: str, query: dict[str, str] | None = None, timeout_s: float | None = TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, params=query, timeout=timeout_s)
        except (httpx.TransportError, OSError) as error:
            raise not_running(self.folders) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise UsageError("no model has such a name", "`edgellm status` names those that are served") from error
        answer = self._document(response.content)
        if response.status_code < 400:
            return answer
        fault = answer.get("error")
        fault = fault if isinstance(fault, dict) else {}
        message = str(fault.get("message", f"the control socket answered {response.status_code}"))
        if response.status_code == 403:
            raise UnavailableError(message, "run it as that user, or with sudo")
        raise _kind(fault.get("kind"))(message, fault.get("hint"), table=fault.get("table"))

    def _document(self, text: bytes) -> dict[str, Any]:
        """Return the JSON object. Raises UnavailableError for what edgellm does not send."""
        with suppress(ValueError, RecursionError):
            answer = json.loads(text)
            if isinstance(answer, dict):
                return answer
        socket = self.folders.control_socket
        raise UnavailableError(f"what answers at {socket} is no edgellm", "end that process, then `edgellm up`")


# Find the running instance that uses something, before a command removes it. Each answer is the end of a sentence.


def serving(place: Folders, files: Iterable[Path]) -> str | None:
    """Return the instance that serves one of these files, and as which model; None where none does."""
    wanted = {os.path.realpath(file) for file in files}
    for name, status in _running(place):
        for model_id, model in status["models"].items():
            if wanted & {os.path.realpath(file) for file in model.get("files", ())}:
                return f"{name}, as {model_id}"
    return None


def running_engine(place: Folders, engine_id: str) -> str | None:
    """Return the instance whose models run on this engine, or would by its plan; None where none does."""
    for name, status in _running(place):
        if status["engine"] == engine_id:
            return name
    return None


def accepting_key(place: Folders, file: Path, key: str) -> str | None:
    """Return the instance that answered requests with this key of `file`, and how many; None where none did."""
    for name, status in _running(place):
        keys = status.get("keys", {})  # an edgellm of before the last update has none
        count = keys.get("requests", {}).get(key, 0)
        if count and os.path.realpath(keys["file"]) == os.path.realpath(file):
            return f"{name}, in {count} request{'s' * (count != 1)}"
    return None


def _running(place: Folders) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and status of the instance of these folders and of the system's service, where they run."""
    for instance in dict.fromkeys((place, system_folders())):
        if not held(instance.lock):
            continue
        with suppress(UnavailableError):  # another user's, or just gone
            client = Client(instance)
            try:
                status = client.status()
            finally:
                client.close()
            yield f"the edgellm in {instance.instance_run}", status


def not_running(instance: Folders) -> NotRunningError:
    hint = "start one: `edgellm up`, or name it with --state-dir"
    if instance != (system := system_folders()) and _is_closed(system.lock):
        hint = f"one that root started by hand in {system.run} is seen by root only (sudo); else {hint}"
    return NotRunningError(f"no edgellm is running in {instance.instance_run}", hint)


def _kind(name: str | None) -> type[EdgeError]:
    """Return the error class of this kind, whose exit code is the one of the fault."""
    branches: list[type[EdgeError]] = [EdgeError]
    for branch in branches:
        branches += branch.__subclasses__()
    return next((branch for branch in branches if branch.kind == name), EdgeError)
