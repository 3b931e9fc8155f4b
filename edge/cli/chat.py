"""`edgellm chat`: one question to a running server."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from edge.cli.options import Json, StateDir

KEY_VARIABLE = "EDGELLM_API_KEY"


def register(root: typer.Typer) -> None:
    root.command(epilog='Example: edgellm chat "What is a capacitor?"')(chat)


def chat(
    text: Annotated[list[str] | None, typer.Argument(help="the question; - reads standard input")] = None,
    model: Annotated[str, typer.Option("--model", "-m", metavar="ID", help="one of several models")] = "",
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="system prompt")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="longest answer")] = 1024,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="address of another server")] = "",
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Ask a running server and stream its answer. EDGELLM_API_KEY holds the key where the server needs one."""
    from edge.chat import Question, ask, server_url

    words = text or ["-"]
    prompt = sys.stdin.read() if words == ["-"] else " ".join(words)
    question = Question(prompt.strip(), model, system, max_tokens)
    terminal = sys.stdout.isatty() and not as_json

    def waiting(state: str) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r\x1b[K{state}", nl=False, err=True)

    def piece(part: str) -> None:
        if not as_json:
            typer.echo(part, nl=False)
            sys.stdout.flush()

    answer = ask(url or server_url(os.environ, state_dir), question, os.environ.get(KEY_VARIABLE), piece, waiting)
    if as_json:
        typer.echo(json.dumps(answer.document(), ensure_ascii=False))
        return
    typer.echo("")
    if terminal and answer.summary:
        typer.echo(f"\x1b[2m{answer.summary}\x1b[0m", err=True)
