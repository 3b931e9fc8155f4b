"""`edgellm service`: install, compare and remove the systemd units."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from edge.cli.options import DryRun, Json, Listen, Models, Profile, Yes, print_json
from edge.cli.output import console, error_console
from edge.errors import EdgeError, UsageError
from edge.linux.tree import parse_count
from edge.service.contents import InstallStep
from edge.service.drop_ins import Difference

RunAs = Annotated[str, typer.Option("--run-as", metavar="USER", help="an existing user")]
ModelDirs = Annotated[
    list[Path] | None, typer.Option("--model-dir", metavar="DIR", help="serve models from here, in place")
]
Offline = Annotated[
    Path | None, typer.Option("--offline", metavar="DIR", help="take wheels, engine and models from a folder")
]
PowerMode = Annotated[
    str, typer.Option("--power-mode", metavar="NAME", help="nvpmodel mode to set at every boot, as root")
]
RpcListen = Annotated[
    str | None,
    typer.Option("--rpc-listen", metavar="HOST:PORT", help="also lend memory to another board; '' removes it"),
]
RpcInterface = Annotated[
    str, typer.Option("--rpc-interface", metavar="NAME", help="the private interface of --rpc-listen")
]

TakenOver = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="take over engine and models of this instance")
]
RpcOnly = Annotated[bool, typer.Option("--rpc-only", help="only lend memory (--rpc-listen): no model, no API")]


def register(root: typer.Typer) -> None:
    noun = typer.Typer(no_args_is_help=True, help="Install, compare and remove systemd units that serve from power-on.")
    noun.command(epilog="Example: sudo edgellm service install -p orin -m chat=Qwen3.5-4B:Q5_K_M")(install)
    noun.command(epilog="Example: edgellm service diff")(diff)
    noun.command(epilog="Example: sudo edgellm service uninstall --dry-run")(uninstall)
    root.add_typer(noun, name="service")


def install(
    profile: Profile = None,
    model: Models = None,
    listen: Listen = None,
    run_as: RunAs = "edgellm",
    model_dir: ModelDirs = None,
    offline: Offline = None,
    power_mode: PowerMode = "",
    rpc_listen: RpcListen = None,
    rpc_interface: RpcInterface = "",
    rpc_only: RpcOnly = False,
    state_dir: TakenOver = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Serve from power-on: write systemd units, and link or copy engine and models into /var/lib/edgellm.

    The launch of `edgellm up` is planned first, and the plan names engine and models. Running it again changes only
    what differs. Drop-ins of the administrator stay.
    """
    from edge.service.installer import Installer
    from edge.service.request import InstallRequest
    from edge.service.takeover import source_folders

    request = InstallRequest(
        source=source_folders(os.environ, state_dir),
        profile=profile,
        models=tuple(model or ()),
        listen=tuple(listen or ()),
        run_as=run_as,
        model_dirs=tuple(Path(os.path.normpath(folder.absolute())) for folder in model_dir or ()),  # no `..`
        offline=offline.absolute() if offline else None,
        power_mode=power_mode,
        rpc_listen=rpc_listen,
        rpc_interface=rpc_interface,
        rpc_only=rpc_only,
        caller_uid=_caller_uid(),
    )
    if not dry_run:
        _become_root("install")
    os.umask(0o022)  # a hardened root has 077: the service's user could not read what is installed
    _carry_out(Installer(request).steps(), dry_run=dry_run, yes=yes, as_json=as_json)
    if not dry_run and not as_json and not rpc_only:
        sudo = "sudo " if _caller_uid() else ""  # the control socket is for root and the group edgellm
        typer.echo(
            f"`{sudo}edgellm wait` returns when the model is ready; `systemctl status edgellm` shows the progress"
        )


def diff(as_json: Json = False) -> None:
    """Compare the installed units with those that `install` would write now. Exit code 1 when they differ."""
    from msgspec.structs import replace

    from edge.board.device_nodes import GPU_GROUPS
    from edge.paths import system_folders
    from edge.service.drop_ins import diff as compare
    from edge.service.request import RECORD, existing_groups
    from edge.service.units import read_record

    recorded = read_record(system_folders().data / RECORD)
    if recorded is None:
        raise EdgeError("no edgellm service is installed on this machine", "sudo edgellm service install")
    found = compare(replace(recorded, groups=existing_groups(GPU_GROUPS), jtop=bool(existing_groups(("jtop",)))))
    show_differences(found, as_json)
    # A drop-in of the administrator is a difference that is meant: a check in CI passes with it.
    if any(one.kind != "yours" for one in found):
        raise typer.Exit(1)


