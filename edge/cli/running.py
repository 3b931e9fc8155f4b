"""Commands that talk to a running edgellm: status, wait, stop, restart, reload, logs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.cli.complete import served_models
from edge.cli.options import Json, StateDir, client_of, print_json, print_lines, print_result
from edge.config.fields import did_you_mean
from edge.errors import EdgeError, NotRunningError, TimedOutError, UnavailableError
from edge.units import format_seconds

if TYPE_CHECKING:
    from edge.cli.client import Client

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="one model (default: all)", autocompletion=served_models)
]
# Short beside any start, and one small request on a unix socket each.
POLL_S = 0.1
# Between `edgellm up &` and its lock on the run folder: the interpreter's start on a busy Jetson.
APPEARS_S = 2.0
# A line of the log appears before a reader notices the delay.
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
    client = client_of(state_dir)
    while True:
        document = client.status()
        if as_json:
            print_json(document, indent=None if watch else 2)
        else:
            if watch and os.isatty(1):
                typer.echo("\x1b[2J\x1b[H", nl=False)  # ECMA-48: erase the display, cursor home
            print_lines(status_lines(document))
        if not watch:
            return
        time.sleep(1)


def wait(
    state_dir: StateDir = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="seconds; 0 waits without a limit")] = 0,
) -> None:
    """Wait until every model is READY. Exit code 75 after the timeout, 1 when a model has failed.

    Without --timeout, exit code 69 where no edgellm runs; with one, edgellm may also start meanwhile.
    """
    from edge.cli.client import not_running

    client, began = client_of(state_dir), time.monotonic()
    seen = False
    while True:
        document = _status_or_none(client)
        if document is None and (seen or (not timeout and time.monotonic() - began >= APPEARS_S)):
            raise not_running(client.folders)
        seen = seen or document is not None
        models: dict[str, Any] = document["models"] if document else {}
        failed = [name for name, model in models.items() if model["state"] == "FAILED"]
        if failed:
            failure = models[failed[0]]["failure"]
            raise EdgeError(f"{failed[0]} has failed: {failure['kind']}", failure["hint"])
        # A sleeping model counts: its first request wakes it, and nothing else would.
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
    from edge.daemon.lock import held
    from edge.linux.sockets import listener_pid
    from edge.service import unit

    client = client_of(state_dir)
    service = client.status().get("service")
    if service:
        # systemd starts the service again at the next connection to the socket unit.
        named = unit.Unit.of(service)
        if not unit.holds(named, listener_pid(client.folders.control_socket)):
            raise UnavailableError(
                f"the process that answers does not run in {named.name}",
                "`systemctl stop edgellm.socket edgellm.service`",
            )
        unit.stop(named)
    else:
        client.stop(now=now)
    while held(client.folders.lock):  # the lock is the last thing to go: then another start finds the folder free
        time.sleep(POLL_S)


def restart(state_dir: StateDir = None, model: ModelArgument = None) -> None:
    """Restart the engine of one model, or of all that do not sleep, after open requests have finished."""
    client = client_of(state_dir)
    _must_serve(client, model)
    restarting, asleep = client.restart(model)
    lines = [f"restarting {name}" for name in restarting]
    lines += [f"{name} stays asleep: `edgellm load {name}` starts it" for name in asleep]
    if lines:
        print_lines(lines)


def reload(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Read the configuration again. A configuration that cannot be planned changes nothing.

    A changed model is started beside the old engine if both fit, else after it; if it does not start, the old one
    continues. Addresses, keys and limits of the gateway need a restart.
    """
    document = client_of(state_dir).reload()
    print_result(as_json, document, reload_lines(document))
    if document["failures"]:
        first = next(iter(document["failures"]))
        raise EdgeError(f"{first} could not be changed; the old engine continues", document["failures"][first]["hint"])


def logs(
    state_dir: StateDir = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="print new lines until Ctrl-C")] = False,
    engine: Annotated[bool, typer.Option("--engine", help="print the engine's lines instead of edgellm's")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="ID", help="lines of one model's engine", autocompletion=served_models),
    ] = None,
) -> None:
    """Print the last log lines of edgellm, or of its engine."""
    client = client_of(state_dir)
    _must_serve(client, model)
    since: dict[str, int] = {}
    while True:
        lines, since = client.logs(engine=engine or model is not None, model=model, since=since)
        if lines:
            print_lines(lines)
        if not follow:
            return
        time.sleep(FOLLOW_S)


