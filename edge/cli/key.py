"""`edgellm key`: add, list and revoke API keys."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from edge.cli.complete import completing
from edge.cli.options import Json, StateDir, confirm_in_use, print_json
from edge.errors import UnavailableError
from edge.units import printable


def known_keys(incomplete: str) -> list[str]:
    """Return the names of the keys in the configured key file that complete a word."""
    from edge.gateway import keys

    return completing(lambda: [key.name for key in keys.read(key_file(None, None))], incomplete)


File = Annotated[
    Path | None, typer.Option("--file", metavar="PATH", help="key file (default: keys.toml beside edgellm.toml)")
]


def register(root: typer.Typer) -> None:
    key = typer.Typer(help="Manage API keys. They take effect with the next request.", no_args_is_help=True)
    key.command("add", epilog="Example: edgellm key add laptop")(add)
    key.command("list", epilog="Example: edgellm key list --json")(list_keys)
    key.command("revoke", epilog="Example: edgellm key revoke laptop")(revoke)
    root.add_typer(key, name="key")


def add(
    name: Annotated[str, typer.Argument(help="name of the client, as in the access log")],
    admin: Annotated[bool, typer.Option("--admin", help="allow slots, props, adapters and error evidence too")] = False,
    from_stdin: Annotated[bool, typer.Option("--stdin", help="take the key from standard input")] = False,
    file: File = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it once: only its hash is kept."""
    from edge.gateway import keys

    path = key_file(file, state_dir)
    shown = printable(str(path))
    # Never an option: argv is readable to every user in /proc.
    secret = sys.stdin.readline().strip() if from_stdin else keys.new_secret()
    created = datetime.now(timezone.utc).date().isoformat()
    with keys.locked(path):
        known = keys.read(path)
        keys.write(path, [*known, keys.make(name, secret, admin=admin, created=created, others=known)])
    if as_json:
        print_json({"schema": 1, "name": name, "admin": admin, "key": None if from_stdin else secret}, indent=None)
    elif from_stdin:
        typer.echo(f"added {name} to {shown}")
    else:
        # The key alone on stdout: `key add NAME >file` and pipes get nothing else.
        typer.echo(secret)
        typer.echo(f"added {name} to {shown}; this is the only time the key is shown", err=True)


def list_keys(file: File = None, state_dir: StateDir = None, as_json: Json = False) -> None:
    """List the names of the keys."""
    from edge.gateway import keys

    known = keys.read(key_file(file, state_dir))
    if as_json:
        entries = [{"name": key.name, "admin": key.admin, "created": key.created} for key in known]
        print_json({"schema": 1, "keys": entries}, indent=None)
        return
    if not known:
        typer.echo("no keys: only clients on this machine are served, without a key", err=True)
    # The file may be another user's: that of the service belongs to the service.
    rows = [(printable(key.name), printable(key.created), "admin" if key.admin else "") for key in known]
    width = max((len(row[0]) for row in rows), default=0)
    for name, created, kind in rows:
        typer.echo(f"{name:<{width}}  {created}  {kind}".rstrip())


def revoke(
    name: Annotated[str, typer.Argument(help="name of the key", autocompletion=known_keys)],
    force: Annotated[bool, typer.Option("--force", help="also a key that clients of a running edgellm use")] = False,
    file: File = None,
    state_dir: StateDir = None,
) -> None:
    """Revoke a key; a running server refuses it from the next request on."""
    from edge.cli.client import accepting_key, find
    from edge.gateway import keys

    path = key_file(file, state_dir)
    user = None if force else accepting_key(find(os.environ, state_dir, running=False), path, name)
    confirm_in_use(f"key {name} was accepted by", user, "revoke")
    with keys.locked(path):
        known = keys.read(path)
        kept = [key for key in known if key.name != name]
        if len(kept) == len(known):
            raise UnavailableError(f"there is no key named {name!r} in {path}", "`edgellm key list` shows the names")
        keys.write(path, kept)
    typer.echo(f"revoked {name}")


def key_file(file: Path | None, state_dir: Path | None) -> Path:
    """Return the key file: --file, keys_file of the configuration, or keys.toml in the config folder."""
    if file is not None:
        return file
    from edge.cli.client import find
    from edge.config import load

    folders = find(os.environ, state_dir, running=False)
    configured = load(folders, {}, os.environ).gateway.keys_file
    return Path(configured) if configured else folders.config / "keys.toml"
