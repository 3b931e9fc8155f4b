"""Help and error messages of `up`, by argparse. Imported only when there is something to explain."""

from __future__ import annotations

import argparse
from typing import NoReturn

from edge.errors import UsageError
from edge.options import UP

EPILOG = """examples:
  edgellm up                               serve what is configured, or the model that is there
  edgellm up -p orin -m Qwen3.5-4B:Q5_K_M  a profile and a model
  edgellm up -p cpu --set n_ctx=8192       one value of the plan
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "see `edgellm up --help`")


def explain(argv: list[str]) -> dict[str, object]:
    """Prints help and exits, raises UsageError, or understands what edge.options.read left to it."""
    parser = _Parser(
        prog="edgellm up",
        description="Plan, launch, warm and serve on one address until Ctrl-C or `edgellm stop`.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in UP:
        names = [option.short, option.name] if option.short else [option.name]
        if option.metavar is None:
            parser.add_argument(*names, action="store_true", help=option.help)
        elif option.many:
            parser.add_argument(*names, action="append", default=[], metavar=option.metavar, help=option.help)
        else:
            parser.add_argument(*names, metavar=option.metavar, help=option.help)
    return vars(parser.parse_args(argv))