def _must_serve(client: Client, model: str | None) -> None:
    """Raise UnavailableError for a model that the running edgellm does not serve."""
    served = list(client.status()["models"]) if model is not None else []
    if model is not None and model not in served:
        raise UnavailableError(
            f"no model {model!r} is served{did_you_mean(model, served)}", f"the models are {', '.join(served)}"
        )


def _status_or_none(client: Client) -> dict[str, Any] | None:
    from edge.daemon.lock import held

    if not held(client.folders.lock):
        return None
    try:
        return client.status()
    except NotRunningError:
        return None


# Text of `edgellm status` and `edgellm reload`.


def status_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the status document as lines: one block a model."""
    urls = ", ".join(f"{url}/v1" for url in document["urls"])
    lines = [
        f"edgellm {document['version']}: {document['status']}, up {format_seconds(document['uptime_s'])}",
        f"  {urls} · profile {document['profile']} · engine {document['engine']}",
    ]
    lines += [f"  warning: {warning}" for warning in (document.get("service") or {}).get("warnings", ())]
    heat = _heat(document.get("telemetry"))
    if heat:
        lines.append(f"  {heat}")
    for model_id, model in document["models"].items():
        lines += ["", *_model(model_id, model)]
    crashes = document.get("crashes") or []
    if crashes:
        lines += ["", "last crashes:", *(f"  {_crash(crash)}" for crash in crashes)]
    return lines


def _crash(crash: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(crash["at"] or 0).isoformat(sep=" ", timespec="seconds")
    return f"{at}  {crash['model']} in {crash['state']} on rung {crash['rung']}: {crash['kind']}"


def reload_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the result of a reload for each model."""
    outcome = {
        "kept": "unchanged",
        "added": "starting",
        "removed": "removed",
        "beside": "changed, without a pause",
        "after": "changed; requests waited meanwhile",
        "asleep": "changed; still asleep",
        "back": "could not be changed; the old engine continues",
    }
    lines = []
    for model_id, how in document["models"].items():
        lines.append(f"{model_id}: {outcome.get(how, how)}")
        failure = document["failures"].get(model_id)
        if failure:
            lines += [f"  {failure['kind']}", *(f"  | {line}" for line in failure["evidence"].splitlines())]
            lines.append(f"  hint: {failure['hint']}")
    if document["after_restart"]:
        later = ", ".join(document["after_restart"])
        lines.append(f"{later}: changed, but read only at start: stop edgellm and start it again")
    return lines or ["no model is served"]


def _model(model_id: str, model: Mapping[str, Any]) -> list[str]:
    pid = f" · pid {model['pid']}" if model.get("pid") else ""
    restarts = f" · {model['restarts']} restarts" if model.get("restarts") else ""
    lines = [f"{model_id}: {model['state']} on rung {model['rung']}{pid}{restarts}"]
    progress = model.get("progress")
    if model["state"] == "LOADING" and progress is not None:
        lines.append(f"  weights {progress:.0%}")
    for item in model["degraded"]:
        lines.append(f"  degraded: {item['subject']}: wanted {item['wanted']}, got {item['got']} ({item['because']})")
    for name, gate in model["gates"].items():
        lines.append(f"  {_gate(name, gate)}")
    failure = model.get("failure")
    if failure:
        lines.append(f"  last failure: {failure['kind']}")
        lines += [f"    | {line}" for line in failure.get("evidence", "").splitlines()]
        lines.append(f"    hint: {failure['hint']}")
    return lines


def _heat(telemetry: Mapping[str, Any] | None) -> str:
    """Return `12.3 W (VDD_IN) · 61 °C · NOMINAL`; nothing without a sensor."""
    if not telemetry or (telemetry.get("power_w") is None and telemetry.get("temp_c") is None):
        return ""
    power = [f"{telemetry['power_w']:.1f} W ({telemetry['rail']})"] if telemetry.get("power_w") is not None else []
    heat = [f"{telemetry['temp_c']:.0f} °C"] if telemetry.get("temp_c") is not None else []
    return " · ".join([*power, *heat, f"thermal {telemetry['thermal']}"])


def _gate(name: str, gate: Mapping[str, Any]) -> str:
    took = format_seconds(gate["took_s"]) if gate.get("took_s") is not None else ""
    why = gate.get("evidence") or (f"waiting for {gate['blocked_by']}" if gate.get("blocked_by") else "")
    return f"{'✓' if gate['ready'] else '·'} {name:<9} {took:>8}  {why}".rstrip()
