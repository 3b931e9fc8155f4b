"""The typer application: one module a noun, each with `register(root)`. What is heavy is imported inside commands."""

from __future__ import annotations

import importlib

import typer

NOUNS: tuple[str, ...] = (
    "running",
    "timeline",
    "up",
)


def build() -> typer.Typer:
    root = typer.Typer(
        name="edgellm",
        help="Turns this machine into an LLM appliance: plan, launch, warm, watch and serve llama.cpp.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @root.callback()
    def _root() -> None:
        """Turns this machine into an LLM appliance."""

    for noun in NOUNS:
        importlib.import_module(f"edge.cli.{noun}").register(root)
    return root


def run(arguments: list[str]) -> int:
    result = build()(args=arguments, prog_name="edgellm", standalone_mode=False)
    return result if isinstance(result, int) else 0
