"""The options of `up`, once: the launcher parses by this table, typer's command is checked against it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """`metavar` None is a switch; `many` may be given several times."""

    name: str
    help: str
    short: str | None = None
    metavar: str | None = None
    many: bool = False

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


UP = (
    Option("--profile", "kind of board: auto, orin, thor, cuda, cpu, … or a file", short="-p", metavar="NAME"),
    Option("--model", "model to serve: NAME[:QUANT], a path, or a source", short="-m", metavar="[ID=]REF", many=True),
    Option("--listen", "address of the API (default 127.0.0.1:8080)", metavar="HOST:PORT", many=True),
    Option("--set", "set one value, e.g. --set n_ctx=8192", metavar="KEY=VALUE", many=True),
    Option("--engine", "engine id or a llama-server binary", metavar="ID|PATH"),
    Option("--state-dir", "keep everything under DIR", metavar="DIR"),
    Option("--yes", "build and fetch what the plan needs without asking", short="-y"),
    Option("--insecure", "serve other machines without a key"),
    Option("--json", "print events as JSON lines"),
)


def read(argv: list[str], table: tuple[Option, ...] = UP) -> dict[str, object] | None:
    """The values by `dest`, for a command line that has nothing to explain. None: ask edge.usage, which can explain.

    argparse costs as much as planning does, and is needed only for help and for errors.
    """
    by_name = {name: option for option in table for name in (option.name, option.short) if name}
    values: dict[str, object] = {o.dest: [] if o.many else None if o.metavar else False for o in table}
    words = iter(argv)
    for word in words:
        name, equals, attached = word.partition("=")
        option = by_name.get(name)
        if option is None or (equals and not name.startswith("--")):
            return None
        value: str | None = attached if equals else None
        if option.metavar is None:
            if equals:
                return None
            values[option.dest] = True
            continue
        value = value if equals else next(words, None)
        if value is None or (not equals and value.startswith("-")):
            return None
        held = values[option.dest]
        values[option.dest] = [*held, value] if isinstance(held, list) else value
    return values
