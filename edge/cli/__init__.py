"""The command `edgellm`. `up` goes to the launcher before typer is imported: the engine is spawned first."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. The only place that catches EdgeError."""
    arguments = sys.argv[1:] if argv is None else argv
    from edge.errors import EdgeError

    try:
        if arguments[:1] == ["up"]:
            from edge.launch import up

            return up(arguments[1:])
        from edge.cli.app import run

        return run(arguments)
    except EdgeError as error:
        report(error)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def report(error: Exception) -> None:
    """Print an error on stderr: one sentence, its table, one next step."""
    colour = sys.stderr.isatty()
    head = "\x1b[31merror:\x1b[0m" if colour else "error:"
    print(f"{head} {error}", file=sys.stderr)
    table = getattr(error, "table", None)
    if table:
        print(table, file=sys.stderr)
    hint = getattr(error, "hint", None)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