def uninstall(
    purge: Annotated[bool, typer.Option("--purge", help="delete models, engines, configuration and user")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Stop the service and remove its units. Models, engines and configuration stay."""
    from edge.service.installer import kept_folders, removal_steps

    if not dry_run:
        _become_root("uninstall")
    _carry_out(removal_steps(purge=purge), dry_run=dry_run, yes=yes, as_json=as_json)
    left = kept_folders() if not dry_run else []
    if left and not as_json:
        typer.echo(f"left in place: {', '.join(left)}" + ("" if purge else " (--purge deletes them)"))


def _carry_out(steps: list[InstallStep], *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Show the steps, ask on a terminal, and apply them. A step with a note needs a yes."""
    from edge.service.contents import apply_all

    show_steps(steps, as_json)
    if dry_run or all(step.done for step in steps):
        return
    # A step with a note changes something that the operator owns, such as creating a program in /opt.
    offer = next((step for step in steps if step.note and not step.done), None)
    asks = sys.stdin.isatty() and not as_json
    if not yes and asks and not typer.confirm("continue?", default=True):
        raise UsageError("nothing was changed")
    if not yes and not asks and offer is not None:
        raise UsageError(f"{offer.note}, so a service cannot use it", f"--yes lets the installer {offer.what}")
    apply_all(steps, show_doing)


def _caller_uid() -> int:
    """Return the user that called sudo, else the running one."""
    caller = parse_count(os.environ.get("SUDO_UID", ""))
    return os.geteuid() if caller is None else caller


def _become_root(verb: str) -> None:
    """Run this command again under sudo, by its full path: sudo's PATH has no user's folders.

    Raises UsageError where there is no sudo. With SUDO_UID set sudo has been tried, so that it cannot loop.
    """
    if os.geteuid() == 0:
        return
    command = [sys.executable, "-I", "-m", "edge", *sys.argv[1:]]
    sudo = shutil.which("sudo")
    if sudo is None or "SUDO_UID" in os.environ:
        shown = shlex.join(command)
        raise UsageError(f"service {verb} writes to /etc and /var/lib: it has to run as root", f"as root: {shown}")
    typer.echo(f"service {verb} writes to /etc and /var/lib: running it with sudo", err=True)
    os.execv(sudo, [sudo, "--", *command])


# Text of `edgellm service`.

# Kinds of edge.service.drop_ins.Difference, as the rest of a sentence that begins with the path.
KINDS = {
    "missing": "is missing",
    "changed": "was changed",
    "stale": "is no longer part of the service",
    "yours": "is the administrator's and stays",
}


def show_steps(steps: Sequence[InstallStep], as_json: bool) -> None:
    if as_json:
        rows = [{"step": step.what, "done": step.done, "note": step.note} for step in steps]
        print_json({"schema": 1, "steps": rows})
        return
    out = console()
    for step in steps:
        line = Text("✓ " if step.done else "+ ", style="dim" if step.done else "bold green")
        line.append(step.what, style="" if step.done else "not bold default")
        line.append(f"  ({step.note})" if step.note else "", style="yellow")
        out.print(line, soft_wrap=True)


def show_doing(step: InstallStep) -> None:
    with suppress(BrokenPipeError):  # `2>&1 | head` must leave no service half installed
        error_console().print(Text(f"  {step.what} ...", style="dim"), soft_wrap=True)


def show_differences(differences: Sequence[Difference], as_json: bool) -> None:
    if as_json:
        rows = [
            {"path": str(one.path), "kind": one.kind, "diff": list(one.lines), "warnings": list(one.warnings)}
            for one in differences
        ]
        print_json({"schema": 1, "differences": rows})
        return
    out = console()
    for one in differences:
        head = Text(f"{one.path} {KINDS[one.kind]}", style="bold" if one.kind != "yours" else "")
        out.print(head, soft_wrap=True)
        for line in one.lines:
            style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
            out.print(Text(f"  {line}", style=style), soft_wrap=True)
        for warning in one.warnings:
            out.print(Text(f"  warning: {warning}", style="yellow"), soft_wrap=True)
