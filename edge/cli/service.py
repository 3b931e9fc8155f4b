"""`edgellm service`: install, compare and remove the systemd units."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.errors import EdgeError, UsageError

if TYPE_CHECKING:
    from edge.service.step import Step

Json = Annotated[bool, typer.Option("--json", help="print a JSON document")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would be done, and stop")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


def register(root: typer.Typer) -> None:
    noun = typer.Typer(no_args_is_help=True, help="Autostart: the endpoint answers after power-on.")
    noun.command(epilog="Example: sudo edgellm service install -p orin -m chat=Qwen3.5-4B:Q5_K_M")(install)
    noun.command(epilog="Example: edgellm service diff")(diff)
    noun.command(epilog="Example: sudo edgellm service uninstall --dry-run")(uninstall)
    root.add_typer(noun, name="service")


def install(
    profile: Annotated[str | None, typer.Option("--profile", "-p", metavar="NAME", help="kind of board")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", metavar="[ID=]REF", help="what to serve")] = None,
    listen: Annotated[list[str] | None, typer.Option("--listen", metavar="HOST:PORT", help="public address")] = None,
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
        Path | None, typer.Option("--state-dir", metavar="DIR", help="take engine and models of this instance over")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Serve from power-on: write systemd units, and bring engine and models where the service can read them.

    What `edgellm up` would launch is planned first; what the plan names is linked or copied into /var/lib/edgellm.
    Running it again changes only what differs. Drop-ins of your own stay.
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
    _carry_out(Installer(request).steps(), dry_run=dry_run, yes=yes, json=json)
    if not dry_run and not json:
        typer.echo("`edgellm wait` returns when the model is warm; `systemctl status edgellm` shows how far it is")


def diff(json: Json = False) -> None:
    """Compare the installed units with what `install` would write now. Exit code 1 when they differ."""
    from dataclasses import replace

    from edge.folders import system_folders
    from edge.render import service as show
    from edge.service.differ import diff as compare
    from edge.service.request import GPU_GROUPS, RECORD, existing_groups
    from edge.service.wish import read_record

    recorded = read_record(system_folders().data / RECORD)
    if recorded is None:
        raise EdgeError("edgellm is not installed as a service here", "sudo edgellm service install")
    found = compare(replace(recorded, groups=existing_groups(GPU_GROUPS), jtop=bool(existing_groups(("jtop",)))))
    (show.show_differences_json if json else show.show_differences)(found)
    if any(one.kind != "yours" for one in found):
        raise typer.Exit(1)


def uninstall(
    purge: Annotated[bool, typer.Option("--purge", help="models, engines, configuration and the user go too")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Stop the service and remove its units. Models, engines and configuration stay."""
    from edge.service import remover

    if not dry_run:
        _must_be_root("uninstall")
    _carry_out(remover.steps(purge=purge), dry_run=dry_run, yes=yes, json=json)
    left = remover.kept() if not dry_run else []
    if left and not json:
        typer.echo(f"left as they are: {', '.join(left)}" + ("" if purge else " (--purge deletes them)"))


def _carry_out(steps: list[Step], *, dry_run: bool, yes: bool, json: bool) -> None:
    """Shows the steps, asks on a terminal, does them. What has a note is an offer: it needs a yes."""
    import sys

    from edge.render import service as show
    from edge.service.step import apply_all

    (show.show_steps_json if json else show.show_steps)(steps)
    if dry_run or all(step.done for step in steps):
        return
    offer = next((step for step in steps if step.note and not step.done), None)
    asks = sys.stdin.isatty() and not json
    if not yes and asks and not typer.confirm("go on?", default=True):
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
