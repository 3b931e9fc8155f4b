"""`edgellm service`: install, compare and remove the systemd units."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.cli.options import DryRun, Json, Listen, Models, Profile, Yes
from edge.errors import EdgeError, UsageError

if TYPE_CHECKING:
    from edge.service.step import Step


def register(root: typer.Typer) -> None:
    noun = typer.Typer(no_args_is_help=True, help="Autostart: serve from power-on, with systemd.")
    noun.command(epilog="Example: sudo edgellm service install -p orin -m chat=Qwen3.5-4B:Q5_K_M")(install)
    noun.command(epilog="Example: edgellm service diff")(diff)
    noun.command(epilog="Example: sudo edgellm service uninstall --dry-run")(uninstall)
    root.add_typer(noun, name="service")


def install(
    profile: Profile = None,
    model: Models = None,
    listen: Listen = None,
    run_as: Annotated[str, typer.Option("--run-as", metavar="USER", help="an existing user")] = "edgellm",
    model_dir: Annotated[
        list[Path] | None, typer.Option("--model-dir", metavar="DIR", help="serve models from here, in place")
    ] = None,
    offline: Annotated[
        Path | None, typer.Option("--offline", metavar="DIR", help="take wheels, engine and models from a folder")
    ] = None,
    power_mode: Annotated[
        str, typer.Option("--power-mode", metavar="NAME", help="nvpmodel mode to set at every boot, as root")
    ] = "",
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", help="take over engine and models of this instance")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Serve from power-on: write systemd units, and link or copy engine and models into /var/lib/edgellm.

    The launch of `edgellm up` is planned first, and the plan names engine and models. Running it again changes only
    what differs. Drop-ins of the administrator stay.
    """
    import os

    from edge.service.installer import Installer
    from edge.service.request import Request
    from edge.service.takeover import source_folders

    caller = os.environ.get("SUDO_UID", "0")
    request = Request(
        source=source_folders(os.environ, state_dir),
        profile=profile,
        models=tuple(model or ()),
        listen=tuple(listen or ()),
        run_as=run_as,
        model_dirs=tuple(folder.absolute() for folder in model_dir or ()),
        offline=offline.absolute() if offline else None,
        power_mode=power_mode,
        caller_uid=int(caller) if caller.isdigit() else 0,
    )
    if not dry_run:
        _must_be_root("install")
    os.umask(0o022)
    _carry_out(Installer(request).steps(), dry_run=dry_run, yes=yes, as_json=as_json)
    if not dry_run and not as_json:
        typer.echo("`edgellm wait` returns when the model is ready; `systemctl status edgellm` shows the progress")


def diff(as_json: Json = False) -> None:
    """Compare the installed units with those that `install` would write now. Exit code 1 when they differ."""
    from dataclasses import replace

    from edge.folders import system_folders
    from edge.render import service as show
    from edge.service.differ import diff as compare
    from edge.service.request import GPU_GROUPS, RECORD, existing_groups
    from edge.service.wish import read_record

    recorded = read_record(system_folders().data / RECORD)
    if recorded is None:
        raise EdgeError("no edgellm service is installed on this machine", "sudo edgellm service install")
    found = compare(replace(recorded, groups=existing_groups(GPU_GROUPS), jtop=bool(existing_groups(("jtop",)))))
    (show.show_differences_json if as_json else show.show_differences)(found)
    if any(one.kind != "yours" for one in found):
        raise typer.Exit(1)


def uninstall(
    purge: Annotated[bool, typer.Option("--purge", help="delete models, engines, configuration and user")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Stop the service and remove its units. Models, engines and configuration stay."""
    from edge.service import remover

    if not dry_run:
        _must_be_root("uninstall")
    _carry_out(remover.steps(purge=purge), dry_run=dry_run, yes=yes, as_json=as_json)
    left = remover.kept() if not dry_run else []
    if left and not as_json:
        typer.echo(f"left in place: {', '.join(left)}" + ("" if purge else " (--purge deletes them)"))


def _carry_out(steps: list[Step], *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Show the steps, ask on a terminal, and apply them. A step with a note needs a yes."""
    import sys

    from edge.render import service as show
    from edge.service.step import apply_all

    (show.show_steps_json if as_json else show.show_steps)(steps)
    if dry_run or all(step.done for step in steps):
        return
    offer = next((step for step in steps if step.note and not step.done), None)
    asks = sys.stdin.isatty() and not as_json
    if not yes and asks and not typer.confirm("continue?", default=True):
        raise UsageError("nothing was changed")
    if not yes and not asks and offer is not None:
        raise UsageError(f"{offer.note}, so a service cannot use it", f"--yes lets the installer {offer.what}")
    apply_all(steps, show.show_doing)


def _must_be_root(verb: str) -> None:
    import os
    import sys

    if os.geteuid() != 0:
        command = f"sudo {sys.argv[0]} service {verb}"
        raise UsageError(f"service {verb} writes to /etc and /var/lib: it has to run as root", f"`{command} …`")
