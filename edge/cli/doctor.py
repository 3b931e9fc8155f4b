"""`edgellm doctor`: checks of this machine, each with a verdict and at most one next step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Engine, Json, Listen, Models, Profile, RootDir, Set, StateDir, given, print_json
from edge.errors import UsageError


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm doctor --profile orin")(doctor)


def doctor(
    profile: Profile = None,
    model: Models = None,
    listen: Listen = None,
    set: Set = None,
    engine: Engine = None,
    state_dir: StateDir = None,
    root_dir: RootDir = None,
    fix: Annotated[bool, typer.Option("--fix", help="repair edgellm's own files; other commands are printed")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="do not measure how fast the models are read")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine for serving: every finding has a verdict and, where it matters, one next step.

    Exit code 1 when something is bad. Nothing is changed; --fix only makes edgellm's folders, closes its files to other
    users and removes its dead sockets.
    """
    from edge.doctor import fix as fixing
    from edge.doctor.check import Verdict, worst
    from edge.doctor.doctor import examine
    from edge.doctor.document import document
    from edge.doctor.gather.everything import examined_folders, read_facts

    machine = root_dir or Path("/")
    if not (machine / "proc").is_dir():
        raise UsageError(f"{machine} has no proc folder", "a copied machine has proc, sys, etc, dev and var")
    flags = given(profile=profile, model=model, listen=listen, set=set, engine=engine)
    folders = examined_folders(os.environ, state_dir)
    facts = read_facts(machine, folders, os.environ, flags, measure=not quick)
    fixed = fixing.apply(facts.leftovers) if fix else ()
    if fixed:
        facts = read_facts(machine, folders, os.environ, flags, measure=False)
    checks = examine(facts)
    if as_json:
        print_json(document(checks, fixed))
    else:
        from edge.render.doctor import show

        show(checks, fixed)
    if worst(checks) is Verdict.BAD:
        raise typer.Exit(1)
