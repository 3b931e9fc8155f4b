"""Commands that talk to a running edgellm: status, wait, stop, restart, reload, logs."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from edge.cli.options import Json, StateDir, print_json
from edge.errors import EdgeError, NotRunningError, TimedOutError

POLL_S = 0.1
FOLLOW_S = 0.3


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm status --json")(status)
    root.command(epilog="Example: edgellm wait --timeout 120 && curl http://127.0.0.1:8080/v1/models")(wait)
    root.command(epilog="Example: edgellm stop")(stop)
    root.command(epilog="Example: edgellm restart")(restart)
    root.command(epilog="Example: edgellm reload")(reload)
    root.command(epilog="Example: edgellm logs -f --engine")(logs)


def status(
    state_dir: StateDir = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="repeat every second until Ctrl-C")] = False,
) -> None:
    """Show state, gates and failures of a running edgellm. Exit code 69 when none runs."""
    from edge.render.status import status_lines

    client = _client(state_dir)
    while True:
        document = client.status()
        if as_json:
            print_json(document, indent=None if watch else 2)
        else:
            if watch and os.isatty(1):
                typer.echo("\x1b[2J\x1b[H", nl=False)
            typer.echo("\n".join(status_lines(document)))
        if not watch:
            return
        time.sleep(1)


def wait(
    state_dir: StateDir = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="seconds; 0 waits without a limit")] = 0,
) -> None:
    """Wait until every model is READY. Exit code 75 after the timeout, 1 when a model has failed."""
    client, began = _client(state_dir), time.monotonic()
    while True:
        document = _status_or_none(client)
        models: dict[str, Any] = document["models"] if document else {}
        failed = [name for name, model in models.items() if model["state"] == "FAILED"]
        if failed:
            failure = models[failed[0]]["failure"]
            raise EdgeError(f"{failed[0]} has failed: {failure['kind']}", failure["hint"])
        if models and all(model["state"] in ("READY", "SLEEPING") for model in models.values()):
            return
        if timeout and time.monotonic() - began >= timeout:
            raise TimedOutError(f"not ready after {timeout:g} s", "`edgellm status` shows the gate that is closed")
        time.sleep(POLL_S)


def stop(
    state_dir: StateDir = None,
    now: Annotated[bool, typer.Option("--now", help="do not wait for open requests")] = False,
) -> None:
    """Stop a running edgellm after its open requests have finished.

    A service is stopped together with its socket, which would start it again.
    """
    from edge.instance import held
    from edge.service import unit

    client = _client(state_dir)
    service = client.status().get("service")
    if service:
        unit.stop(unit.Unit.of(service))
    else:
        client.stop(now=now)
    while held(client.folders.lock):
        time.sleep(POLL_S)


def restart(state_dir: StateDir = None, model: Annotated[str | None, typer.Argument(help="one model")] = None) -> None:
    """Restart the engine of one model, or of all, after open requests have finished."""
    for name in _client(state_dir).restart(model):
        typer.echo(f"restarting {name}")


def reload(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Read the configuration again. A configuration that cannot be planned changes nothing.

    A changed model is started beside the old engine if both fit, else after it; if it does not start, the old one
    continues. Addresses, keys and limits of the gateway need a restart.
    """
    from edge.render.status import reload_lines

    document = _client(state_dir).reload()
    if as_json:
        print_json(document)
    else:
        typer.echo("\n".join(reload_lines(document)))
    if document["failures"]:
        first = next(iter(document["failures"]))
        raise EdgeError(f"{first} could not be changed; the old engine continues", document["failures"][first]["hint"])


def logs(
    state_dir: StateDir = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="print new lines until Ctrl-C")] = False,
    engine: Annotated[bool, typer.Option("--engine", help="lines of the engine")] = False,
    model: Annotated[str | None, typer.Option("--model", "-m", help="lines of one model's engine")] = None,
) -> None:
    """Print the last log lines of edgellm, or of its engine."""
    client = _client(state_dir)
    since: dict[str, int] = {}
    while True:
        lines, since = client.logs(engine=engine or model is not None, model=model, since=since)
        for line in lines:
            typer.echo(line)
        if not follow:
            return
        time.sleep(FOLLOW_S)


def _client(state_dir: Any) -> Any:
    from edge.client import Client, find

    return Client(find(os.environ, state_dir))


def _status_or_none(client: Any) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = client.status()
        return document
    except NotRunningError:
        return None
