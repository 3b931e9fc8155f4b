"""The options of `up` in one table: argparse parses by it in the launcher, typer shows it in help and completion."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from edge.errors import UsageError

DESCRIPTION = "Plan, launch, warm and serve on one address until Ctrl-C or `edgellm stop`."
EPILOG = """examples:
  edgellm up                               serve what is configured, or the model in the store
  edgellm up -p orin -m Qwen3.5-4B:Q5_K_M  a profile and a model
  edgellm up -p cpu --set n_ctx=8192       one value of the plan
  edgellm up --lan                         for other machines too
  edgellm up -- --keep 64                  further options of the engine, as in llama-server --help

more: docs/jetson.md and docs/configuration.md of the source
"""


class CliOption(NamedTuple):
    """One option. `metavar` None is a switch; `many` may be given several times."""

    name: str
    help: str
    short: str | None = None
    metavar: str | None = None
    many: bool = False

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def names(self) -> list[str]:
        return [self.name] if self.short is None else [self.short, self.name]


UP = (
    CliOption("--profile", "kind of board: auto, orin, thor, cuda, cpu, … or a file", short="-p", metavar="NAME"),
    CliOption(
        "--model", "model to serve: NAME[:QUANT], a path, or a source", short="-m", metavar="[ID=]REF", many=True
    ),
    CliOption("--listen", "address of the API (default 127.0.0.1:8080)", metavar="HOST:PORT", many=True),
    CliOption("--set", "set one value, e.g. --set n_ctx=8192", metavar="KEY=VALUE", many=True),
    CliOption("--engine", "engine id or a llama-server binary", metavar="ID|PATH"),
    CliOption("--state-dir", "keep everything under DIR", metavar="DIR"),
    CliOption("--yes", "build and fetch what the plan needs without asking", short="-y"),
    CliOption("--insecure", "serve other machines without a key"),
    CliOption("--lan", "serve the network on all addresses, with a key; makes one if there is none"),
    CliOption("--json", "print events as JSON lines"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "see `edgellm up --help`")

    def print_help(self, file: Any = None) -> None:
        # argparse's own passes over what could not be written, and ends with 0.
        print(self.format_help(), end="", file=file, flush=True)


def parse(argv: list[str]) -> dict[str, Any]:
    """Return the values by `CliOption.dest`, and as `args` what stands behind `--`: options of the engine.

    Raises UsageError; --help prints and exits.
    """
    # Split by hand: argparse would take an engine's option such as --keep for an unknown one of `up`.
    end = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(
        prog="edgellm up",
        usage="edgellm up [OPTIONS] [-- ENGINE OPTIONS]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An abbreviation in a script would become ambiguous with the next option that begins alike.
        allow_abbrev=False,
    )
    for option in UP:
        if option.metavar is None:
            parser.add_argument(*option.names, action="store_true", help=option.help)
        elif option.many:
            parser.add_argument(*option.names, action="append", default=[], metavar=option.metavar, help=option.help)
        else:
            parser.add_argument(*option.names, metavar=option.metavar, help=option.help)
    return {**vars(parser.parse_args(argv[:end])), "args": argv[end + 1 :]}


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the options that were on the command line."""
    return {name: value for name, value in options.items() if value not in (None, False, [])}
