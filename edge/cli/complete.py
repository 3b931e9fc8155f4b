"""Shell completion of values: profiles, models, engines, boards and settings that exist here.

`edgellm --install-completion` sets it up. A completion reads what it needs and never fails: a shell that completes a
word has no place for a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Literal, get_args, get_origin

from edge.paths import Folders, folders

# What stands in a shell for itself. typer has zsh evaluate the names of a completion (`eval` in its script), and bash
# puts them into the command line as they are.
_SHELL_WORD = re.compile(r"[\w@%+=:,./][\w@%+=:,./-]*")


def known_profiles(incomplete: str) -> list[str]:
    """Return the profiles that complete a word on the command line."""
    from edge.config.profile import profile_names

    return completing(lambda: profile_names(_folders()), incomplete)


def known_models(incomplete: str) -> list[str]:
    """Return the models of the store, and the configured ones, that complete a word."""

    def names() -> Iterator[str]:
        from edge.config import load
        from edge.models.store import standard

        config = load(_folders(), {}, os.environ)
        yield from (model.id for model in config.models)
        store = standard(_folders(), config.store.dirs, os.environ)
        yield from (entry.id for entry in store.list() if entry.verdict is None)

    return completing(names, incomplete)


def fetched_models(incomplete: str) -> list[str]:
    """Return the catalogue's models, each with its quantizations, that complete a word."""

    def names() -> Iterator[str]:
        from edge.models.catalogue import load

        for row in load():
            yield row.name
            yield from (f"{row.name}:{quant.quant}" for quant in row.quants)

    return completing(names, incomplete)


def served_models(incomplete: str) -> list[str]:
    """Return the models of the running edgellm that complete a word."""

    def names() -> Iterable[str]:
        from edge.cli.client import Client, find

        return list(Client(find(os.environ, None)).status()["models"])

    return completing(names, incomplete)


def known_engines(incomplete: str) -> list[str]:
    """Return the installed engines that complete a word."""

    def names() -> Iterator[str]:
        from edge.engine.installed import catalogue

        document = catalogue(_folders().engines)
        yield from (entry["id"] for entry in document["engines"])
        yield from filter(None, [document["embedded"]])

    return completing(names, incomplete)


def known_boards(incomplete: str) -> list[str]:
    """Return the boards of profiles/boards.toml that complete a word."""

    def names() -> Iterable[str]:
        from edge.resources import data_dir, load_toml

        return [row["id"] for row in load_toml(data_dir("profiles") / "boards.toml")["board"]]

    return completing(names, incomplete)


def known_settings(incomplete: str) -> list[str]:
    """Return the keys of --set that complete a word, and the choices behind `KEY=`."""

    def names() -> Iterator[str]:
        from edge.config.load import KEYS

        for key, field in KEYS.items():
            base = field.type.__origin__
            choices = ["true", "false"] if base is bool else get_args(base) if get_origin(base) is Literal else [""]
            yield from (f"{key}={choice}" for choice in choices)

    return completing(names, incomplete)


def _folders() -> Folders:
    return folders(os.environ, None)


def completing(names: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    """Return those of the names that begin with a word; none where they cannot be read.

    A name that a shell would take for more than a word, or a command for an option, is left out: it may come from a
    file, a hub or a service that was taken over.
    """
    found: set[str] = set()
    # Any: a broken edgellm.toml or model file has its message in the command that is being typed.
    with suppress(Exception):
        found.update(name for name in names() if name.startswith(incomplete) and _SHELL_WORD.fullmatch(name))
    return sorted(found)
