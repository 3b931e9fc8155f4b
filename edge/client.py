"""Talks to a running edgellm over its control socket, for the short-lived commands."""

from __future__ import annotations

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

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "/status")

    def telemetry(self) -> dict[str, Any]:
        return self._ask("GET", "/telemetry")

    def logs(self, model: str | None = None) -> list[str]:
        lines: list[str] = self._ask("GET", "/logs", {"model": model} if model else {})["lines"]
        return lines

    def stop(self, *, now: bool = False) -> None:
        self._ask("POST", "/stop", {"now": "1"} if now else {})

    def restart(self, model: str | None = None) -> list[str]:
        restarted: list[str] = self._ask("POST", "/restart", {"model": model} if model else {})["restarting"]
        return restarted

    def reload(self) -> dict[str, Any]:
        return self._ask("POST", "/reload")

    def _ask(self, method: str, path: str, query: dict[str, str] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, params=query)
        except (httpx.TransportError, OSError) as error:
            raise not_running(self.folders) from error
        answer: dict[str, Any] = response.json()
        if response.status_code == 403:
            raise UnavailableError(answer["error"]["message"], "run it as that user, or with sudo")
        if response.status_code >= 400:
            raise EdgeError(answer.get("error", {}).get("message", f"answered {response.status_code}"))
        return answer


def not_running(places: Folders) -> NotRunningError:
    return NotRunningError(
        f"no edgellm is running in {places.instance_run}", "start one: `edgellm up`, or name it with --state-dir"
    )
