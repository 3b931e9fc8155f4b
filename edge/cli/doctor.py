"""`edgellm doctor`: what is right, what is wrong, and one next step each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Json, StateDir


def register(root: typer.Typer) -> None:
    @root.command("doctor")
    def doctor(
        profile: Annotated[str | None, typer.Option("--profile", "-p", help="profile to check against")] = None,
        model: Annotated[
            list[str] | None, typer.Option("--model", "-m", metavar="[ID=]REF", help="model to check for")
        ] = None,
        listen: Annotated[list[str] | None, typer.Option(metavar="HOST:PORT", help="address of the API")] = None,
        settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="as in `up`")] = None,
        engine: Annotated[str | None, typer.Option(metavar="ID|PATH", help="engine to check")] = None,
        state_dir: StateDir = None,
        root_dir: Annotated[Path | None, typer.Option("--root", metavar="DIR", help="a copied machine")] = None,
        fix: Annotated[bool, typer.Option("--fix", help="put our own files right; the rest is printed")] = False,
        quick: Annotated[bool, typer.Option("--quick", help="do not measure the model folder")] = False,
        as_json: Json = False,
    ) -> None:
        """Examines this machine for serving: every finding has a verdict and, where it matters, one next step.

        Exit code 1 when something is bad. Nothing is changed; --fix only makes our folders, closes our files and
        removes our dead sockets.

        Example: edgellm doctor --profile orin
        """
        flags: dict[str, object] = {
            "profile": profile,
            "model": model,
            "listen": listen,
            "set": settings,
            "engine": engine,
        }
        given = {key: value for key, value in flags.items() if value}
        _examine(root_dir or Path("/"), state_dir, given, fix, not quick, as_json)


def _examine(
    root_dir: Path, state_dir: Path | None, flags: dict[str, object], fix: bool, measure: bool, as_json: bool
) -> None:
    import json
    import os

    from edge.doctor import fix as fixing
    from edge.doctor.check import Verdict, worst
    from edge.doctor.doctor import examine
    from edge.doctor.document import document
    from edge.doctor.gather.everything import examined_folders, read_facts
    from edge.errors import UsageError

    if not (root_dir / "proc").is_dir():
        raise UsageError(
            f"{root_dir} is no copy of a machine: it has no proc folder",
            "a copy holds its proc, sys, etc, dev and var folders",
        )
    places = examined_folders(os.environ, state_dir)
    facts = read_facts(root_dir, places, os.environ, flags, measure=measure)
    fixed: tuple[str, ...] = ()
    if fix:
        fixed = fixing.apply(facts.leftovers)
        facts = read_facts(root_dir, places, os.environ, flags, measure=False) if fixed else facts
    checks = examine(facts)
    if as_json:
        print(json.dumps(document(checks, fixed), indent=2))
    else:
        from edge.render.doctor import show

        show(checks, fixed)
    if worst(checks) is Verdict.BAD:
        raise typer.Exit(1)
