"""Talks to a running edgellm over its control socket, for the short-lived commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from edge.errors import EdgeError, NotRunningError, UnavailableError
from edge.folders import Folders, folders, system_folders, user_folders
from edge.instance import held

TIMEOUT_S = 10.0


def find(env: Mapping[str, str], state_dir: Path | None) -> Folders:
    """--state-dir > EDGELLM_STATE_DIR > a running system service > the user's."""
    if state_dir is not None or env.get("EDGELLM_STATE_DIR"):
        return folders(env, state_dir)
    system = system_folders()
    if held(system.lock):
        return system
    return user_folders(env) if held(user_folders(env).lock) else folders(env)


class Client:
    """One running instance. Raises NotRunningError when nothing answers."""

    def __init__(self, places: Folders) -> None:
        self.folders = places
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(places.control_socket)), base_url="http://edgellm", timeout=TIMEOUT_S
        )

    def close(self) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "/status")

    def telemetry(self) -> dict[str, Any]:
        return self._ask("GET", "/telemetry")

    def logs(
        self, *, engine: bool, model: str | None = None, since: Mapping[str, int] | None = None
    ) -> tuple[list[str], dict[str, int]]:
        """Lines that came since, and what to pass as `since` the next time."""
        query = {"engine": "1" if engine else "0", "since": json.dumps(dict(since or {}))}
        answer = self._ask("GET", "/logs", query | ({"model": model} if model else {}))
        return answer["lines"], answer["next"]

    def stop(self, *, now: bool = False) -> None:
        self._ask("POST", "/stop", {"now": "1"} if now else {})

    def restart(self, model: str | None = None) -> list[str]:
        restarted: list[str] = self._ask("POST", "/restart", {"model": model} if model else {})["restarting"]
        return restarted

    def reload(self) -> dict[str, Any]:
        """Waits until the new plan serves or was given up. Raises EdgeError when it cannot even be planned."""
        return self._ask("POST", "/reload", timeout_s=None)

    def _ask(
        self, method: str, path: str, query: dict[str, str] | None = None, timeout_s: float | None = TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, params=query, timeout=timeout_s)
        except (httpx.TransportError, OSError) as error:
            raise not_running(self.folders) from error
        answer: dict[str, Any] = response.json()
        if response.status_code == 403:
            raise UnavailableError(answer["error"]["message"], "run it as that user, or with sudo")
        if response.status_code >= 400:
            told = answer.get("error", {})
            message = told.get("message", f"answered {response.status_code}")
            raise _kind(told.get("kind"))(message, told.get("hint"), table=told.get("table"))
        return answer


def serving_engine(places: Folders) -> str | None:
    """The id of the engine that the running edgellm of these folders uses; None when none runs."""
    if not held(places.lock):
        return None
    client = Client(places)
    try:
        engine: str | None = client.status()["engine"]
        return engine
    except NotRunningError:
        return None
    finally:
        client.close()


def not_running(places: Folders) -> NotRunningError:
    return NotRunningError(
        f"no edgellm is running in {places.instance_run}", "start one: `edgellm up`, or name it with --state-dir"
    )


def _kind(name: str | None) -> type[EdgeError]:
    """The branch of the error tree with this kind, so that the exit code is the one of the fault."""
    todo: list[type[EdgeError]] = [EdgeError]
    while todo:
        branch = todo.pop()
        if branch.kind == name:
            return branch
        todo += branch.__subclasses__()
    return EdgeError
